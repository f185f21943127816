// Matrix products for a few rows (decoding): the other matrix is read once, where it lies, through row pointers.
//
// Its bandwidth is the limit, so nothing is packed. Rows are taken 4 at a time; a result's bits do not depend on how
// many there are, nor on where a row or a column stands. `next`: rows that will be read after these, n_next of them,
// which are prefetched towards the end, so that memory does not rest between one product and the next.
#ifndef TW_FEW_ROWS_H
#define TW_FEW_ROWS_H

#include "pack.h"

#define TW_FEW 4
#define TW_FEW_KEYS(rows) (TW_LANES == 16 || (rows) <= 2 ? 4 : 2)                       // of a block of dot products
#define TW_FEW_WIDE(rows) (TW_LANES == 16 ? (rows) <= 2 ? 8 : 4 : (rows) <= 2 ? 4 : 2)  // vectors of combined rows
// Keys, counted from the one being read, whose row is prefetched: 8 KiB ahead in rows of 128 elements.
#define TW_AHEAD(element) (64 / (int)sizeof(element))

// The row that is read as j-th, counted on into the next ones; prefetching one that is not read costs little.
#define TW_LATER(b_rows, j, n, next, n_next) \
  ((j) < (n) ? (const void *)(b_rows)[j] : (j) - (n) < (n_next) ? (next)[(j) - (n)] : (const void *)(b_rows)[(n) - 1])
#define TW_PREFETCH(row, at, element) __builtin_prefetch((const char *)(row) + (at) * (int64_t)sizeof(element), 0, 3)

// `rows`, a constant to what is called, is 1, 2 or 4. `last` is the number of the last row: three rows are four of
// which two are the same one, which costs nothing beside reading the other matrix, and a quarter less code to compile.
#define TW_ROW(r) ((r) == rows - 1 ? last : (r))
#define TW_EVERY_FEW(call, ...)                 \
  for (int some; rows > 0; rows -= some) {      \
    some = rows < TW_FEW ? rows : TW_FEW;       \
    switch (some) {                             \
      case 1:                                   \
        call(1, 0, a, lda, __VA_ARGS__);        \
        break;                                  \
      case 2:                                   \
        call(2, 1, a, lda, __VA_ARGS__);        \
        break;                                  \
      default:                                  \
        call(4, some - 1, a, lda, __VA_ARGS__); \
        break;                                  \
    }                                           \
    a += some * lda;                            \
    c += some * ldc;                            \
  }

