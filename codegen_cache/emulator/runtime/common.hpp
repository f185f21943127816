// What CUDA and HIP sources have in common: qualifiers, indices, barriers, shuffles, atomics, scalar functions, and the
// part of TileLang's templates that is built on them. Written from the CUDA and HIP references; shares no code with them.
#pragma once
#include "vectors.hpp"
#include <algorithm>
#include <type_traits>

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__
#define __restrict__
#define TL_DEVICE inline

#define threadIdx (tw::thread_index())
#define blockIdx (tw::block_index())
#define blockDim (tw::block_dim())
#define gridDim (tw::grid_dim())

#ifdef TW_HIP
#define TW_WARP 64
#else
#define TW_WARP 32
#endif
static constexpr int warpSize = TW_WARP;

// ---- barriers ----------------------------------------------------------------------------------------------------------
inline void __syncthreads() { tw::block_barrier(); }
inline void __syncwarp(unsigned = ~0u) { tw::warp_sync(); }
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- shuffles: a lane whose source is outside its segment of `width` lanes keeps its own value ------------------------------
namespace tw {
template <class T> T from_lane(T value, int lane) {
  shuffle(&value, sizeof value, lane);
  return value;
}
inline int lane_down(int delta, int width) {
  const int lane = lane_index(), source = lane + delta;
  return source < (lane & -width) + width ? source : lane;
}
inline int lane_up(int delta, int width) {
  const int lane = lane_index(), source = lane - delta;
  return source >= (lane & -width) ? source : lane;
}
inline int lane_xor(int mask, int width) {
  const int lane = lane_index(), source = lane ^ mask;
  return source < (lane & -width) + width ? source : lane;
}
inline int lane_at(int source, int width) { return (lane_index() & -width) + (source & (width - 1)); }
} // namespace tw
template <class T> T __shfl(T v, int source, int width = warpSize) { return tw::from_lane(v, tw::lane_at(source, width)); }
template <class T> T __shfl_xor(T v, int mask, int width = warpSize) { return tw::from_lane(v, tw::lane_xor(mask, width)); }
template <class T> T __shfl_down(T v, int d, int width = warpSize) { return tw::from_lane(v, tw::lane_down(d, width)); }
template <class T> T __shfl_up(T v, int d, int width = warpSize) { return tw::from_lane(v, tw::lane_up(d, width)); }
template <class T> T __shfl_sync(unsigned, T v, int s, int width = warpSize) { return __shfl(v, s, width); }
template <class T> T __shfl_xor_sync(unsigned, T v, int m, int width = warpSize) { return __shfl_xor(v, m, width); }
template <class T> T __shfl_down_sync(unsigned, T v, int d, int width = warpSize) { return __shfl_down(v, d, width); }
template <class T> T __shfl_up_sync(unsigned, T v, int d, int width = warpSize) { return __shfl_up(v, d, width); }
#ifdef TW_HIP
inline uint64_t __ballot(int p) { return tw::ballot(p); }
inline int __any(int p) { return tw::ballot(p) != 0; }
inline int __all(int p) { return tw::ballot(!p) == 0; }
#else
inline unsigned __ballot_sync(unsigned, int p) { return unsigned(tw::ballot(p)); }
inline int __any_sync(unsigned, int p) { return tw::ballot(p) != 0; }
inline int __all_sync(unsigned, int p) { return tw::ballot(!p) == 0; }
inline unsigned __activemask() { return ~0u; }
#endif

// ---- atomics -----------------------------------------------------------------------------------------------------------
namespace tw {
template <class T, class Change> __attribute__((no_sanitize("thread"))) T atomic(T *p, Change change) {
  atomic_access(p, sizeof(T));
  const T old = *p;
  *p = change(old);
  return old;
}
} // namespace tw
#define TW_ATOMIC(Name, name, expression)                                                                        \
  template <class T, class U> T name(T *p, U value) {                                                            \
    return tw::atomic(p, [=](T old) { const T v = T(value); return T(expression); });                            \
  }                                                                                                              \
  template <class T, class U> void Name(T *p, U value, int = 0) { name(p, value); }                              \
  template <class T, class U> void Name(T &p, U value, int = 0) { name(&p, value); }                             \
  template <class T, class U> T Name##Ret(T *p, U value, int = 0) { return name(p, value); }                     \
  template <class T, class U> T Name##Ret(T &p, U value, int = 0) { return name(&p, value); }
