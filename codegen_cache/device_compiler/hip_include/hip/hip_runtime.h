// Device-side subset of the HIP runtime API, enough to compile the HIP source that TileLang emits.
//
// Written from the HIP API reference, the AMDGPU usage guide of LLVM and the list of clang builtins. Everything is
// expressed through clang builtins, so neither clang's HIP wrapper headers nor the ocml/ockl bitcode are needed.
// Only wave64 parts (gfx942, gfx950) and only the device pass are supported; there is no host API here.
#pragma once

#if !defined(__HIP__) || !defined(__HIP_DEVICE_COMPILE__)
#error "compile with -x hip --cuda-device-only"
#endif
#if !defined(__gfx942__) && !defined(__gfx950__)
#error "only gfx942 and gfx950 are supported"
#endif

#include <stddef.h>
#include <stdint.h>

// ---------------------------------------------------------------- keywords
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))

// __launch_bounds__(threads) or __launch_bounds__(threads, waves per SIMD).
#define TLHIP_LB1(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define TLHIP_LB2(threads, waves) TLHIP_LB1(threads) __attribute__((amdgpu_waves_per_eu(waves)))
#define TLHIP_LB_PICK(_1, _2, macro, ...) macro
#define __launch_bounds__(...) TLHIP_LB_PICK(__VA_ARGS__, TLHIP_LB2, TLHIP_LB1)(__VA_ARGS__)

#define TLHIP_FN static __forceinline__ __device__

// ---------------------------------------------------------------- vector types
// charN .. doubleN for N = 1..4. Lanes are plain members (TileLang takes their address); 2 and 4 lanes are aligned to
// their size so that a copy is one wide load or store, 3 lanes are packed as in HIP.
template <typename T, int N> struct tlhip_vec;
template <typename T> struct tlhip_vec<T, 1> {
  T x;
  __host__ __device__ tlhip_vec() = default;
  __host__ __device__ constexpr tlhip_vec(T a) : x(a) {}
};
template <typename T> struct __align__(2 * sizeof(T)) tlhip_vec<T, 2> {
  T x, y;
  __host__ __device__ tlhip_vec() = default;
  __host__ __device__ constexpr tlhip_vec(T a) : x(a), y(a) {}
  __host__ __device__ constexpr tlhip_vec(T a, T b) : x(a), y(b) {}
};
template <typename T> struct tlhip_vec<T, 3> {
  T x, y, z;
  __host__ __device__ tlhip_vec() = default;
  __host__ __device__ constexpr tlhip_vec(T a) : x(a), y(a), z(a) {}
  __host__ __device__ constexpr tlhip_vec(T a, T b, T c) : x(a), y(b), z(c) {}
};
template <typename T> struct __align__(4 * sizeof(T)) tlhip_vec<T, 4> {
  T x, y, z, w;
  __host__ __device__ tlhip_vec() = default;
  __host__ __device__ constexpr tlhip_vec(T a) : x(a), y(a), z(a), w(a) {}
  __host__ __device__ constexpr tlhip_vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
};

#define TLHIP_VEC(T, name)                                                                    \
  using name##1 = tlhip_vec<T, 1>;                                                            \
  using name##2 = tlhip_vec<T, 2>;                                                            \
  using name##3 = tlhip_vec<T, 3>;                                                            \
  using name##4 = tlhip_vec<T, 4>;                                                            \
  TLHIP_FN name##1 make_##name##1(T x) { return {x}; }                                        \
  TLHIP_FN name##2 make_##name##2(T x, T y) { return {x, y}; }                                \
  TLHIP_FN name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                        \
  TLHIP_FN name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
TLHIP_VEC(signed char, char)
TLHIP_VEC(unsigned char, uchar)
TLHIP_VEC(short, short)
TLHIP_VEC(unsigned short, ushort)
TLHIP_VEC(int, int)
TLHIP_VEC(unsigned int, uint)
TLHIP_VEC(long, long)
TLHIP_VEC(unsigned long, ulong)
TLHIP_VEC(long long, longlong)
TLHIP_VEC(unsigned long long, ulonglong)
TLHIP_VEC(float, float)
TLHIP_VEC(double, double)
#undef TLHIP_VEC

struct dim3 {
  uint32_t x, y, z;
  __host__ __device__ constexpr dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};