// c[r][j] = a[r] . b_rows[j]. A vector of `step` elements at a time; `load` and `part` give a's and b's vectors.
#define TW_DOTS(name, a_element, b_element, vector, step, per_word, load_a, part_a, load_b, part_b, multiply_add)      \
  TW_INLINE void name##_few(const int rows, int last, const a_element *a, int64_t lda, const b_element *const *b_rows, \
                            int n, int depth, float *c, int64_t ldc, const void *const *next, int n_next) {            \
    const int keys = TW_FEW_KEYS(rows), whole = depth / (step) * (step);                                               \
    for (int j = 0; j < n; j += keys) {                                                                                \
      const b_element *b[TW_FEW];                                                                                      \
      const void *ahead[TW_FEW];                                                                                       \
      tw_f32 sum[TW_FEW * TW_FEW];                                                                                     \
      TW_UNROLL                                                                                                        \
      for (int i = 0; i < keys; i++) {                                                                                 \
        b[i] = b_rows[j + i < n ? j + i : n - 1];                                                                      \
        ahead[i] = TW_LATER(b_rows, j + i + TW_AHEAD(b_element), n, next, n_next);                                     \
      }                                                                                                                \
      TW_UNROLL                                                                                                        \
      for (int i = 0; i < TW_FEW * TW_FEW; i++) sum[i] = (tw_f32){0};                                                  \
      for (int k = 0; k < whole; k += (step)) {                                                                        \
        vector y[TW_FEW];                                                                                              \
        TW_UNROLL                                                                                                      \
        for (int i = 0; i < keys; i++) {                                                                               \
          y[i] = load_b(b[i] + k);                                                                                     \
          TW_PREFETCH(ahead[i], k, b_element);                                                                         \
        }                                                                                                              \
        TW_UNROLL                                                                                                      \
        for (int r = 0; r < rows; r++) {                                                                               \
          vector x = load_a(a + TW_ROW(r) * lda + k / (per_word));                                                     \
          TW_UNROLL                                                                                                    \
          for (int i = 0; i < keys; i++) sum[r * keys + i] = multiply_add(x, y[i], sum[r * keys + i]);                 \
        }                                                                                                              \
      }                                                                                                                \
      if (whole < depth) {                                                                                             \
        vector y[TW_FEW];                                                                                              \
        TW_UNROLL                                                                                                      \
        for (int i = 0; i < keys; i++) y[i] = part_b(b[i] + whole, depth - whole);                                     \
        TW_UNROLL                                                                                                      \
        for (int r = 0; r < rows; r++) {                                                                               \
          vector x = part_a(a + TW_ROW(r) * lda + whole / (per_word), depth - whole);                                  \
          TW_UNROLL                                                                                                    \
          for (int i = 0; i < keys; i++) sum[r * keys + i] = multiply_add(x, y[i], sum[r * keys + i]);                 \
        }                                                                                                              \
      }                                                                                                                \
      float each[TW_FEW * TW_FEW];                                                                                     \
      TW_UNROLL                                                                                                        \
      for (int i = 0; i < rows * keys; i += TW_LANES) tw_store_float32(each + i, tw_sum_each(sum + i));                \
      const int some = n - j < keys ? n - j : keys;                                                                    \
      TW_UNROLL                                                                                                        \
      for (int r = 0; r < rows; r++) {                                                                                 \
        if (some == keys)                                                                                              \
          memcpy(c + TW_ROW(r) * ldc + j, each + r * keys, sizeof(float) * keys);                                      \
        else                                                                                                           \
          for (int i = 0; i < some; i++) c[TW_ROW(r) * ldc + j + i] = each[r * keys + i];                              \
      }                                                                                                                \
    }                                                                                                                  \
  }                                                                                                                    \
  TW_FUNCTION void name(int rows, const a_element *a, int64_t lda, const b_element *const *b_rows, int n, int depth,   \
                        float *c, int64_t ldc, const void *const *next, int n_next) {                                  \
    TW_EVERY_FEW(name##_few, b_rows, n, depth, c, ldc, next, n_next)                                                   \
  }

#define TW_DOTS_OF(name, element, dtype)                                                                  \
  TW_DOTS(tw_dot_rows_##name, float, element, tw_f32, TW_LANES, 1, tw_load_float32, tw_load_float32_part, \
          tw_load_##dtype, tw_load_##dtype##_part, tw_fma)
TW_DOTS_OF(float32, float, float32)
TW_DOTS_OF(float32_float16, uint16_t, float16)
TW_DOTS_OF(float32_bfloat16, uint16_t, bfloat16)
TW_DOTS_OF(float32_float8_e4m3fn, uint8_t, float8_e4m3fn)

#if defined(TW_BF16_DOT)
// `a` in words as gemm.h has it (lda counts words), `depth` in elements.
TW_INLINE tw_i32 tw_a_pairs_part(const uint32_t *p, int n) { return tw_pairs_part((const uint16_t *)p, n); }
TW_DOTS(tw_dot_rows_bfloat16, uint32_t, uint16_t, tw_i32, 2 * TW_LANES, 2, tw_words, tw_a_pairs_part, tw_words,
        tw_pairs_part, tw_dot_pairs)
#endif

// c[r][d] (+)= sum over j in n_lo..n_hi of a[r][j] * b_rows[j][d], ascending. A block is `vectors` vectors wide, or
// with `some` not 0 the first `some` elements of one.
#define TW_COMBINE(name, b_element, load, part)                                                                       \
  TW_INLINE void name##_block(const int rows, int last, const int vectors, const float *a, int64_t lda,               \
                              const b_element *const *b_rows, int n_lo, int n_hi, int d, int some, float *c,          \
                              int64_t ldc, bool accumulate, const void *const *next, int n_next) {                    \
    tw_f32 sum[TW_FEW][8];                                                                                            \
    TW_UNROLL                                                                                                         \
    for (int r = 0; r < rows; r++) {                                                                                  \
      TW_UNROLL                                                                                                       \
      for (int v = 0; v < vectors; v++) {                                                                             \
        const float *at = c + TW_ROW(r) * ldc + d + v * TW_LANES;                                                     \
        sum[r][v] = !accumulate ? (tw_f32){0} : some ? tw_load_float32_part(at, some) : tw_load_float32(at);          \
      }                                                                                                               \
    }                                                                                                                 \
    for (int j = n_lo; j < n_hi; j++) {                                                                               \
      tw_f32 y[8];                                                                                                    \
      const void *ahead = TW_LATER(b_rows, j + TW_AHEAD(b_element), n_hi, next, n_next);                              \
      TW_UNROLL                                                                                                       \
      for (int v = 0; v < vectors; v++) {                                                                             \
        const b_element *at = b_rows[j] + d + v * TW_LANES;                                                           \
        y[v] = some ? part(at, some) : load(at);                                                                      \
        TW_PREFETCH(ahead, d + v * TW_LANES, b_element);                                                              \
      }                                                                                                               \
      TW_UNROLL                                                                                                       \
      for (int r = 0; r < rows; r++) {                                                                                \
        tw_f32 x = tw_f32_all(a[TW_ROW(r) * lda + j]);                                                                \
        TW_UNROLL                                                                                                     \
        for (int v = 0; v < vectors; v++) sum[r][v] = tw_fma(x, y[v], sum[r][v]);                                     \
      }                                                                                                               \
    }                                                                                                                 \
    TW_UNROLL                                                                                                         \
    for (int r = 0; r < rows; r++) {                                                                                  \
      TW_UNROLL                                                                                                       \
      for (int v = 0; v < vectors; v++) {                                                                             \
        float *at = c + TW_ROW(r) * ldc + d + v * TW_LANES;                                                           \
        if (some)                                                                                                     \
          tw_store_float32_part(at, sum[r][v], some);                                                                 \
        else                                                                                                          \
          tw_store_float32(at, sum[r][v]);                                                                            \
      }                                                                                                               \
    }                                                                                                                 \
  }                                                                                                                   \
  TW_INLINE void name##_few(const int rows, int last, const float *a, int64_t lda, const b_element *const *b_rows,    \
                            int n_lo, int n_hi, int width, float *c, int64_t ldc, bool accumulate,                    \
                            const void *const *next, int n_next) {                                                    \
    const int wide = TW_FEW_WIDE(rows);                                                                               \
    int d = 0;                                                                                                        \
    for (; d + wide * TW_LANES <= width; d += wide * TW_LANES)                                                        \
      name##_block(rows, last, wide, a, lda, b_rows, n_lo, n_hi, d, 0, c, ldc, accumulate, next, n_next);             \
    for (; d < width; d += TW_LANES)                                                                                  \
      name##_block(rows, last, 1, a, lda, b_rows, n_lo, n_hi, d, width - d < TW_LANES ? width - d : TW_LANES, c, ldc, \
                   accumulate, next, n_next);                                                                         \
  }                                                                                                                   \
  TW_FUNCTION void name(int rows, const float *a, int64_t lda, const b_element *const *b_rows, int n_lo, int n_hi,    \
                        int width, float *c, int64_t ldc, bool accumulate, const void *const *next, int n_next) {     \
    TW_EVERY_FEW(name##_few, b_rows, n_lo, n_hi, width, c, ldc, accumulate, next, n_next)                             \
  }

#define TW_COMBINE_OF(name, element, dtype) \
  TW_COMBINE(tw_combine_rows_##name, element, tw_load_##dtype, tw_load_##dtype##_part)
TW_COMBINE_OF(float32, float, float32)
TW_COMBINE_OF(float32_float16, uint16_t, float16)
TW_COMBINE_OF(float32_bfloat16, uint16_t, bfloat16)
TW_COMBINE_OF(float32_float8_e4m3fn, uint8_t, float8_e4m3fn)

#if defined(__AMX_BF16__)
// The same with `a` in bfloat16, lda in elements. Processors with AMX issue the product of pairs every other cycle, so
// that `a` widened first is faster.
#define TW_WIDENED 256  // columns of `a` at a time
TW_FUNCTION void tw_combine_rows_bfloat16(int rows, const uint16_t *a, int64_t lda, const uint16_t *const *b_rows,
                                          int n_lo, int n_hi, int width, float *c, int64_t ldc, bool accumulate,
                                          const void *const *next, int n_next) {
  float wide[TW_FEW * TW_WIDENED];
  for (int some; rows > 0; rows -= some, a += some * lda, c += some * ldc) {
    some = rows < TW_FEW ? rows : TW_FEW;
    int j = n_lo;
    do {
      const int n = n_hi - j < TW_WIDENED ? n_hi - j : TW_WIDENED;
      const bool last = j + n >= n_hi;
      for (int r = 0; r < some; r++) {
        for (int i = 0; i < n; i += TW_LANES) {
          const int part = n - i < TW_LANES ? n - i : TW_LANES;
          tw_store_float32(wide + r * TW_WIDENED + i, tw_load_bfloat16_part(a + r * lda + j + i, part));
        }
      }
      tw_combine_rows_float32_bfloat16(some, wide, TW_WIDENED, b_rows + j, 0, n, width, c, ldc, accumulate || j > n_lo,
                                       last ? next : (const void *const *)(b_rows + j + n),
                                       last ? n_next : n_hi - j - n);
      j += TW_WIDENED;
    } while (j < n_hi);
  }
}
#elif defined(TW_BF16_DOT)
// The same with `a` in bfloat16, lda in elements: pairs of rows 2k and 2k + 1 in one instruction. A pair of which one
// row is outside n_lo..n_hi has zeros for it, on both sides.
TW_INLINE void tw_combine_pair(const int rows, int last, const int panels, const uint16_t *a, int64_t lda,
                               const uint16_t *first, const uint16_t *second, int j, int d, int left,
                               tw_f32 (*sum)[8]) {
  tw_i32 y[8];
  TW_UNROLL
  for (int v = 0; v < panels; v++) {
    const int at = d + v * TW_PANEL;
    tw_zip_rows(first ? first + at : 0, second ? second + at : 0, left - v * TW_PANEL, &y[2 * v], &y[2 * v + 1]);
  }
  TW_UNROLL
  for (int r = 0; r < rows; r++) {
    uint32_t word = 0;
    if (first && second)
      memcpy(&word, a + TW_ROW(r) * lda + j, sizeof word);
    else
      word = first ? a[TW_ROW(r) * lda + j] : (uint32_t)a[TW_ROW(r) * lda + j + 1] << 16;
    tw_i32 x = tw_word_all(word);
    TW_UNROLL
    for (int v = 0; v < 2 * panels; v++) sum[r][v] = tw_dot_pairs(x, y[v], sum[r][v]);
  }
}

TW_INLINE void tw_combine_pairs(const int rows, int last, const int panels, const uint16_t *a, int64_t lda,
                                const uint16_t *const *b_rows, int n_lo, int n_hi, int d, int left, float *c,
                                int64_t ldc, bool accumulate, const void *const *next, int n_next) {
  tw_f32 sum[TW_FEW][8];
  TW_UNROLL
  for (int r = 0; r < rows; r++) {
    TW_UNROLL
    for (int v = 0; v < 2 * panels; v++) {
      const int some = left - v * TW_LANES < 0 ? 0 : left - v * TW_LANES;
      const float *at = c + TW_ROW(r) * ldc + d;
      sum[r][v] = !accumulate        ? (tw_f32){0}
                  : some >= TW_LANES ? tw_load_float32(at + v * TW_LANES)
                  : some             ? tw_load_float32_part(at + v * TW_LANES, some)
                                     : (tw_f32){0};
    }
  }
  int j = n_lo & ~1;
  if (j < n_lo && j + 1 < n_hi) tw_combine_pair(rows, last, panels, a, lda, 0, b_rows[j + 1], j, d, left, sum);
  if (j < n_lo) j += 2;
  for (; j + 2 <= n_hi; j += 2) {
    const int later = j + TW_AHEAD(uint16_t);
    const void *ahead[2] = {TW_LATER(b_rows, later, n_hi, next, n_next),
                            TW_LATER(b_rows, later + 1, n_hi, next, n_next)};
    TW_UNROLL
    for (int v = 0; v < panels; v++) {
      TW_PREFETCH(ahead[0], d + v * TW_PANEL, uint16_t);
      TW_PREFETCH(ahead[1], d + v * TW_PANEL, uint16_t);
    }
    tw_combine_pair(rows, last, panels, a, lda, b_rows[j], b_rows[j + 1], j, d, left, sum);
  }
  if (j < n_hi) tw_combine_pair(rows, last, panels, a, lda, b_rows[j], 0, j, d, left, sum);
  TW_UNROLL
  for (int r = 0; r < rows; r++) {
    TW_UNROLL
    for (int v = 0; v < 2 * panels; v++) {
      const int some = left - v * TW_LANES;
      float *at = c + TW_ROW(r) * ldc + d + v * TW_LANES;
      if (some >= TW_LANES)
        tw_store_float32(at, sum[r][v]);
      else if (some > 0)
        tw_store_float32_part(at, sum[r][v], some);
    }
  }
}

TW_INLINE void tw_combine_rows_bfloat16_few(const int rows, int last, const uint16_t *a, int64_t lda,
                                            const uint16_t *const *b_rows, int n_lo, int n_hi, int width, float *c,
                                            int64_t ldc, bool accumulate, const void *const *next, int n_next) {
  const int wide = TW_FEW_WIDE(rows) / 2;
  int d = 0;
  for (; d + wide * TW_PANEL <= width; d += wide * TW_PANEL)
    tw_combine_pairs(rows, last, wide, a, lda, b_rows, n_lo, n_hi, d, wide * TW_PANEL, c, ldc, accumulate, next,
                     n_next);
  for (; d < width; d += TW_PANEL)
    tw_combine_pairs(rows, last, 1, a, lda, b_rows, n_lo, n_hi, d, width - d, c, ldc, accumulate, next, n_next);
}

TW_FUNCTION void tw_combine_rows_bfloat16(int rows, const uint16_t *a, int64_t lda, const uint16_t *const *b_rows,
                                          int n_lo, int n_hi, int width, float *c, int64_t ldc, bool accumulate,
                                          const void *const *next, int n_next) {
  TW_EVERY_FEW(tw_combine_rows_bfloat16_few, b_rows, n_lo, n_hi, width, c, ldc, accumulate, next, n_next)
}
#endif

#endif
