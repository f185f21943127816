// Between memory and vectors: every storage type, widened on the way in and rounded once on the way out.
//
// `_part` reads or writes the first n lanes, 0 <= n <= TW_LANES, and touches no memory beyond them; lanes not read
// are 0. `tw_one_` and `tw_put_` are the same for one element.
#ifndef TW_MEMORY_H
#define TW_MEMORY_H

#include "vector.h"

// Elements of 4, 2 and 1 bytes as they are

TW_INLINE tw_i32 tw_words(const void *p) {
  tw_i32 x;
  memcpy(&x, p, sizeof x);
  return x;
}

TW_INLINE tw_u16 tw_halves(const uint16_t *p) {
  tw_u16 x;
  memcpy(&x, p, sizeof x);
  return x;
}

TW_INLINE tw_u8 tw_bytes(const uint8_t *p) {
  tw_u8 x;
  memcpy(&x, p, sizeof x);
  return x;
}

#if defined(TW_AVX512)
TW_INLINE __mmask16 tw_first(int n) { return (__mmask16)((1u << n) - 1); }
TW_INLINE tw_i32 tw_words_part(const void *p, int n) { return (tw_i32)_mm512_maskz_loadu_epi32(tw_first(n), p); }
TW_INLINE tw_u16 tw_halves_part(const uint16_t *p, int n) { return (tw_u16)_mm256_maskz_loadu_epi16(tw_first(n), p); }
TW_INLINE tw_u8 tw_bytes_part(const uint8_t *p, int n) { return (tw_u8)_mm_maskz_loadu_epi8(tw_first(n), p); }
TW_INLINE void tw_put_words(void *p, tw_i32 x, int n) { _mm512_mask_storeu_epi32(p, tw_first(n), (__m512i)x); }
TW_INLINE void tw_put_halves(uint16_t *p, tw_u16 x, int n) { _mm256_mask_storeu_epi16(p, tw_first(n), (__m256i)x); }
TW_INLINE void tw_put_bytes(uint8_t *p, tw_u8 x, int n) { _mm_mask_storeu_epi8(p, tw_first(n), (__m128i)x); }
#else
#if defined(TW_AVX2)
TW_INLINE tw_i32 tw_words_part(const void *p, int n) {
  return (tw_i32)_mm256_maskload_epi32(p, (__m256i)(tw_iota() < n));
}
TW_INLINE void tw_put_words(void *p, tw_i32 x, int n) {
  _mm256_maskstore_epi32(p, (__m256i)(tw_iota() < n), (__m256i)x);
}
#else
TW_INLINE tw_i32 tw_words_part(const void *p, int n) {
  tw_i32 x = {0};
  for (int i = 0; i < n && i < TW_LANES; i++) memcpy((char *)&x + 4 * i, (const char *)p + 4 * i, 4);
  return x;
}
TW_INLINE void tw_put_words(void *p, tw_i32 x, int n) {
  for (int i = 0; i < n && i < TW_LANES; i++) memcpy((char *)p + 4 * i, (const char *)&x + 4 * i, 4);
}
#endif
TW_INLINE tw_u16 tw_halves_part(const uint16_t *p, int n) {
  uint16_t x[TW_LANES] = {0};
  for (int i = 0; i < n && i < TW_LANES; i++) x[i] = p[i];
  return tw_halves(x);
}
TW_INLINE tw_u8 tw_bytes_part(const uint8_t *p, int n) {
  uint8_t x[TW_LANES] = {0};
  for (int i = 0; i < n && i < TW_LANES; i++) x[i] = p[i];
  return tw_bytes(x);
}
TW_INLINE void tw_put_halves(uint16_t *p, tw_u16 x, int n) {
  for (int i = 0; i < n && i < TW_LANES; i++) p[i] = x[i];
}
TW_INLINE void tw_put_bytes(uint8_t *p, tw_u8 x, int n) {
  for (int i = 0; i < n && i < TW_LANES; i++) p[i] = x[i];
}
#endif

// Between widths of integer lanes. GCC's own conversions take halves of vectors apart and put them together again.

