// Matrix products for a few rows (decoding): the other matrix is read once, where it lies, through row pointers.
//
// Its bandwidth is the limit, so nothing is packed. Rows are taken 4 at a time; a result's bits do not depend on how
// many there are, nor on where a row or a column stands.
#ifndef TW_FEW_ROWS_H
#define TW_FEW_ROWS_H

#include "pack.h"

#define TW_FEW 4        // rows and keys of a block of dot products
#define TW_FEW_WIDE 4   // vectors of a block of combined rows

// `rows` is a constant from here on.
#define TW_EVERY_FEW(call)                                       \
  while (rows > 0) {                                             \
    const int some = rows < TW_FEW ? rows : TW_FEW;              \
    switch (some) {                                              \
      case 1: call(1); break;                                    \
      case 2: call(2); break;                                    \
      case 3: call(3); break;                                    \
      default: call(4); break;                                   \
    }                                                            \
    rows -= some;                                                \
    a += some * lda;                                             \
    c += some * ldc;                                             \
  }

// c[r][j] = a[r] . b_rows[j]. A vector of `step` elements at a time; `load` and `part` give a's and b's vectors.
#define TW_DOTS(name, a_element, b_element, vector, step, per_word, load_a, part_a, load_b, part_b, multiply_add)      \
  TW_INLINE void name##_few(const int rows, const a_element *a, int64_t lda, const b_element *const *b_rows, int n,   \
                            int depth, float *c, int64_t ldc) {                                                       \
    const int whole = depth / (step) * (step);                                                                        \
    for (int j = 0; j < n; j += TW_FEW) {                                                                             \
      const b_element *b[TW_FEW];                                                                                     \
      tw_f32 sum[TW_FEW * TW_FEW];                                                                                    \
      TW_UNROLL for (int i = 0; i < TW_FEW; i++) b[i] = b_rows[j + i < n ? j + i : n - 1];                            \
      TW_UNROLL for (int i = 0; i < TW_FEW * TW_FEW; i++) sum[i] = (tw_f32){0};                                       \
      for (int k = 0; k < whole; k += (step)) {                                                                       \
        vector y[TW_FEW];                                                                                             \
        TW_UNROLL for (int i = 0; i < TW_FEW; i++) y[i] = load_b(b[i] + k);                                           \
        TW_UNROLL for (int r = 0; r < rows; r++) {                                                                    \
          vector x = load_a(a + r * lda + k / (per_word));                                                            \
          TW_UNROLL for (int i = 0; i < TW_FEW; i++)                                                                  \
            sum[r * TW_FEW + i] = multiply_add(x, y[i], sum[r * TW_FEW + i]);                                         \
        }                                                                                                             \
      }                                                                                                               \
      if (whole < depth) {                                                                                            \
        vector y[TW_FEW];                                                                                             \
        TW_UNROLL for (int i = 0; i < TW_FEW; i++) y[i] = part_b(b[i] + whole, depth - whole);                        \
        TW_UNROLL for (int r = 0; r < rows; r++) {                                                                    \
          vector x = part_a(a + r * lda + whole / (per_word), depth - whole);                                         \
          TW_UNROLL for (int i = 0; i < TW_FEW; i++)                                                                  \
            sum[r * TW_FEW + i] = multiply_add(x, y[i], sum[r * TW_FEW + i]);                                         \
        }                                                                                                             \
      }                                                                                                               \
      float each[TW_FEW * TW_FEW];                                                                                    \
      TW_UNROLL for (int i = 0; i < rows * TW_FEW; i += TW_LANES)                                                     \
        tw_store_float32(each + i, tw_sum_each(sum + i));                                                             \
      const int some = n - j < TW_FEW ? n - j : TW_FEW;                                                               \
      TW_UNROLL for (int r = 0; r < rows; r++) {                                                                      \
        if (some == TW_FEW)                                                                                           \
          memcpy(c + r * ldc + j, each + r * TW_FEW, sizeof(float) * TW_FEW);                                         \
        else                                                                                                          \
          for (int i = 0; i < some; i++) c[r * ldc + j + i] = each[r * TW_FEW + i];                                   \
      }                                                                                                               \
    }                                                                                                                 \
  }                                                                                                                   \
  TW_FUNCTION void name(int rows, const a_element *a, int64_t lda, const b_element *const *b_rows, int n, int depth,  \
                        float *c, int64_t ldc) {                                                                      \
    TW_EVERY_FEW(name##_CALL)                                                                                         \
  }

#define tw_dot_rows_float32_CALL(few) tw_dot_rows_float32_few(few, a, lda, b_rows, n, depth, c, ldc)
TW_DOTS(tw_dot_rows_float32, float, float, tw_f32, TW_LANES, 1, tw_load_float32, tw_load_float32_part,
        tw_load_float32, tw_load_float32_part, tw_fma)

#define tw_dot_rows_float32_bfloat16_CALL(few) tw_dot_rows_float32_bfloat16_few(few, a, lda, b_rows, n, depth, c, ldc)
TW_DOTS(tw_dot_rows_float32_bfloat16, float, uint16_t, tw_f32, TW_LANES, 1, tw_load_float32, tw_load_float32_part,
        tw_load_bfloat16, tw_load_bfloat16_part, tw_fma)

#if defined(TW_BF16_DOT)
// `a` in words as gemm.h has it (lda counts words), `depth` in elements.
TW_INLINE tw_i32 tw_a_pairs_part(const uint32_t *p, int n) { return tw_pairs_part((const uint16_t *)p, n); }
#define tw_dot_rows_bfloat16_CALL(few) tw_dot_rows_bfloat16_few(few, a, lda, b_rows, n, depth, c, ldc)
TW_DOTS(tw_dot_rows_bfloat16, uint32_t, uint16_t, tw_i32, 2 * TW_LANES, 2, tw_words, tw_a_pairs_part, tw_words,
        tw_pairs_part, tw_dot_pairs)
#endif

// c[r][d] (+)= sum over j in n_lo..n_hi of p[r][j] * b_rows[j][d], ascending. A block is `vectors` vectors wide, or with
// `some` not 0 the first `some` elements of one.
#define TW_COMBINE(name, b_element, load, part)                                                                       \
  TW_INLINE void name##_block(const int rows, const int vectors, const float *a, int64_t lda,                         \
                              const b_element *const *b_rows, int n_lo, int n_hi, int d, int some, float *c,          \
                              int64_t ldc, bool accumulate) {                                                         \
    tw_f32 sum[TW_FEW][TW_FEW_WIDE];                                                                                  \
    TW_UNROLL for (int r = 0; r < rows; r++) {                                                                        \
      TW_UNROLL for (int v = 0; v < vectors; v++) {                                                                   \
        const float *at = c + r * ldc + d + v * TW_LANES;                                                             \
        sum[r][v] = !accumulate ? (tw_f32){0} : some ? tw_load_float32_part(at, some) : tw_load_float32(at);          \
      }                                                                                                               \
    }                                                                                                                 \
    for (int j = n_lo; j < n_hi; j++) {                                                                               \
      tw_f32 y[TW_FEW_WIDE];                                                                                          \
      TW_UNROLL for (int v = 0; v < vectors; v++) {                                                                   \
        const b_element *at = b_rows[j] + d + v * TW_LANES;                                                           \
        y[v] = some ? part(at, some) : load(at);                                                                      \
      }                                                                                                               \
      TW_UNROLL for (int r = 0; r < rows; r++) {                                                                      \
        tw_f32 x = tw_f32_all(a[r * lda + j]);                                                                        \
        TW_UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = tw_fma(x, y[v], sum[r][v]);                           \
      }                                                                                                               \
    }                                                                                                                 \
    TW_UNROLL for (int r = 0; r < rows; r++) {                                                                        \
      TW_UNROLL for (int v = 0; v < vectors; v++) {                                                                   \
        float *at = c + r * ldc + d + v * TW_LANES;                                                                   \
        if (some)                                                                                                     \
          tw_store_float32_part(at, sum[r][v], some);                                                                 \
        else                                                                                                          \
          tw_store_float32(at, sum[r][v]);                                                                            \
      }                                                                                                               \
    }                                                                                                                 \
  }                                                                                                                   \
  TW_INLINE void name##_few(const int rows, const float *a, int64_t lda, const b_element *const *b_rows, int n_lo,    \
                            int n_hi, int width, float *c, int64_t ldc, bool accumulate) {                            \
    int d = 0;                                                                                                        \
    for (; d + TW_FEW_WIDE * TW_LANES <= width; d += TW_FEW_WIDE * TW_LANES)                                          \
      name##_block(rows, TW_FEW_WIDE, a, lda, b_rows, n_lo, n_hi, d, 0, c, ldc, accumulate);                          \
    for (; d + TW_LANES <= width; d += TW_LANES)                                                                      \
      name##_block(rows, 1, a, lda, b_rows, n_lo, n_hi, d, 0, c, ldc, accumulate);                                    \
    if (d < width) name##_block(rows, 1, a, lda, b_rows, n_lo, n_hi, d, width - d, c, ldc, accumulate);               \
  }                                                                                                                   \
  TW_FUNCTION void name(int rows, const float *p, int64_t ldp, const b_element *const *b_rows, int n_lo, int n_hi,    \
                        int width, float *c, int64_t ldc, bool accumulate) {                                          \
    const float *a = p;                                                                                               \
    const int64_t lda = ldp;                                                                                          \
    TW_EVERY_FEW(name##_CALL)                                                                                         \
  }

#define tw_combine_rows_float32_CALL(few) \
  tw_combine_rows_float32_few(few, a, lda, b_rows, n_lo, n_hi, width, c, ldc, accumulate)
TW_COMBINE(tw_combine_rows_float32, float, tw_load_float32, tw_load_float32_part)

#define tw_combine_rows_float32_bfloat16_CALL(few) \
  tw_combine_rows_float32_bfloat16_few(few, a, lda, b_rows, n_lo, n_hi, width, c, ldc, accumulate)
TW_COMBINE(tw_combine_rows_float32_bfloat16, uint16_t, tw_load_bfloat16, tw_load_bfloat16_part)

#if defined(TW_BF16_DOT)
// The same with p in bfloat16, ldp in elements: pairs of rows 2k and 2k + 1 in one instruction. A pair of which one row
// is outside n_lo..n_hi has zeros for it, on both sides.
TW_INLINE void tw_combine_pair(const int rows, const int panels, const uint16_t *a, int64_t lda, const uint16_t *first,
                               const uint16_t *second, int j, int d, int left, tw_f32 (*sum)[TW_FEW_WIDE]) {
  tw_i32 y[TW_FEW_WIDE];
  TW_UNROLL for (int v = 0; v < panels; v++) {
    tw_u16 x0[2], x1[2];
    tw_panel_halves(first ? first + d + v * TW_PANEL : 0, left - v * TW_PANEL, x0);
    tw_panel_halves(second ? second + d + v * TW_PANEL : 0, left - v * TW_PANEL, x1);
    tw_zip_halves(x0[0], x0[1], x1[0], x1[1], &y[2 * v], &y[2 * v + 1]);
  }
  TW_UNROLL for (int r = 0; r < rows; r++) {
    uint32_t word = 0;
    if (first && second)
      memcpy(&word, a + r * lda + j, sizeof word);
    else
      word = first ? a[r * lda + j] : (uint32_t)a[r * lda + j + 1] << 16;
    tw_i32 x = tw_word_all(word);
    TW_UNROLL for (int v = 0; v < 2 * panels; v++) sum[r][v] = tw_dot_pairs(x, y[v], sum[r][v]);
  }
}

TW_INLINE void tw_combine_pairs(const int rows, const int panels, const uint16_t *a, int64_t lda,
                                const uint16_t *const *b_rows, int n_lo, int n_hi, int d, int left, float *c,
                                int64_t ldc, bool accumulate) {
  tw_f32 sum[TW_FEW][TW_FEW_WIDE];
  TW_UNROLL for (int r = 0; r < rows; r++) {
    TW_UNROLL for (int v = 0; v < 2 * panels; v++) {
      const int some = left - v * TW_LANES < 0 ? 0 : left - v * TW_LANES;
      const float *at = c + r * ldc + d;
      sum[r][v] = !accumulate        ? (tw_f32){0}
                  : some >= TW_LANES ? tw_load_float32(at + v * TW_LANES)
                  : some             ? tw_load_float32_part(at + v * TW_LANES, some)
                                     : (tw_f32){0};
    }
  }
  int j = n_lo & ~1;
  if (j < n_lo && j + 1 < n_hi) tw_combine_pair(rows, panels, a, lda, 0, b_rows[j + 1], j, d, left, sum);
  if (j < n_lo) j += 2;
  for (; j + 2 <= n_hi; j += 2)
    tw_combine_pair(rows, panels, a, lda, b_rows[j], b_rows[j + 1], j, d, left, sum);
  if (j < n_hi) tw_combine_pair(rows, panels, a, lda, b_rows[j], 0, j, d, left, sum);
  TW_UNROLL for (int r = 0; r < rows; r++) {
    TW_UNROLL for (int v = 0; v < 2 * panels; v++) {
      const int some = left - v * TW_LANES;
      float *at = c + r * ldc + d + v * TW_LANES;
      if (some >= TW_LANES)
        tw_store_float32(at, sum[r][v]);
      else if (some > 0)
        tw_store_float32_part(at, sum[r][v], some);
    }
  }
}

TW_INLINE void tw_combine_rows_bfloat16_few(const int rows, const uint16_t *a, int64_t lda,
                                            const uint16_t *const *b_rows, int n_lo, int n_hi, int width, float *c,
                                            int64_t ldc, bool accumulate) {
  int d = 0;
  for (; d + 2 * TW_PANEL <= width; d += 2 * TW_PANEL)
    tw_combine_pairs(rows, 2, a, lda, b_rows, n_lo, n_hi, d, 2 * TW_PANEL, c, ldc, accumulate);
  for (; d < width; d += TW_PANEL)
    tw_combine_pairs(rows, 1, a, lda, b_rows, n_lo, n_hi, d, width - d, c, ldc, accumulate);
}

#define tw_combine_rows_bfloat16_CALL(few) \
  tw_combine_rows_bfloat16_few(few, a, lda, b_rows, n_lo, n_hi, width, c, ldc, accumulate)
TW_FUNCTION void tw_combine_rows_bfloat16(int rows, const uint16_t *p, int64_t ldp, const uint16_t *const *b_rows,
                                          int n_lo, int n_hi, int width, float *c, int64_t ldc, bool accumulate) {
  const uint16_t *a = p;
  const int64_t lda = ldp;
  TW_EVERY_FEW(tw_combine_rows_bfloat16_CALL)
}
#endif

#endif
