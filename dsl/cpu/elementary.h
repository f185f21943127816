// Elementary functions on vectors; NaN in is NaN out. `_1` is the same on one number, to the same bits: a row's result
// must not depend on whether a vector or its remainder computed it.
#ifndef TW_ELEMENTARY_H
#define TW_ELEMENTARY_H

#include "vector.h"

TW_INLINE tw_f32 tw_abs(tw_f32 x) { return (tw_f32)((tw_i32)x & 0x7fffffff); }

TW_INLINE tw_f32 tw_sqrt(tw_f32 x) {
#if defined(TW_AVX512)
  return _mm512_sqrt_ps(x);
#elif defined(TW_AVX2)
  return _mm256_sqrt_ps(x);
#else
  for (int i = 0; i < TW_LANES; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// The nearest integer: adding 1.5 * 2^23 leaves no fraction bits. Sums of integers past 2^22 lose bits, which the
// callers allow for.
#define TW_ROUNDER 0x1.8p23f

// p * 2^n, n an integer in a float: below the normal range rounded once, beyond it infinite.
TW_INLINE tw_f32 tw_scale(tw_f32 p, tw_f32 n) {
#if defined(TW_AVX512)
  return _mm512_scalef_ps(p, n);
#else
  tw_i32 i = tw_i32_of_f32(n), half = i >> 1;  // two factors, as 2^n need not be a normal number where p * 2^n is
  return p * (tw_f32)((half + 127) << 23) * (tw_f32)((i - half + 127) << 23);
#endif
}

// Arguments where e^x is neither 0 nor infinite, with room: what tw_scale takes must stay small without AVX-512.
TW_INLINE tw_f32 tw_exp_range(tw_f32 x) {
#if defined(TW_AVX512)
  return x;
#elif defined(TW_AVX2)  // the operand that is given back when x is NaN stands second
  return _mm256_min_ps(tw_f32_all(90), _mm256_max_ps(tw_f32_all(-105), x));
#else
  x = tw_select_f32(x < -105, tw_f32_all(-105), x);
  return tw_select_f32(x > 90, tw_f32_all(90), x);
#endif
}

// What is left of x after n * log 2. With AVX-512 x is not clamped: far out it is garbage or NaN, made a small number
// here so that the polynomial is positive and finite, and then 2^n decides: 0, infinity, or NaN where x is.
TW_INLINE tw_f32 tw_exp_rest(tw_f32 rest) {
#if defined(TW_AVX512)
  return _mm512_range_ps(rest, _mm512_set1_ps(1), 0x2);  // the smaller magnitude, with the sign of `rest`
#else
  return rest;
#endif
}

// Relative error <= 2e-7. e^x = 2^n * e^r with |r| <= log(2) / 2, and e^r by a minimax polynomial (9.2e-8).
TW_INLINE tw_f32 tw_exp(tw_f32 x) {
  x = tw_exp_range(x);
  tw_f32 n = tw_fma(x, tw_f32_all(0x1.715476p0f), tw_f32_all(TW_ROUNDER)) - TW_ROUNDER;
  tw_f32 r = tw_fma(n, tw_f32_all(-0x1.62e4p-1f), x);  // log 2 in two parts, the first short: n times it is exact
  r = tw_exp_rest(tw_fma(n, tw_f32_all(-0x1.7f7d1cp-20f), r));
  tw_f32 p = tw_f32_all(8.290272e-3f);
  p = tw_fma(p, r, tw_f32_all(4.18981597e-2f));
  p = tw_fma(p, r, tw_f32_all(1.666763813e-1f));
  p = tw_fma(p, r, tw_f32_all(4.999914784e-1f));
  p = tw_fma(p, r, tw_f32_all(9.999997063e-1f));
  return tw_scale(tw_fma(p, r, tw_f32_all(1)), n);
}

// Relative error <= 1e-4, for results that are rounded to bfloat16 (4e-3).
TW_INLINE tw_f32 tw_exp_bf16(tw_f32 x) {
  x = tw_exp_range(x);
  tw_f32 n = tw_fma(x, tw_f32_all(0x1.715476p0f), tw_f32_all(TW_ROUNDER)) - TW_ROUNDER;
  tw_f32 f = tw_exp_rest(tw_fma(x, tw_f32_all(0x1.715476p0f), -n));
  tw_f32 p = tw_f32_all(5.51710038e-2f);
  p = tw_fma(p, f, tw_f32_all(2.426158539e-1f));
  p = tw_fma(p, f, tw_f32_all(6.932614401e-1f));
  p = tw_fma(p, f, tw_f32_all(9.999277918e-1f));
  return tw_scale(p, n);
}

// Relative error <= 2e-7. x = 2^e * (1 + s) with 1 + s between the square roots of 1/2 and 2.
TW_INLINE tw_f32 tw_log(tw_f32 x) {
  tw_i32 tiny = x < 0x1p-126f;
  tw_u32 bits = (tw_u32)tw_select_f32(tiny, x * 0x1p23f, x);
  tw_u32 e = (tw_u32)((tw_i32)(bits - 0x3f3504f3) >> 23);
  tw_f32 s = (tw_f32)(bits - (e << 23)) - 1, exponent = tw_f32_of_i32((tw_i32)(e - ((tw_u32)tiny & 23)));
  tw_f32 p = tw_f32_all(-7.6356549e-2f);
  p = tw_fma(p, s, tw_f32_all(1.276332704e-1f));
  p = tw_fma(p, s, tw_f32_all(-1.316058255e-1f));
  p = tw_fma(p, s, tw_f32_all(1.420155306e-1f));
  p = tw_fma(p, s, tw_f32_all(-1.662329837e-1f));
  p = tw_fma(p, s, tw_f32_all(2.000123338e-1f));
  p = tw_fma(p, s, tw_f32_all(-2.500082271e-1f));
  p = tw_fma(p, s, tw_f32_all(3.333333166e-1f));
  tw_f32 square = s * s;
  tw_f32 y = tw_fma(exponent, tw_f32_all(-2.12194440e-4f), p * square * s);  // log 2 in two parts, as in tw_exp
  y = s + tw_fma(square, tw_f32_all(-0.5f), y);
  y = tw_fma(exponent, tw_f32_all(0.693359375f), y);
  tw_f32 special = tw_select_f32(x == 0, tw_f32_all(-INFINITY), tw_select_f32(x < 0, tw_f32_all(NAN), x));
  return tw_select_f32((x > 0) & (x < INFINITY), y, special);
}

// Relative error <= 5e-7: a polynomial where 1 - 2 / (e^2x + 1) would cancel.
TW_INLINE tw_f32 tw_tanh(tw_f32 x) {
  tw_f32 a = tw_abs(x), square = x * x;
  tw_f32 p = tw_f32_all(-5.697384e-3f);
  p = tw_fma(p, square, tw_f32_all(2.06325463e-2f));
  p = tw_fma(p, square, tw_f32_all(-5.3737798e-2f));
  p = tw_fma(p, square, tw_f32_all(1.333142038e-1f));
  p = tw_fma(p, square, tw_f32_all(-3.333328118e-1f));
  tw_f32 small = tw_fma(p * square, a, a), large = 1 - 2 / (tw_exp(a + a) + 1);
  tw_i32 sign = (tw_i32)x & INT32_MIN;
  return (tw_f32)((tw_i32)tw_select_f32(a < 0.625f, small, large) | sign);
}

#define TW_ONE_ARGUMENT(f) \
  TW_INLINE float f##_1(float x) { return f(tw_f32_all(x))[0]; }
TW_ONE_ARGUMENT(tw_abs)
TW_ONE_ARGUMENT(tw_sqrt)
TW_ONE_ARGUMENT(tw_exp)
TW_ONE_ARGUMENT(tw_exp_bf16)
TW_ONE_ARGUMENT(tw_log)
TW_ONE_ARGUMENT(tw_tanh)
TW_INLINE float tw_max_1(float a, float b) { return tw_max(tw_f32_all(a), tw_f32_all(b))[0]; }
TW_INLINE float tw_min_1(float a, float b) { return tw_min(tw_f32_all(a), tw_f32_all(b))[0]; }

// Integers. Division rounds down; by 0 it gives 0, and so does the remainder. What does not fit wraps.

TW_INLINE int64_t tw_floordiv_64(int64_t a, int64_t b) {
  if (b == 0) return 0;
  if (b == -1) return (int64_t)(0 - (uint64_t)a);  // the one quotient that may not fit, which would trap
  int64_t q = a / b;
  return q - (q * b != a && (a < 0) != (b < 0));
}

TW_INLINE int64_t tw_mod_64(int64_t a, int64_t b) {
  if (b == 0 || b == -1) return 0;
  int64_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

TW_INLINE int64_t tw_max_64(int64_t a, int64_t b) { return a > b ? a : b; }
TW_INLINE int64_t tw_min_64(int64_t a, int64_t b) { return a < b ? a : b; }
TW_INLINE int32_t tw_floordiv_i32_1(int32_t a, int32_t b) { return (int32_t)tw_floordiv_64(a, b); }
TW_INLINE int32_t tw_mod_i32_1(int32_t a, int32_t b) { return (int32_t)tw_mod_64(a, b); }
TW_INLINE int32_t tw_max_i32_1(int32_t a, int32_t b) { return a > b ? a : b; }
TW_INLINE int32_t tw_min_i32_1(int32_t a, int32_t b) { return a < b ? a : b; }
TW_INLINE int32_t tw_abs_i32_1(int32_t a) { return a < 0 ? (int32_t)(0 - (uint32_t)a) : a; }

// Counts outside 0..31, negative ones too, shift everything out, as in torch.
TW_INLINE int32_t tw_shl_i32_1(int32_t a, int32_t count) {
  return (uint32_t)count > 31 ? 0 : (int32_t)((uint32_t)a << count);
}
TW_INLINE int32_t tw_shr_i32_1(int32_t a, int32_t count) { return a >> ((uint32_t)count > 31 ? 31 : count); }

TW_INLINE tw_i32 tw_abs_i32(tw_i32 a) {
  tw_u32 sign = (tw_u32)(a >> 31);
  return (tw_i32)(((tw_u32)a ^ sign) - sign);
}

TW_INLINE tw_i32 tw_shl_i32(tw_i32 a, tw_i32 count) {
  return (tw_i32)((tw_u32)a << ((tw_u32)count & 31)) & (tw_i32)((tw_u32)count <= 31);
}

TW_INLINE tw_i32 tw_shr_i32(tw_i32 a, tw_i32 count) { return a >> (((tw_i32)((tw_u32)count > 31) | count) & 31); }

// By way of double, half a vector at a time: no target divides integer vectors, and a quotient of two 32-bit integers
// that is not whole is further from a whole one than double rounds.
typedef double tw_f64 __attribute__((vector_size(4 * TW_LANES)));
typedef int32_t tw_i32_half __attribute__((vector_size(2 * TW_LANES)));

TW_INLINE tw_i32 tw_quotient(tw_i32 a, tw_i32 b) {  // rounded to 0
  tw_i32_half x[2], y[2], q[2];
  memcpy(x, &a, sizeof a);
  memcpy(y, &b, sizeof b);
  TW_UNROLL
  for (int i = 0; i < 2; i++) {
    tw_f64 n = __builtin_convertvector(x[i], tw_f64), d = __builtin_convertvector(y[i], tw_f64);
    q[i] = __builtin_convertvector(n / d, tw_i32_half);
  }
  memcpy(&a, q, sizeof a);
  return a;
}

TW_INLINE tw_i32 tw_floordiv_i32(tw_i32 a, tw_i32 b) {
  tw_u32 q = (tw_u32)tw_quotient(a, b), rest = (tw_u32)a - q * (tw_u32)b;
  q += (tw_u32)((tw_i32)(rest != 0) & (((tw_i32)rest ^ b) < 0));
  return (tw_i32)q & (b != 0);
}

TW_INLINE tw_i32 tw_mod_i32(tw_i32 a, tw_i32 b) {
  tw_u32 rest = (tw_u32)a - (tw_u32)tw_quotient(a, b) * (tw_u32)b;
  rest += (tw_u32)b & (tw_u32)((tw_i32)(rest != 0) & (((tw_i32)rest ^ b) < 0));
  return (tw_i32)rest & (b != 0);
}

#endif