TW_INLINE tw_u32 tw_words_of_halves(tw_u16 x) {
#if defined(TW_AVX512)
  return (tw_u32)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(TW_AVX2)
  return (tw_u32)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, tw_u32);
#endif
}

TW_INLINE tw_u32 tw_words_of_bytes(tw_u8 x) {
#if defined(TW_AVX512)
  return (tw_u32)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(TW_AVX2)
  return (tw_u32)_mm256_cvtepu8_epi32(_mm_set1_epi64x((int64_t)x));
#else
  return __builtin_convertvector(x, tw_u32);
#endif
}

TW_INLINE tw_u16 tw_halves_of_words(tw_u32 x) {  // the lower ones
#if defined(TW_AVX512)
  return (tw_u16)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(TW_AVX2)
  const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xffff));
  return (tw_u16)_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
#else
  return __builtin_convertvector(x, tw_u16);
#endif
}

TW_INLINE tw_u8 tw_bytes_of_words(tw_u32 x) {
#if defined(TW_AVX512)
  return (tw_u8)_mm512_cvtepi32_epi8((__m512i)x);
#else
  return __builtin_convertvector(x, tw_u8);
#endif
}

// What they mean

TW_INLINE tw_f32 tw_widen_bfloat16(tw_u16 x) { return (tw_f32)(tw_words_of_halves(x) << 16); }

TW_INLINE tw_f32 tw_widen_float16(tw_u16 x) {
#if defined(TW_AVX512)
  return _mm512_cvtph_ps((__m256i)x);
#elif defined(TW_AVX2) && defined(__F16C__)
  return _mm256_cvtph_ps((__m128i)x);
#else
  // The exponent is rebiased by an addition, and once more for infinities and NaN. A denormal gets an exponent that
  // makes the mantissa's place right, and the leading one that came with it is subtracted.
  tw_u32 w = tw_words_of_halves(x), sign = (w & 0x8000) << 16, m = (w & 0x7fff) << 13;
  tw_u32 normal = m + (112u << 23) + ((tw_u32)(m >= (31u << 23)) & (112u << 23));
  tw_f32 denormal = (tw_f32)(m + (113u << 23)) - 0x1p-14f;
  return (tw_f32)(sign | (tw_u32)tw_select_i32((tw_i32)(m < (1u << 23)), (tw_i32)denormal, (tw_i32)normal));
#endif
}

TW_INLINE tw_f32 tw_widen_float8_e4m3fn(tw_u8 x) {
#if defined(TW_AVX512)
  // Placed in a float16 the value is 2^8 too small, denormals too; 0x7f and 0xff are NaN.
  __m256i h =
      _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)x), 7), _mm256_set1_epi16((short)0xbf80));
  __mmask16 nan = _mm_cmpeq_epi8_mask(_mm_or_si128((__m128i)x, _mm_set1_epi8((char)0x80)), _mm_set1_epi8((char)0xff));
  h = _mm256_mask_set1_epi16(h, nan, 0x7e00);
  return _mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256));
#else
  tw_u32 w = tw_words_of_bytes(x), sign = (w & 0x80) << 24, m = (w & 0x7f) << 20;
  tw_f32 denormal = (tw_f32)(m + (121u << 23)) - 0x1p-6f;
  tw_i32 y = tw_select_i32((tw_i32)(m < (1u << 23)), (tw_i32)denormal, (tw_i32)(m + (120u << 23)));
  y |= (tw_i32)(m == (0x7fu << 20)) & 0x7fc00000;
  return (tw_f32)(sign | (tw_u32)y);
#endif
}

// To nearest even, as torch has it: overflow to infinity, a NaN stays one.
TW_INLINE tw_u16 tw_narrow_bfloat16_exact(tw_f32 x) {
  tw_u32 u = (tw_u32)x, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, nan = (u >> 16) | 0x40;
  return tw_halves_of_words((tw_u32)tw_select_i32(x != x, (tw_i32)nan, (tw_i32)rounded));
}

