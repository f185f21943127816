// Matrix products on packed panels (pack.h): C[r][j] (+)= sum over k of A[r][k] * B[k][j].
//
// Every element is one chain of fused multiply-adds in ascending k, whatever the rows and columns around it: its bits
// depend on the depth range alone.
#ifndef TW_GEMM_H
#define TW_GEMM_H

#include "memory.h"
#include "primitives.h"

// One block: `rows` and `vectors` are constants, and everything is in registers but A, B and C.
#define TW_MICRO(name, element, vector, load, all, multiply_add)                                       \
  TW_INLINE void name(const int rows, const int vectors, int64_t depth, const element *a, int64_t lda, \
                      const element *b, float *c, int64_t ldc, bool accumulate) {                      \
    tw_f32 sum[TW_MICRO_ROWS][2];                                                                      \
    TW_UNROLL                                                                                          \
    for (int r = 0; r < rows; r++) {                                                                   \
      TW_UNROLL                                                                                        \
      for (int v = 0; v < vectors; v++)                                                                \
        sum[r][v] = accumulate ? tw_load_float32(c + r * ldc + v * TW_LANES) : (tw_f32){0};            \
    }                                                                                                  \
    for (int64_t k = 0; k < depth; k++) {                                                              \
      vector column[2];                                                                                \
      TW_UNROLL                                                                                        \
      for (int v = 0; v < vectors; v++) column[v] = load(b + k * TW_PANEL + v * TW_LANES);             \
      TW_UNROLL                                                                                        \
      for (int r = 0; r < rows; r++) {                                                                 \
        vector x = all(a[r * lda + k]);                                                                \
        TW_UNROLL                                                                                      \
        for (int v = 0; v < vectors; v++) sum[r][v] = multiply_add(x, column[v], sum[r][v]);           \
      }                                                                                                \
    }                                                                                                  \
    TW_UNROLL                                                                                          \
    for (int r = 0; r < rows; r++) {                                                                   \
      TW_UNROLL                                                                                        \
      for (int v = 0; v < vectors; v++) tw_store_float32(c + r * ldc + v * TW_LANES, sum[r][v]);       \
    }                                                                                                  \
  }

// All rows against one panel: groups of TW_MICRO_ROWS, then halves of what is left.
#define TW_STEP(micro, count, vectors)      \
  for (; rows - r >= (count); r += (count)) \
    micro(count, vectors, depth, a + r * lda, lda, b, c + r * ldc, ldc, accumulate);
#if TW_MICRO_ROWS == 12
#define TW_STEPS(micro, vectors) \
  TW_STEP(micro, 12, vectors) TW_STEP(micro, 8, vectors) TW_STEP(micro, 4, vectors) TW_STEP(micro, 2, vectors)
#elif TW_MICRO_ROWS == 6
#define TW_STEPS(micro, vectors) TW_STEP(micro, 6, vectors) TW_STEP(micro, 4, vectors) TW_STEP(micro, 2, vectors)
#else
#define TW_STEPS(micro, vectors) TW_STEP(micro, 4, vectors) TW_STEP(micro, 2, vectors)
#endif

#define TW_GEMM(name, micro, element)                                                                                  \
  TW_LOCAL void name##_panel(int rows, int vectors, int64_t depth, const element *a, int64_t lda, const element *b, \
                                float *c, int64_t ldc, bool accumulate) {                                              \
    int64_t r = 0;                                                                                                     \
    if (vectors == 2) {                                                                                                \
      TW_STEPS(micro, 2) TW_STEP(micro, 1, 2)                                                                          \
    } else {                                                                                                           \
      TW_STEPS(micro, 1) TW_STEP(micro, 1, 1)                                                                          \
    }                                                                                                                  \
  }                                                                                                                    \
  TW_FUNCTION void name(int rows, int column_lo, int column_hi, int depth_lo, int depth_hi, const element *a,          \
                        int64_t lda, const element *panels, int64_t panel_stride, float *c, int64_t ldc,               \
                        bool accumulate) {                                                                             \
    for (int j = column_lo; j < column_hi;) {                                                                          \
      int inside = j % TW_PANEL, width = TW_PANEL - inside;                                                            \
      if (width > column_hi - j) width = column_hi - j;                                                                \
      const element *b = panels + j / TW_PANEL * panel_stride + (int64_t)depth_lo * TW_PANEL + inside;                 \
      name##_panel(rows, width / TW_LANES, depth_hi - depth_lo, a + depth_lo, lda, b, c + j, ldc, accumulate);         \
      j += width;                                                                                                      \
    }                                                                                                                  \
  }

TW_MICRO(tw_micro_float32, float, tw_f32, tw_load_float32, tw_f32_all, tw_fma)
TW_GEMM(tw_gemm_float32, tw_micro_float32, float)

#if defined(TW_BF16_DOT)
// Words are pairs along the depth: two products a step.
TW_INLINE tw_f32 tw_dot_pairs(tw_i32 a, tw_i32 b, tw_f32 c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
TW_INLINE tw_i32 tw_word_all(uint32_t x) { return tw_i32_all((int32_t)x); }
#if defined(__AMX_BF16__)
#include "amx.h"
#else
TW_MICRO(tw_micro_bfloat16, uint32_t, tw_i32, tw_words, tw_word_all, tw_dot_pairs)
TW_GEMM(tw_gemm_bfloat16, tw_micro_bfloat16, uint32_t)
#endif
#endif

#if !defined(TW_AMX_H)  // where products have nothing to set up
TW_FUNCTION void tw_begin_products(void) {}
TW_FUNCTION void tw_end_products(void) {}
#endif

#endif
