// Vectors of TW_LANES elements: their types, lanewise choices and reductions.
//
// The instruction set is the compiler's (-m flags). Without AVX2 everything here is GCC/clang vector extensions, so
// that one source serves SSE2 and NEON.
#ifndef TW_VECTOR_H
#define TW_VECTOR_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs of narrow elements are read as words, low half first"
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define TW_AVX512 1
#define TW_LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define TW_AVX2 1
#define TW_LANES 8
#else
#define TW_LANES 4
#endif

#if defined(TW_AVX512) || defined(TW_AVX2)
#include <immintrin.h>
#endif

// Not every processor gains: where the instruction is issued every other cycle, float32 is twice as fast.
#if defined(TW_AVX512) && defined(__AVX512BF16__) && !defined(TW_NO_BF16_DOT)
#define TW_BF16_DOT 1
#endif

// Always inlined: vectors then never cross a call, whose convention depends on the instruction set, and arguments
// that are constants specialise the body.
#define TW_INLINE static inline __attribute__((always_inline, unused))
#define TW_LOCAL static inline __attribute__((unused))

// What primitives.h declares.
#if defined(TW_PRIMITIVES_APART)
#define TW_FUNCTION __attribute__((visibility("hidden")))
#else
#define TW_FUNCTION TW_LOCAL
#endif

#if defined(__clang__)
#define TW_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TW_UNROLL _Pragma("GCC unroll 32")
#endif

typedef float tw_f32 __attribute__((vector_size(4 * TW_LANES)));
typedef int32_t tw_i32 __attribute__((vector_size(4 * TW_LANES)));  // also a mask: lanes 0 or -1
typedef uint32_t tw_u32 __attribute__((vector_size(4 * TW_LANES)));
typedef uint16_t tw_u16 __attribute__((vector_size(2 * TW_LANES)));
typedef uint8_t tw_u8 __attribute__((vector_size(TW_LANES)));

// F(0, s), F(1, s), ... one for every lane: lists of lane numbers
#define TW_LIST4(F, s) F(0, s), F(1, s), F(2, s), F(3, s)
#define TW_LIST8(F, s) TW_LIST4(F, s), F(4, s), F(5, s), F(6, s), F(7, s)
#define TW_LIST16(F, s) TW_LIST8(F, s), F(8, s), F(9, s), F(10, s), F(11, s), F(12, s), F(13, s), F(14, s), F(15, s)
#if TW_LANES == 16
#define TW_LIST TW_LIST16
#elif TW_LANES == 8
#define TW_LIST TW_LIST8
#else
#define TW_LIST TW_LIST4
#endif

// Lanes of two vectors, numbered on from the first into the second; the numbers are constants.
#if defined(__clang__) || __GNUC__ >= 12
#define TW_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TW_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (tw_i32){__VA_ARGS__})
#endif
#define TW_LANE(i, s) (i)
#define TW_LANE_XOR(i, s) ((i) ^ (s))
#define TW_LANE_EVEN(i, s) (2 * (i))
#define TW_LANE_ZIP_LOW(i, s) (((i) & 1) * TW_LANES + (i) / 2)
#define TW_LANE_ZIP_HIGH(i, s) (((i) & 1) * TW_LANES + (i) / 2 + TW_LANES / 2)

TW_INLINE tw_f32 tw_f32_all(float x) {
#if defined(TW_AVX512)
  return _mm512_set1_ps(x);
#else
  return x - (tw_f32){0};  // not 0 + x, which loses the sign of -0
#endif
}

TW_INLINE tw_i32 tw_i32_all(int32_t x) { return x - (tw_i32){0}; }
TW_INLINE tw_i32 tw_iota(void) { return (tw_i32){TW_LIST(TW_LANE, 0)}; }
TW_INLINE tw_i32 tw_bits(tw_f32 x) { return (tw_i32)x; }
TW_INLINE tw_f32 tw_from_bits(tw_i32 x) { return (tw_f32)x; }
TW_INLINE tw_f32 tw_f32_of_i32(tw_i32 x) { return __builtin_convertvector(x, tw_f32); }

TW_INLINE tw_i32 tw_i32_of_f32(tw_f32 x) {
#if defined(TW_AVX512)
  return (tw_i32)_mm512_cvttps_epi32(x);
#elif defined(TW_AVX2)
  return (tw_i32)_mm256_cvttps_epi32(x);
#else
  return __builtin_convertvector(x, tw_i32);
#endif
}