TW_ATOMIC(AtomicAdd, atomicAdd, old + v)
TW_ATOMIC(AtomicMax, atomicMax, old < v ? v : old)
TW_ATOMIC(AtomicMin, atomicMin, v < old ? v : old)
TW_ATOMIC(AtomicOr, atomicOr, old | v)
TW_ATOMIC(AtomicAnd, atomicAnd, old &v)
TW_ATOMIC(AtomicExchange, atomicExch, v)
#undef TW_ATOMIC

// ---- scalar functions ---------------------------------------------------------------------------------------------------
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define HIPRT_INF_F INFINITY
#define HIPRT_NAN_F NAN
template <class T> constexpr T max(T a, T b) { return a > b ? a : b; }
template <class T> constexpr T min(T a, T b) { return a < b ? a : b; }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline float __expf(float x) { return expf(x); } // the fast variants are no less exact here
inline float __exp2f(float x) { return exp2f(x); }
inline float __exp10f(float x) { return powf(10, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __frsqrt_rn(float x) { return 1 / sqrtf(x); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0), 1); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline uint __float_as_uint(float x) { return __builtin_bit_cast(uint, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(uint x) { return __builtin_bit_cast(float, x); }
inline int __popc(uint x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(uint(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T> T __ldg(const T *p) { return *p; }
#define TW_SMALL_FLOAT(T)                                                                            \
  inline T hexp(T x) { return expf(x); }                                                             \
  inline T hexp2(T x) { return exp2f(x); }                                                           \
  inline T hlog(T x) { return logf(x); }                                                             \
  inline T hlog2(T x) { return log2f(x); }                                                           \
  inline T hsqrt(T x) { return sqrtf(x); }                                                           \
  inline T hrsqrt(T x) { return 1 / sqrtf(x); }                                                      \
  inline T hfloor(T x) { return floorf(x); }                                                         \
  inline T hceil(T x) { return ceilf(x); }                                                           \
  inline T htrunc(T x) { return truncf(x); }                                                         \
  inline T htanh(T x) { return tanhf(x); }                                                           \
  inline T __habs(T x) { return fabsf(x); }                                                          \
  inline T __hfma(T a, T b, T c) { return fmaf(a, b, c); }
TW_SMALL_FLOAT(half_t)
TW_SMALL_FLOAT(bfloat16_t)
#undef TW_SMALL_FLOAT

// ---- TileLang's templates -------------------------------------------------------------------------------------------------
namespace tl {
using ::max;
using ::min;
template <class V, class E> V broadcast(E e) {
  V v;
  for (size_t i = 0; i < sizeof(V) / sizeof(E); i++) memcpy((char *)&v + i * sizeof(E), &e, sizeof(E));
  return v;
}
template <class V, class E, class... Rest> V make_vec(E first, Rest... rest) {
  const E all[] = {first, E(rest)...};
  V v;
  static_assert(sizeof v == sizeof all);
  memcpy(&v, all, sizeof v);
  return v;
}
template <class T> T clamp(T v, T low, T high) { return ::min(::max(v, low), high); }
template <class T> T fast_max(T a, T b) { return ::max(a, b); }
template <class T> T fast_min(T a, T b) { return ::min(a, b); }
template <class T> bool Any(T *a, int n) { return std::any_of(a, a + n, [](T x) { return bool(x); }); }
template <class T> bool All(T *a, int n) { return std::all_of(a, a + n, [](T x) { return bool(x); }); }
#define TW_PAIRS(name, expression)                                                                   \
  inline float2 name(float2 a, float2 b) {                                                           \
    auto f = [](float x, float y) -> float { return expression; };                                   \
    return {f(a.x, b.x), f(a.y, b.y)};                                                               \
  }
TW_PAIRS(add2, x + y)
TW_PAIRS(sub2, x - y)
TW_PAIRS(mul2, x *y)
TW_PAIRS(max2, fmaxf(x, y))
TW_PAIRS(min2, fminf(x, y))
#undef TW_PAIRS
inline float2 fma2(float2 a, float2 b, float2 c) { return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)}; }
inline float2 abs2(float2 a) { return {fabsf(a.x), fabsf(a.y)}; }
template <class T> T shfl_xor_sync(unsigned, T v, int m) { return __shfl_xor(v, m); }
template <class T> T shfl_down_sync(unsigned, T v, int d) { return __shfl_down(v, d); }
template <class T> T shfl_up_sync(unsigned, T v, int d) { return __shfl_up(v, d); }
template <class T> T shfl_sync(unsigned, T v, int s) { return __shfl(v, s); }
template <class T> T shfl_xor(T v, int m) { return __shfl_xor(v, m); }
template <class T> T shfl_down(T v, int d) { return __shfl_down(v, d); }
template <class T> T shfl_up(T v, int d) { return __shfl_up(v, d); }
template <class T> T shfl(T v, int s) { return __shfl(v, s); }

#define TW_REDUCTION(name, expression)                                                               \
  struct name {                                                                                      \
    template <class T> T operator()(T x, T y) const { return expression; }                           \
  };
TW_REDUCTION(SumOp, x + y)
TW_REDUCTION(MaxOp, ::max(x, y))
TW_REDUCTION(MinOp, ::min(x, y))
TW_REDUCTION(BitAndOp, T(x &y))
TW_REDUCTION(BitOrOp, T(x | y))
TW_REDUCTION(BitXorOp, T(x ^ y))
#undef TW_REDUCTION
template <class Op> float warp_reduce(float v, Op op) {
  for (int d = TW_WARP / 2; d; d /= 2) v = op(v, __shfl_xor(v, d));
  return v;
}
template <class T, class Op> T warp_reduce(T v, Op op) {
  for (int d = TW_WARP / 2; d; d /= 2) v = op(v, __shfl_xor(v, d));
  return v;
}
template <class T> T warp_reduce_sum(T v) { return warp_reduce(v, SumOp()); }
template <class T> T warp_reduce_max(T v) { return warp_reduce(v, MaxOp()); }
template <class T> T warp_reduce_min(T v) { return warp_reduce(v, MinOp()); }

// How the participants of a reduction that are in different warps meet.
struct SyncThreadsBarrier {
  template <int = 0> static void sync() { __syncthreads(); }
};
template <int threads> struct NamedBarrier {
  template <int id = 1> static void sync() { tw::named_barrier(id, threads, true); }
};

// A butterfly over threads / scale participants that are `scale` threads apart: partners in one warp exchange by shuffle,
// others through `scratch`.
template <class Op, int threads, int scale, int offset, class Barrier, int batch, int stride> struct Butterfly {
  template <class T> static void run(T *x, T *scratch) {
    if constexpr (threads > scale) {
      constexpr int partner = threads / 2;
      if constexpr (partner >= TW_WARP) {
        const int i = int(threadIdx.x) - offset;
        Barrier::template sync<1>();
        for (int n = 0; n < batch; n++) scratch[i + n * stride] = x[n];
        Barrier::template sync<2>();
        for (int n = 0; n < batch; n++) x[n] = Op()(x[n], scratch[(i ^ partner) + n * stride]);
      } else {
        for (int n = 0; n < batch; n++) x[n] = Op()(x[n], __shfl_xor(x[n], partner));
      }
      Butterfly<Op, partner, scale, offset, Barrier, batch, stride>::run(x, scratch);
    }
  }
};
template <class Op, int threads, int scale, int offset, class Barrier, int batch, int stride> struct Reduction {
  template <class T> static T run(T x, T *scratch = nullptr) {
    Butterfly<Op, threads, scale, offset, Barrier, 1, 0>::run(&x, scratch);
    return x;
  }
  template <class T> static void run_batch(T *x, T *scratch = nullptr) {
    Butterfly<Op, threads, scale, offset, Barrier, batch, stride>::run(x, scratch);
  }
};
#ifdef TW_HIP
template <class Op, int threads, int scale, int offset = 0, int batch = 1, int stride = 0>
struct AllReduce : Reduction<Op, threads, scale, offset, SyncThreadsBarrier, batch, stride> {};
#else
template <class Op, int threads, int scale, int offset = 0, class Barrier = SyncThreadsBarrier, int batch = 1, int stride = 0>
struct AllReduce : Reduction<Op, threads, scale, offset, Barrier, batch, stride> {};
#endif

template <int panel> dim3 swizzled_block(bool by_rows) { // the grid in panels of rows (or columns), back and forth
  const dim3 b = blockIdx, g = gridDim;
  const uint along = by_rows ? g.x : g.y, across = by_rows ? g.y : g.x;
  const uint linear = b.x + b.y * g.x, size = panel * along, which = linear / size, inside = linear % size;
  const uint total = along * across, last = (total + size - 1) / size - 1;
  const uint depth = which < last ? panel : (total - which * size) / along;
  const uint position = inside / depth, a = which & 1 ? along - 1 - position : position, c = inside % depth + which * panel;
  return by_rows ? dim3{a, c, b.z} : dim3{c, a, b.z};
}
template <int panel> dim3 rasterization2DRow() { return swizzled_block<panel>(true); }
template <int panel> dim3 rasterization2DColumn() { return swizzled_block<panel>(false); }
} // namespace tl