// ---------------------------------------------------------------- work-item indices
// gridDim is the hidden_block_count_{x,y,z} triple at the start of the implicit kernel arguments (code object v5+).
#define TLHIP_INDEX(name, X, Y, Z)                                                            \
  struct tlhip_##name {                                                                       \
    __declspec(property(get = get_x)) uint32_t x;                                             \
    __declspec(property(get = get_y)) uint32_t y;                                             \
    __declspec(property(get = get_z)) uint32_t z;                                             \
    __forceinline__ __device__ uint32_t get_x() const { return X; }                           \
    __forceinline__ __device__ uint32_t get_y() const { return Y; }                           \
    __forceinline__ __device__ uint32_t get_z() const { return Z; }                           \
    __forceinline__ __device__ operator dim3() const { return dim3(X, Y, Z); }                \
  };                                                                                          \
  extern const __device__ __attribute__((weak)) tlhip_##name name;
#define TLHIP_BLOCKS(i) (((const __attribute__((address_space(4))) uint32_t *)__builtin_amdgcn_implicitarg_ptr())[i])
TLHIP_INDEX(threadIdx, __builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),
            __builtin_amdgcn_workitem_id_z())
TLHIP_INDEX(blockIdx, __builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),
            __builtin_amdgcn_workgroup_id_z())
TLHIP_INDEX(blockDim, __builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(),
            __builtin_amdgcn_workgroup_size_z())
TLHIP_INDEX(gridDim, TLHIP_BLOCKS(0), TLHIP_BLOCKS(1), TLHIP_BLOCKS(2))
#undef TLHIP_INDEX
static constexpr __device__ int warpSize = 64;

// ---------------------------------------------------------------- bits
TLHIP_FN int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
TLHIP_FN unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
TLHIP_FN float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
TLHIP_FN float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
TLHIP_FN double __hiloint2double(int hi, int lo) {
  return __builtin_bit_cast(double, ((uint64_t)(uint32_t)hi << 32) | (uint32_t)lo);
}
TLHIP_FN int __popc(unsigned x) { return __builtin_popcount(x); }
TLHIP_FN int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
TLHIP_FN int __clz(int x) { return __builtin_clzg((unsigned)x, 32); }
TLHIP_FN int __clzll(long long x) { return __builtin_clzg((unsigned long long)x, 64); }
template <typename T> TLHIP_FN T __ldg(const T *p) { return *p; }

// ---------------------------------------------------------------- arithmetic
// f32 builtins below become one LLVM intrinsic each; the AMDGPU backend expands them with denormal handling and HIP's
// default accuracy. Of the fast __name() variants __exp*f and __log2f are the raw instructions (v_exp_f32 is
// 2^x, v_log_f32 is log2(x)); HIP compiles __logf, __log10f and __fdividef like the accurate functions.
#define TLHIP_MATH1(name)                                                                     \
  TLHIP_FN float name##f(float x) { return __builtin_##name##f(x); }                          \
  TLHIP_FN double name(double x) { return __builtin_##name(x); }
TLHIP_MATH1(fabs)
TLHIP_MATH1(floor)
TLHIP_MATH1(ceil)
TLHIP_MATH1(trunc)
TLHIP_MATH1(round)
TLHIP_MATH1(rint)
TLHIP_MATH1(nearbyint)
TLHIP_MATH1(sqrt)
#undef TLHIP_MATH1
#define TLHIP_MATH2(name)                                                                     \
  TLHIP_FN float name##f(float x, float y) { return __builtin_##name##f(x, y); }              \
  TLHIP_FN double name(double x, double y) { return __builtin_##name(x, y); }
TLHIP_MATH2(fmax)
TLHIP_MATH2(fmin)
TLHIP_MATH2(fmod)
TLHIP_MATH2(copysign)
#undef TLHIP_MATH2
#define HUGE_VALF __builtin_huge_valf()
#define HUGE_VAL __builtin_huge_val()
#define NAN __builtin_nanf("")
TLHIP_FN float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
TLHIP_FN double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
TLHIP_FN float exp2f(float x) { return __builtin_exp2f(x); }
TLHIP_FN float expf(float x) { return __builtin_expf(x); }
TLHIP_FN float exp10f(float x) { return __builtin_exp10f(x); }
TLHIP_FN float log2f(float x) { return __builtin_log2f(x); }
TLHIP_FN float logf(float x) { return __builtin_logf(x); }
TLHIP_FN float log10f(float x) { return __builtin_log10f(x); }
TLHIP_FN float rsqrtf(float x) { // v_rsq_f32 flushes denormals: scale them by 2^24, the result by 2^12
  const bool tiny = x < 0x1p-126f;
  const float r = __builtin_amdgcn_rsqf(tiny ? x * 0x1p24f : x);
  return tiny ? r * 0x1p12f : r;
}
TLHIP_FN float __exp2f(float x) { return __builtin_amdgcn_exp2f(x); }
TLHIP_FN float __expf(float x) { return __builtin_amdgcn_exp2f(x * 1.44269504088896340736f); }  // log2(e)
TLHIP_FN float __exp10f(float x) { return __builtin_amdgcn_exp2f(x * 3.32192809488736234787f); } // log2(10)
TLHIP_FN float __log2f(float x) { return __builtin_amdgcn_logf(x); }
TLHIP_FN float __logf(float x) { return __builtin_logf(x); }
TLHIP_FN float __log10f(float x) { return __builtin_log10f(x); }
TLHIP_FN float __sinf(float x) { return __builtin_sinf(x); } // range reduction and v_sin_f32, in the backend
TLHIP_FN float __cosf(float x) { return __builtin_cosf(x); }
TLHIP_FN float __fdividef(float x, float y) { return x / y; }
TLHIP_FN bool isnan(float x) { return __builtin_isnan(x); }
TLHIP_FN bool isinf(float x) { return __builtin_isinf(x); }
TLHIP_FN bool isfinite(float x) { return __builtin_isfinite(x); }
TLHIP_FN int abs(int x) { return __builtin_abs(x); }
TLHIP_FN long abs(long x) { return __builtin_labs(x); }
TLHIP_FN float abs(float x) { return __builtin_fabsf(x); }

// 1 - 2 / (e^2|x| + 1), which loses the digits of small x: there the first terms of the series.
TLHIP_FN float tanhf(float x) {
  const float a = __builtin_fabsf(x), s = x * x;
  const float large = 1.0f - 2.0f / (__builtin_expf(2.0f * a) + 1.0f);
  const float small = a * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * -0.0539682540f)));
  return __builtin_copysignf(a < 0.25f ? small : large, x);
}