TW_INLINE int32_t tw_bits_1(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

TW_INLINE float tw_from_bits_1(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

TW_INLINE float tw_f32_of_i32_1(int32_t x) { return (float)x; }
TW_INLINE int32_t tw_i32_of_f32_1(float x) { return tw_i32_of_f32(tw_f32_all(x))[0]; }

TW_INLINE tw_i32 tw_select_i32(tw_i32 mask, tw_i32 yes, tw_i32 no) { return (mask & yes) | (~mask & no); }

TW_INLINE tw_f32 tw_select_f32(tw_i32 mask, tw_f32 yes, tw_f32 no) {
  return (tw_f32)tw_select_i32(mask, (tw_i32)yes, (tw_i32)no);
}

// a * b + c rounded once where the target can. Compilation is without contraction, so that the same expression gives
// the same bits wherever it stands; this is how to ask for it.
TW_INLINE tw_f32 tw_fma(tw_f32 a, tw_f32 b, tw_f32 c) {
#if defined(TW_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(TW_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__FP_FAST_FMAF)
  tw_f32 out;
  for (int i = 0; i < TW_LANES; i++) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return out;
#else
  return a * b + c;
#endif
}

TW_INLINE float tw_fma_1(float a, float b, float c) {
#if defined(TW_AVX512) || defined(TW_AVX2) || defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

TW_INLINE bool tw_any(tw_i32 mask) {
#if defined(TW_AVX512)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(TW_AVX2)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

TW_INLINE bool tw_all(tw_i32 mask) { return !tw_any(~mask); }

// The larger and the smaller lane; NaN if either is (torch.maximum). The x86 instruction gives its second operand
// whenever one is NaN, so only a NaN in the first needs more.
TW_INLINE tw_f32 tw_max(tw_f32 a, tw_f32 b) {
#if defined(TW_AVX512)
  return _mm512_mask_max_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), a, b);
#elif defined(TW_AVX2)
  return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
#else
  return tw_select_f32((a > b) | (a != a), a, b);
#endif
}

TW_INLINE tw_f32 tw_min(tw_f32 a, tw_f32 b) {
#if defined(TW_AVX512)
  return _mm512_mask_min_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), a, b);
#elif defined(TW_AVX2)
  return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
#else
  return tw_select_f32((a < b) | (a != a), a, b);
#endif
}

TW_INLINE tw_i32 tw_max_i32(tw_i32 a, tw_i32 b) { return tw_select_i32(a > b, a, b); }
TW_INLINE tw_i32 tw_min_i32(tw_i32 a, tw_i32 b) { return tw_select_i32(a < b, a, b); }

// Integers wrap: unsigned underneath, as overflow of signed lanes is undefined.
TW_INLINE tw_i32 tw_add_i32(tw_i32 a, tw_i32 b) { return (tw_i32)((tw_u32)a + (tw_u32)b); }
TW_INLINE tw_i32 tw_sub_i32(tw_i32 a, tw_i32 b) { return (tw_i32)((tw_u32)a - (tw_u32)b); }
TW_INLINE tw_i32 tw_mul_i32(tw_i32 a, tw_i32 b) { return (tw_i32)((tw_u32)a * (tw_u32)b); }

// Halving: every lane ends with the whole. The tree is the one of tw_sum_each, bit for bit.
#define TW_HALVE(op, x, s) op(x, TW_SHUFFLE(x, x, TW_LIST(TW_LANE_XOR, s)))
#if TW_LANES == 16
#define TW_REDUCE(op, x) x = TW_HALVE(op, x, 8), x = TW_HALVE(op, x, 4), x = TW_HALVE(op, x, 2), x = TW_HALVE(op, x, 1)
#elif TW_LANES == 8
#define TW_REDUCE(op, x) x = TW_HALVE(op, x, 4), x = TW_HALVE(op, x, 2), x = TW_HALVE(op, x, 1)
#else
#define TW_REDUCE(op, x) x = TW_HALVE(op, x, 2), x = TW_HALVE(op, x, 1)
#endif

TW_INLINE tw_f32 tw_add_f32(tw_f32 a, tw_f32 b) { return a + b; }
TW_INLINE float tw_sum(tw_f32 x) { return TW_REDUCE(tw_add_f32, x), x[0]; }
TW_INLINE float tw_max_of(tw_f32 x) { return TW_REDUCE(tw_max, x), x[0]; }
TW_INLINE float tw_min_of(tw_f32 x) { return TW_REDUCE(tw_min, x), x[0]; }
TW_INLINE int32_t tw_sum_i32(tw_i32 x) { return TW_REDUCE(tw_add_i32, x), x[0]; }
TW_INLINE int32_t tw_max_of_i32(tw_i32 x) { return TW_REDUCE(tw_max_i32, x), x[0]; }
TW_INLINE int32_t tw_min_of_i32(tw_i32 x) { return TW_REDUCE(tw_min_i32, x), x[0]; }

// Lane i of the result is the sum of x[i]: a transposition and a sum in one, 2 shuffles per addition. x is used up.
#define TW_LANE_FOLD_A(i, s) ((i) & (s) ? (i) + TW_LANES : (i))
#define TW_LANE_FOLD_B(i, s) ((i) & (s) ? ((i) ^ (s)) + TW_LANES : ((i) ^ (s)))
#define TW_FOLD(x, s)                                                                                   \
  TW_UNROLL                                                                                             \
  for (int i = 0; i < (s); i++) {                                                                       \
    tw_f32 a = x[i], b = x[i + (s)];                                                                    \
    x[i] = TW_SHUFFLE(a, b, TW_LIST(TW_LANE_FOLD_A, s)) + TW_SHUFFLE(a, b, TW_LIST(TW_LANE_FOLD_B, s)); \
  }
TW_INLINE tw_f32 tw_sum_each(tw_f32 *x) {
#if TW_LANES == 16
  TW_FOLD(x, 8)
#endif
#if TW_LANES >= 8
  TW_FOLD(x, 4)
#endif
  TW_FOLD(x, 2)
  TW_FOLD(x, 1)
  return x[0];
}

#endif
