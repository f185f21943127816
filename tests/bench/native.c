// What a processor can do at best, and the selection primitive on its own. Every rate's loop returns what it did.
#include "select.h"

#define PUBLIC __attribute__((visibility("default")))

// Chains of products that do not wait for each other: as many as latency times units, or more. With both factors they
// fit the registers.
#if defined(TW_AVX512)
#define CHAINS 16
#else
#define CHAINS 12
#endif

// The compiler knows nothing of the value any more, and keeps it in a vector register.
#if defined(__aarch64__)
#define KEEP(x) __asm__ volatile("" : "+w"(x))
#elif defined(TW_AVX512)
#define KEEP(x) __asm__ volatile("" : "+v"(x))
#else
#define KEEP(x) __asm__ volatile("" : "+x"(x))
#endif

TW_INLINE tw_f32 fused(tw_f32 a, tw_f32 x, tw_f32 y) {
#if defined(TW_AVX512)
  return _mm512_fmadd_ps(a, x, y);
#elif defined(TW_AVX2)
  return _mm256_fmadd_ps(a, x, y);
#else
#pragma STDC FP_CONTRACT ON
  return a * x + y;  // two instructions on processors without a fused one
#endif
}

// Multiplications and additions of float32 in n rounds.
PUBLIC int64_t bench_fma(int64_t n) {
  tw_f32 a[CHAINS], x = tw_f32_all(0.999f), y = tw_f32_all(1e-3f);
  KEEP(x);
  KEEP(y);
  TW_UNROLL
  for (int i = 0; i < CHAINS; i++) {
    a[i] = tw_f32_all(0.5f);
    KEEP(a[i]);  // or chains that start alike are made one
  }
  for (int64_t k = 0; k < n; k++) {
    TW_UNROLL
    for (int i = 0; i < CHAINS; i++) a[i] = fused(a[i], x, y);
  }
  TW_UNROLL
  for (int i = 0; i < CHAINS; i++) KEEP(a[i]);
  return n * CHAINS * TW_LANES * 2;
}

// The same of bfloat16 pairs; 0: no such instruction.
PUBLIC int64_t bench_bf16_dot(int64_t n) {
#if defined(TW_BF16_DOT)
  __m512 a[CHAINS];
  __m512i x = _mm512_set1_epi32(0x3c003c00), y = x;
  KEEP(x);
  KEEP(y);
  TW_UNROLL
  for (int i = 0; i < CHAINS; i++) {
    a[i] = _mm512_setzero_ps();
    KEEP(a[i]);
  }
  for (int64_t k = 0; k < n; k++) {
    TW_UNROLL
    for (int i = 0; i < CHAINS; i++) a[i] = _mm512_dpbf16_ps(a[i], (__m512bh)x, (__m512bh)y);
  }
  TW_UNROLL
  for (int i = 0; i < CHAINS; i++) KEEP(a[i]);
  return n * CHAINS * 16 * 4;
#else
  (void)n;
  return 0;
#endif
}

// The same of tiles; 0: no such instruction.
PUBLIC int64_t bench_amx(int64_t n) {
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
  __asm__ volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3");
  __asm__ volatile("tilezero %tmm4\n\ttilezero %tmm5\n\ttilezero %tmm6\n\ttilezero %tmm7");
  for (int64_t k = 0; k < n; k++)
    __asm__ volatile(
        "tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
        "tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
  __asm__ volatile("tilerelease");
  return n * 4 * 16 * 16 * 32 * 2;
#else
  (void)n;
  return 0;
#endif
}

// The sum of n floats, to have read them.
PUBLIC float bench_read(const float *p, int64_t n) {
  tw_f32 a[8] = {{0}}, sum = {0};
  for (int64_t i = 0; i + 8 * TW_LANES <= n; i += 8 * TW_LANES) {
    TW_UNROLL
    for (int j = 0; j < 8; j++) {
      tw_f32 x;
      memcpy(&x, p + i + j * TW_LANES, sizeof x);
      a[j] += x;
    }
  }
  for (int j = 0; j < 8; j++) sum += a[j];
  float total = 0;
  for (int j = 0; j < TW_LANES; j++) total += sum[j];
  return total;
}

// out[row][0..k): the columns of the largest of scores[row][0..count), best first: as kernels call the primitive, which
// takes scores as ordered integers. `scratch` has bench_best_scratch(count, k) bytes.
PUBLIC void bench_best(const float *scores, int64_t rows, int64_t count, int64_t k,
                                                       int32_t *out, void *scratch) {
  int32_t *ordered = scratch;
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t i = 0; i < count; i++) {
      const float x = scores[r * count + i];
      const int32_t bits = tw_bits_1(x + 0.0f);
      const int32_t key = bits ^ ((bits >> 31) & 0x7fffffff);
      ordered[i] = x != x ? TW_NOT_A_CANDIDATE + 1 : key;
    }
    tw_best(ordered, count, k, out + r * k, ordered + count);
  }
}

PUBLIC int64_t bench_best_scratch(int64_t count, int64_t k) {
  return 4 * count + tw_best_scratch(count, k);
}