// Functions with no backend expansion stay calls into AMD's math library; without its bitcode the link step names them.
#define TLHIP_OCML1(name)                                                                     \
  extern "C" __device__ __attribute__((const)) float __ocml_##name##_f32(float);              \
  TLHIP_FN float name##f(float x) { return __ocml_##name##_f32(x); }
TLHIP_OCML1(sin)
TLHIP_OCML1(cos)
TLHIP_OCML1(tan)
TLHIP_OCML1(sinh)
TLHIP_OCML1(cosh)
TLHIP_OCML1(atan)
TLHIP_OCML1(erf)
#undef TLHIP_OCML1
extern "C" __device__ __attribute__((const)) float __ocml_pow_f32(float, float);
TLHIP_FN float powf(float x, float y) { return __ocml_pow_f32(x, y); }

// min and max: both operands of one type, or int with unsigned. Of float and double a NaN operand gives the other one; of
// half_t and bfloat16_t it gives the second one (a plain comparison, as in HIP).
template <typename T> __forceinline__ __host__ __device__ constexpr T max(T x, T y) { return x > y ? x : y; }
template <typename T> __forceinline__ __host__ __device__ constexpr T min(T x, T y) { return x < y ? x : y; }
TLHIP_FN float max(float x, float y) { return __builtin_fmaxf(x, y); }
TLHIP_FN float min(float x, float y) { return __builtin_fminf(x, y); }
TLHIP_FN double max(double x, double y) { return __builtin_fmax(x, y); }
TLHIP_FN double min(double x, double y) { return __builtin_fmin(x, y); }
TLHIP_FN unsigned max(int x, unsigned y) { return max((unsigned)x, y); }
TLHIP_FN unsigned min(int x, unsigned y) { return min((unsigned)x, y); }
TLHIP_FN unsigned max(unsigned x, int y) { return max(x, (unsigned)y); }
TLHIP_FN unsigned min(unsigned x, int y) { return min(x, (unsigned)y); }

// ---------------------------------------------------------------- synchronisation
TLHIP_FN void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
TLHIP_FN void __threadfence_block() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup"); }
TLHIP_FN void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
TLHIP_FN void __threadfence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }

// ---------------------------------------------------------------- wave votes and shuffles (64 lanes)
TLHIP_FN unsigned __lane_id() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)); }
TLHIP_FN unsigned long long __ballot(int p) { return __builtin_amdgcn_ballot_w64(p != 0); }
TLHIP_FN unsigned long long __activemask() { return __ballot(1); }
TLHIP_FN int __any(int p) { return __ballot(p) != 0; }
TLHIP_FN int __all(int p) { return __ballot(p == 0) == 0; }