TW_INLINE tw_u16 tw_narrow_bfloat16(tw_f32 x) {
#if defined(TW_BF16_DOT)
  // The instruction takes denormals for zeros, alone among conversions: rare, so tested for.
  if (__builtin_expect(_mm512_fpclass_ps_mask(x, 0x20) != 0, 0)) return tw_narrow_bfloat16_exact(x);
  return (tw_u16)_mm512_cvtneps_pbh(x);
#else
  return tw_narrow_bfloat16_exact(x);
#endif
}

TW_INLINE tw_u16 tw_narrow_float16(tw_f32 x) {
#if defined(TW_AVX512)
  return (tw_u16)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(TW_AVX2) && defined(__F16C__)
  return (tw_u16)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // Denormals: adding 0.5, whose last place is theirs, rounds. Normals: by an addition, which carries into infinity.
  tw_u32 u = (tw_u32)x, sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  tw_u32 normal = (a - (112u << 23) + 0xfff + ((a >> 13) & 1)) >> 13;
  tw_u32 denormal = (tw_u32)((tw_f32)a + 0.5f) - 0x3f000000;
  tw_u32 special = 0x7c00 | ((tw_u32)(x != x) & (0x200 | ((a >> 13) & 0x3ff)));
  tw_i32 y = tw_select_i32((tw_i32)(a < 0x38800000), (tw_i32)denormal, (tw_i32)normal);
  y = tw_select_i32((tw_i32)(a >= 0x47800000), (tw_i32)special, y);
  return tw_halves_of_words(sign | (tw_u32)y);
#endif
}

// Loads. A scalar goes through the same vector code, so that it cannot differ.
#define TW_LOADS(dtype, element, vector, scalar, widen, whole, part)                             \
  TW_INLINE vector tw_load_##dtype(const element *p) { return widen(whole(p)); }                 \
  TW_INLINE vector tw_load_##dtype##_part(const element *p, int n) { return widen(part(p, n)); } \
  TW_INLINE scalar tw_one_##dtype(const element *p) { return tw_load_##dtype##_part(p, 1)[0]; }
#define TW_WIDEN_UINT8(x) ((tw_i32)tw_words_of_bytes(x))
#define TW_WIDEN_BOOL(x) (tw_words_of_bytes(x) != 0)
TW_LOADS(float16, uint16_t, tw_f32, float, tw_widen_float16, tw_halves, tw_halves_part)
TW_LOADS(bfloat16, uint16_t, tw_f32, float, tw_widen_bfloat16, tw_halves, tw_halves_part)
TW_LOADS(float8_e4m3fn, uint8_t, tw_f32, float, tw_widen_float8_e4m3fn, tw_bytes, tw_bytes_part)
TW_LOADS(uint8, uint8_t, tw_i32, int32_t, TW_WIDEN_UINT8, tw_bytes, tw_bytes_part)
TW_LOADS(bool, uint8_t, tw_i32, int32_t, TW_WIDEN_BOOL, tw_bytes, tw_bytes_part)

TW_INLINE tw_f32 tw_load_float32(const float *p) { return (tw_f32)tw_words(p); }
TW_INLINE tw_f32 tw_load_float32_part(const float *p, int n) { return (tw_f32)tw_words_part(p, n); }
TW_INLINE float tw_one_float32(const float *p) { return *p; }
TW_INLINE tw_i32 tw_load_int32(const int32_t *p) { return tw_words(p); }
TW_INLINE tw_i32 tw_load_int32_part(const int32_t *p, int n) { return tw_words_part(p, n); }
TW_INLINE int32_t tw_one_int32(const int32_t *p) { return *p; }
TW_INLINE tw_i32 tw_load_uint32(const uint32_t *p) { return tw_words(p); }
TW_INLINE tw_i32 tw_load_uint32_part(const uint32_t *p, int n) { return tw_words_part(p, n); }
TW_INLINE int32_t tw_one_uint32(const uint32_t *p) { return (int32_t)*p; }

