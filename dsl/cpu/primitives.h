// The primitives that generated kernels call: prototypes, so that kernels need not be compiled with their bodies.
//
// With TW_PRIMITIVES_APART the bodies are in the object file of primitives.c; otherwise in the headers, and static.
#ifndef TW_PRIMITIVES_H
#define TW_PRIMITIVES_H

#include "vector.h"

#define TW_PANEL (2 * TW_LANES)  // columns of a panel of B

// Rows held in registers at a time: accumulators for 2 vectors each, and room for 2 of B and one of A.
#if TW_LANES == 16
#define TW_MICRO_ROWS 12
#elif TW_LANES == 8
#define TW_MICRO_ROWS 6
#else
#define TW_MICRO_ROWS 4
#endif

// gemm.h, amx.h
TW_FUNCTION void tw_gemm_float32(int rows, int column_lo, int column_hi, int depth_lo, int depth_hi, const float *a,
                                 int64_t lda, const float *panels, int64_t panel_stride, float *c, int64_t ldc,
                                 bool accumulate);
#if defined(TW_BF16_DOT)
TW_FUNCTION void tw_gemm_bfloat16(int rows, int column_lo, int column_hi, int depth_lo, int depth_hi, const uint32_t *a,
                                  int64_t lda, const uint32_t *panels, int64_t panel_stride, float *c, int64_t ldc,
                                  bool accumulate);
#endif
TW_FUNCTION void tw_begin_products(void);
TW_FUNCTION void tw_end_products(void);

// pack.h
TW_FUNCTION void tw_pack_columns_bfloat16(const uint16_t *const *rows, int n, int depth, uint32_t *panels,
                                          int64_t panel_stride);
TW_FUNCTION void tw_pack_rows_bfloat16(const uint16_t *const *rows, int n, int width, uint32_t *panels,
                                       int64_t panel_stride);
TW_FUNCTION void tw_round_rows_bfloat16(const float *src, int64_t ld, int rows, int width, uint16_t *dst, int64_t ldd);

// pack.h and few_rows.h, for rows of every floating-point type beside float32 ones
#define TW_PRIMITIVES_OF(name, element)                                                                           \
  TW_FUNCTION void tw_pack_columns_##name(const element *const *rows, int n, int depth, float *panels,            \
                                          int64_t panel_stride);                                                  \
  TW_FUNCTION void tw_pack_rows_##name(const element *const *rows, int n, int width, float *panels,               \
                                       int64_t panel_stride);                                                     \
  TW_FUNCTION void tw_dot_rows_##name(int rows, const float *a, int64_t lda, const element *const *b_rows, int n, \
                                      int depth, float *c, int64_t ldc, const void *const *next, int n_next);     \
  TW_FUNCTION void tw_combine_rows_##name(int rows, const float *a, int64_t lda, const element *const *b_rows,    \
                                          int n_lo, int n_hi, int width, float *c, int64_t ldc, bool accumulate,  \
                                          const void *const *next, int n_next);
TW_PRIMITIVES_OF(float32, float)
TW_PRIMITIVES_OF(float32_float16, uint16_t)
TW_PRIMITIVES_OF(float32_bfloat16, uint16_t)
TW_PRIMITIVES_OF(float32_float8_e4m3fn, uint8_t)

// few_rows.h
#if defined(TW_BF16_DOT)
TW_FUNCTION void tw_dot_rows_bfloat16(int rows, const uint32_t *a, int64_t lda, const uint16_t *const *b_rows, int n,
                                      int depth, float *c, int64_t ldc, const void *const *next, int n_next);
TW_FUNCTION void tw_combine_rows_bfloat16(int rows, const uint16_t *a, int64_t lda, const uint16_t *const *b_rows,
                                          int n_lo, int n_hi, int width, float *c, int64_t ldc, bool accumulate,
                                          const void *const *next, int n_next);
#endif

// select.h
TW_FUNCTION int64_t tw_best_scratch(int64_t count, int64_t k);
TW_FUNCTION void tw_best(const int32_t *row, int64_t count, int64_t k, int32_t *out, void *scratch);

// Into the second-level cache
TW_INLINE void tw_prefetch(const void *p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}

// Of the n rows of the next tile, those that fall to points m0..m1 of all.
TW_INLINE void tw_prefetch_part(const void *const *rows, int64_t n, int64_t bytes, int64_t m0, int64_t m1,
                                int64_t points) {
  for (int64_t i = n * m0 / points; i < n * m1 / points; i++) tw_prefetch(rows[i], bytes);
}

#endif