// Read `value` of the given lane (0..63). ds_bpermute moves 32 bits and takes a byte address, 4 per lane.
template <typename T> TLHIP_FN T tlhip_from_lane(T value, int lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 32 or 64 bits");
  if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute(lane << 2, __builtin_bit_cast(int, value)));
  } else {
    struct Halves { int lo, hi; } h = __builtin_bit_cast(Halves, value);
    h.lo = __builtin_amdgcn_ds_bpermute(lane << 2, h.lo);
    h.hi = __builtin_amdgcn_ds_bpermute(lane << 2, h.hi);
    return __builtin_bit_cast(T, h);
  }
}
// `width` (a power of two) splits the wave into segments. A lane whose source is outside keeps its own value; __shfl wraps,
// and __shfl_xor may also read an earlier segment, as in CUDA and HIP.
#define TLHIP_SHFL(T)                                                                         \
  TLHIP_FN T __shfl(T v, int src, int width = warpSize) {                                     \
    int lane = __lane_id(), base = lane & -width;                                             \
    return tlhip_from_lane(v, base + (src & (width - 1)));                                    \
  }                                                                                           \
  TLHIP_FN T __shfl_xor(T v, int mask, int width = warpSize) {                                \
    int lane = __lane_id(), src = lane ^ mask, end = (lane & -width) + width;                 \
    return tlhip_from_lane(v, src < end ? src : lane);                                        \
  }                                                                                           \
  TLHIP_FN T __shfl_up(T v, unsigned delta, int width = warpSize) {                           \
    int lane = __lane_id(), src = lane - (int)delta, base = lane & -width;                    \
    return tlhip_from_lane(v, src < base ? lane : src);                                       \
  }                                                                                           \
  TLHIP_FN T __shfl_down(T v, unsigned delta, int width = warpSize) {                         \
    int lane = __lane_id(), src = lane + (int)delta, end = (lane & -width) + width;           \
    return tlhip_from_lane(v, src < end ? src : lane);                                        \
  }
TLHIP_SHFL(int)
TLHIP_SHFL(unsigned)
TLHIP_SHFL(long)
TLHIP_SHFL(unsigned long)
TLHIP_SHFL(long long)
TLHIP_SHFL(unsigned long long)
TLHIP_SHFL(float)
TLHIP_SHFL(double)
#undef TLHIP_SHFL

// ---------------------------------------------------------------- atomics: relaxed, device ("agent") scope
#define TLHIP_ATOMIC(name, op, T)                                                             \
  TLHIP_FN T name(T *p, T v) { return __hip_atomic_##op(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
#define TLHIP_ATOMIC_INT(T)                                                                   \
  TLHIP_ATOMIC(atomicAdd, fetch_add, T)                                                       \
  TLHIP_ATOMIC(atomicMax, fetch_max, T)                                                       \
  TLHIP_ATOMIC(atomicMin, fetch_min, T)                                                       \
  TLHIP_ATOMIC(atomicOr, fetch_or, T)                                                         \
  TLHIP_ATOMIC(atomicAnd, fetch_and, T)                                                       \
  TLHIP_ATOMIC(atomicXor, fetch_xor, T)                                                       \
  TLHIP_ATOMIC(atomicExch, exchange, T)                                                       \
  TLHIP_FN T atomicCAS(T *p, T expected, T v) {                                               \
    __hip_atomic_compare_exchange_strong(p, &expected, v, __ATOMIC_RELAXED, __ATOMIC_RELAXED, \
                                         __HIP_MEMORY_SCOPE_AGENT);                           \
    return expected;                                                                          \
  }
TLHIP_ATOMIC_INT(int)
TLHIP_ATOMIC_INT(unsigned)
TLHIP_ATOMIC_INT(unsigned long)
TLHIP_ATOMIC_INT(unsigned long long)
TLHIP_ATOMIC(atomicAdd, fetch_add, float)
TLHIP_ATOMIC(atomicMax, fetch_max, float)
TLHIP_ATOMIC(atomicMin, fetch_min, float)
TLHIP_ATOMIC(atomicAdd, fetch_add, double)
#undef TLHIP_ATOMIC_INT
#undef TLHIP_ATOMIC

// Declared because tl_templates/hip/debug.h names it; calling it needs AMD's ockl bitcode.
extern "C" __device__ int printf(const char *format, ...);

// ---------------------------------------------------------------- the few std:: names the templates use
namespace std {
using ::max;
using ::min;
using ::uint16_t;
using ::uint32_t;
using ::uint8_t;
template <typename A, typename B> struct pair { A first; B second; };
template <typename A, typename B> __host__ __device__ constexpr pair<A, B> make_pair(A a, B b) { return {a, b}; }
} // namespace std
