// The vector types of CUDA and HIP, and how their values are made and converted.
#pragma once
#include "floats.hpp"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

#define TW_VECTORS(T, name)                                                                          \
  struct name##1 { T x; };                                                                           \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                                 \
  struct name##3 { T x, y, z; };                                                                     \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; };                 \
  inline name##1 make_##name##1(T x) { return {x}; }                                                 \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                         \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                 \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
TW_VECTORS(signed char, char)
TW_VECTORS(unsigned char, uchar)
TW_VECTORS(short, short)
TW_VECTORS(unsigned short, ushort)
TW_VECTORS(int, int)
TW_VECTORS(unsigned int, uint)
TW_VECTORS(long, long)
TW_VECTORS(unsigned long, ulong)
TW_VECTORS(long long, longlong)
TW_VECTORS(unsigned long long, ulonglong)
TW_VECTORS(float, float)
TW_VECTORS(double, double)
#undef TW_VECTORS

struct alignas(4) half2 { half_t x, y; };
struct alignas(4) __nv_bfloat162 { bfloat16_t x, y; };
using __half2 = half2;
using half = half_t;

#define TW_FP8_VECTORS(name, T)                                                                      \
  struct alignas(2) name##_2_t { T x, y; };                                                          \
  struct alignas(4) name##_4_t { T x, y, z, w; };                                                    \
  struct alignas(8) name##_8_t { name##_4_t x, y; };                                                 \
  struct alignas(16) name##_16_t { name##_8_t x, y; };                                               \
  struct alignas(32) name##_32_t { name##_16_t x, y; };                                              \
  inline name##_2_t make_##name##_2_t(T x, T y) { return {x, y}; }                                   \
  inline name##_4_t make_##name##_4_t(T x, T y, T z, T w) { return {x, y, z, w}; }                   \
  inline name##_8_t make_##name##_8_t(T a, T b, T c, T d, T e, T f, T g, T h) { return {{a, b, c, d}, {e, f, g, h}}; }
TW_FP8_VECTORS(fp8_e4, fp8_e4_t)
TW_FP8_VECTORS(fp8_e5, fp8_e5_t)
#undef TW_FP8_VECTORS

// Vectors of narrow elements, packed into wider ones from the lowest byte on.
inline uint make_uint(uchar a, uchar b, uchar c, uchar d) { return a | b << 8 | c << 16 | uint(d) << 24; }
inline int make_int(signed char a, signed char b, signed char c, signed char d) {
  return int(make_uint(uchar(a), uchar(b), uchar(c), uchar(d)));
}
inline uint2 make_uint2(uchar a, uchar b, uchar c, uchar d, uchar e, uchar f, uchar g, uchar h) {
  return {make_uint(a, b, c, d), make_uint(e, f, g, h)};
}
inline uint4 make_uint4(uchar a0, uchar a1, uchar a2, uchar a3, uchar b0, uchar b1, uchar b2, uchar b3, uchar c0,
                        uchar c1, uchar c2, uchar c3, uchar d0, uchar d1, uchar d2, uchar d3) {
  return {make_uint(a0, a1, a2, a3), make_uint(b0, b1, b2, b3), make_uint(c0, c1, c2, c3), make_uint(d0, d1, d2, d3)};
}
inline uint4 make_uint4(ushort a, ushort b, ushort c, ushort d, ushort e, ushort f, ushort g, ushort h) {
  return {a | uint(b) << 16, c | uint(d) << 16, e | uint(f) << 16, g | uint(h) << 16};
}

inline float2 __half22float2(half2 v) { return {v.x, v.y}; }
inline half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
inline half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline float __half2float(half_t v) { return v; }
inline half_t __float2half_rn(float v) { return v; }
inline half_t __float2half(float v) { return v; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {v.x, v.y}; }
inline float __bfloat162float(bfloat16_t v) { return v; }
inline bfloat16_t __float2bfloat16(float v) { return v; }

namespace tw {
template <class T> unsigned packed_pair(T a, T b) { return a.bits | unsigned(b.bits) << 16; }
} // namespace tw
inline unsigned __pack_half2(half_t a, half_t b) { return tw::packed_pair(a, b); }
inline unsigned __pack_half2(bfloat16_t a, bfloat16_t b) { return tw::packed_pair(a, b); }
inline unsigned __pack_bfloat162(bfloat16_t a, bfloat16_t b) { return tw::packed_pair(a, b); }
inline unsigned __pack_nv_bfloat162(bfloat16_t a, bfloat16_t b) { return tw::packed_pair(a, b); }

// fp8 as CUDA spells it
typedef uint8_t __nv_fp8_storage_t;
typedef uint16_t __nv_fp8x2_storage_t;
typedef uint32_t __nv_fp8x4_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t s, __nv_fp8_interpretation_t i) {
  const tw::Type type = i == __NV_E4M3 ? tw::Type::E4M3 : tw::Type::E5M2;
  return uint16_t(tw::to_fp8(type, v.x, s == __NV_SATFINITE) | tw::to_fp8(type, v.y, s == __NV_SATFINITE) << 8);
}
inline half2 __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t v, __nv_fp8_interpretation_t i) {
  const tw::Type type = i == __NV_E4M3 ? tw::Type::E4M3 : tw::Type::E5M2;
  return {tw::from_fp8(type, uint8_t(v)), tw::from_fp8(type, uint8_t(v >> 8))};
}