// int64 as pairs of words. A number that 32 bits cannot hold becomes the nearest that they can: an index outside stays so
#define TW_LANE_ODD(i, s) (2 * (i) + 1)
TW_INLINE tw_i32 tw_saturated(tw_i32 first, tw_i32 second) {
  tw_i32 low = TW_SHUFFLE(first, second, TW_LIST(TW_LANE_EVEN, 0));
  tw_i32 high = TW_SHUFFLE(first, second, TW_LIST(TW_LANE_ODD, 0));
  return tw_select_i32(high == low >> 31, low, (high >> 31) ^ INT32_MAX);
}
TW_INLINE tw_i32 tw_load_int64(const int64_t *p) { return tw_saturated(tw_words(p), tw_words(p + TW_LANES / 2)); }
TW_INLINE tw_i32 tw_load_int64_part(const int64_t *p, int n) {
  const int half = TW_LANES / 2, low = n < half ? n : half;
  return tw_saturated(tw_words_part(p, 2 * low), tw_words_part(p + low, 2 * (n - low)));
}
TW_INLINE int32_t tw_one_int64(const int64_t *p) {
  return (int32_t)(*p < INT32_MIN ? INT32_MIN : *p > INT32_MAX ? INT32_MAX : *p);
}

// Stores
#define TW_STORES(dtype, element, vector, scalar, all, narrow, put)                             \
  TW_INLINE void tw_store_##dtype##_part(element *p, vector x, int n) { put(p, narrow(x), n); } \
  TW_INLINE void tw_store_##dtype(element *p, vector x) {                                       \
    __typeof__(narrow(x)) y = narrow(x);                                                        \
    memcpy(p, &y, sizeof y);                                                                    \
  }                                                                                             \
  TW_INLINE void tw_put_##dtype(element *p, scalar x) { *p = (element)narrow(all(x))[0]; }
#define TW_NARROW_BYTE(x) tw_bytes_of_words((tw_u32)(x))
#define TW_NARROW_BOOL(x) TW_NARROW_BYTE((tw_u32)((x) != 0) & 1)
TW_STORES(float16, uint16_t, tw_f32, float, tw_f32_all, tw_narrow_float16, tw_put_halves)
TW_STORES(bfloat16, uint16_t, tw_f32, float, tw_f32_all, tw_narrow_bfloat16, tw_put_halves)
TW_STORES(uint8, uint8_t, tw_i32, int32_t, tw_i32_all, TW_NARROW_BYTE, tw_put_bytes)
TW_STORES(bool, uint8_t, tw_i32, int32_t, tw_i32_all, TW_NARROW_BOOL, tw_put_bytes)

TW_INLINE void tw_store_float32(float *p, tw_f32 x) { memcpy(p, &x, sizeof x); }
TW_INLINE void tw_store_float32_part(float *p, tw_f32 x, int n) { tw_put_words(p, (tw_i32)x, n); }
TW_INLINE void tw_put_float32(float *p, float x) { *p = x; }
TW_INLINE void tw_store_int32(int32_t *p, tw_i32 x) { memcpy(p, &x, sizeof x); }
TW_INLINE void tw_store_int32_part(int32_t *p, tw_i32 x, int n) { tw_put_words(p, x, n); }
TW_INLINE void tw_put_int32(int32_t *p, int32_t x) { *p = x; }
TW_INLINE void tw_store_uint32(uint32_t *p, tw_i32 x) { memcpy(p, &x, sizeof x); }
TW_INLINE void tw_store_uint32_part(uint32_t *p, tw_i32 x, int n) { tw_put_words(p, x, n); }
TW_INLINE void tw_put_uint32(uint32_t *p, int32_t x) { *p = (uint32_t)x; }

TW_INLINE void tw_store_int64_part(int64_t *p, tw_i32 x, int n) {
  const int half = TW_LANES / 2, low = n < half ? n : half;
  tw_i32 sign = x >> 31;
  tw_put_words(p, TW_SHUFFLE(x, sign, TW_LIST(TW_LANE_ZIP_LOW, 0)), 2 * low);
  tw_put_words(p + low, TW_SHUFFLE(x, sign, TW_LIST(TW_LANE_ZIP_HIGH, 0)), 2 * (n - low));
}
TW_INLINE void tw_store_int64(int64_t *p, tw_i32 x) { tw_store_int64_part(p, x, TW_LANES); }
TW_INLINE void tw_put_int64(int64_t *p, int64_t x) { *p = x; }

#endif
