// Copies of rows, found through pointers, in the order gemm.h reads them: panels of TW_PANEL columns, each
// [depth][TW_PANEL].
//
// Panels lie `panel_stride` elements apart, so that a tile may have room for more than it holds.
#ifndef TW_PACK_H
#define TW_PACK_H

#include "gemm.h"

// Rows and columns of a square of words exchanged, by exchanging its quarters, then theirs, and so on.
#define TW_ZIP_INDEX(i, s) (i) + (s), (i) + (s) + 32
#define TW_LANE_SWAP_A(i, s) ((i) & (s) ? (i) - (s) + TW_LANES : (i))
#define TW_LANE_SWAP_B(i, s) ((i) & (s) ? (i) + TW_LANES : (i) + (s))
#define TW_SWAP(x, s)                                            \
  TW_UNROLL                                                      \
  for (int i = 0; i < TW_LANES; i++)                             \
    if (!(i & (s))) {                                            \
      tw_i32 a = x[i], b = x[i + (s)];                           \
      x[i] = TW_SHUFFLE(a, b, TW_LIST(TW_LANE_SWAP_A, s));       \
      x[i + (s)] = TW_SHUFFLE(a, b, TW_LIST(TW_LANE_SWAP_B, s)); \
    }
TW_INLINE void tw_transpose(tw_i32 *x){
#if TW_LANES == 16
    TW_SWAP(x, 8)
#endif
#if TW_LANES >= 8
        TW_SWAP(x, 4)
#endif
            TW_SWAP(x, 2) TW_SWAP(x, 1)}

// Elements of 2 bytes as words of two, n elements of them; the missing half of the last word is 0.
TW_INLINE tw_i32 tw_pairs_part(const uint16_t *p, int n) {
#if defined(TW_AVX512)
  return (tw_i32)_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
#else
  uint16_t x[2 * TW_LANES] = {0};
  for (int i = 0; i < n && i < 2 * TW_LANES; i++) x[i] = p[i];
  return tw_words(x);
#endif
}

// A row becomes a column: squares of TW_LANES rows by TW_LANES words. `per_word` elements make a word.
#define TW_PACK_COLUMNS(name, element, word, per_word, whole, part)                                                  \
  TW_FUNCTION void name(const element *const *rows, int n, int depth, word *panels, int64_t panel_stride) {          \
    const int words = (depth + (per_word) - 1) / (per_word);                                                         \
    for (int j = 0; j < n || j % TW_PANEL; j += TW_LANES) {                                                          \
      word *panel = panels + j / TW_PANEL * panel_stride + j % TW_PANEL;                                             \
      const int count = n - j < TW_LANES ? n - j : TW_LANES;                                                         \
      int k = 0;                                                                                                     \
      for (; count == TW_LANES && depth - k * (per_word) >= (per_word) * TW_LANES; k += TW_LANES) {                  \
        tw_i32 x[TW_LANES];                                                                                          \
        TW_UNROLL                                                                                                    \
        for (int i = 0; i < TW_LANES; i++) x[i] = (tw_i32)whole(rows[j + i] + k * (per_word));                       \
        tw_transpose(x);                                                                                             \
        TW_UNROLL                                                                                                    \
        for (int i = 0; i < TW_LANES; i++) memcpy(panel + (k + i) * TW_PANEL, &x[i], sizeof x[i]);                   \
      }                                                                                                              \
      for (; k < words; k += TW_LANES) {                                                                             \
        tw_i32 x[TW_LANES] = {{0}};                                                                                  \
        const int left = depth - k * (per_word), some = left < (per_word) * TW_LANES ? left : (per_word) * TW_LANES; \
        for (int i = 0; i < count; i++) x[i] = (tw_i32)part(rows[j + i] + k * (per_word), some);                     \
        tw_transpose(x);                                                                                             \
        for (int i = 0; i < TW_LANES && k + i < words; i++) memcpy(panel + (k + i) * TW_PANEL, &x[i], sizeof x[i]);  \
      }                                                                                                              \
    }                                                                                                                \
  }
TW_PACK_COLUMNS(tw_pack_columns_bfloat16, uint16_t, uint32_t, 2, tw_words, tw_pairs_part)

#define TW_PACK_ROWS(name, element, whole, part)                                                             \
  TW_FUNCTION void name(const element *const *rows, int n, int width, float *panels, int64_t panel_stride) { \
    for (int k = 0; k < n; k++) {                                                                            \
      for (int d = 0; d < width; d += TW_PANEL) {                                                            \
        const element *row = rows[k] + d;                                                                    \
        float *out = panels + d / TW_PANEL * panel_stride + (int64_t)k * TW_PANEL;                           \
        const int left = width - d, more = left - TW_LANES;                                                  \
        if (left >= TW_PANEL) {                                                                              \
          tw_store_float32(out, whole(row));                                                                 \
          tw_store_float32(out + TW_LANES, whole(row + TW_LANES));                                           \
        } else {                                                                                             \
          tw_store_float32(out, more >= 0 ? whole(row) : part(row, left));                                   \
          tw_store_float32(out + TW_LANES, more > 0 ? part(row + TW_LANES, more) : (tw_f32){0});             \
        }                                                                                                    \
      }                                                                                                      \
    }                                                                                                        \
  }

// Into float32 panels, of rows of any floating-point type.
#define TW_PACK(name, element, dtype)                                                                 \
  TW_PACK_COLUMNS(tw_pack_columns_##name, element, float, 1, tw_load_##dtype, tw_load_##dtype##_part) \
  TW_PACK_ROWS(tw_pack_rows_##name, element, tw_load_##dtype, tw_load_##dtype##_part)
TW_PACK(float32, float, float32)
TW_PACK(float32_float16, uint16_t, float16)
TW_PACK(float32_bfloat16, uint16_t, bfloat16)
TW_PACK(float32_float8_e4m3fn, uint8_t, float8_e4m3fn)

// Pairs of the elements of two rows, the first row's low: `low` of the first TW_LANES columns, `high` of the next.
TW_INLINE void tw_zip_pairs(tw_i32 a, tw_i32 b, tw_i32 *low, tw_i32 *high) {
#if defined(TW_AVX512)
  static const uint16_t at[2][32] = {{TW_LIST16(TW_ZIP_INDEX, 0)}, {TW_LIST16(TW_ZIP_INDEX, 16)}};
  *low = (tw_i32)_mm512_permutex2var_epi16((__m512i)a, (__m512i)tw_words(at[0]), (__m512i)b);
  *high = (tw_i32)_mm512_permutex2var_epi16((__m512i)a, (__m512i)tw_words(at[1]), (__m512i)b);
#else
  const tw_u32 even = ((tw_u32)a & 0xffff) | (tw_u32)b << 16, odd = (tw_u32)a >> 16 | ((tw_u32)b & 0xffff0000u);
  *low = (tw_i32)TW_SHUFFLE(even, odd, TW_LIST(TW_LANE_ZIP_LOW, 0));
  *high = (tw_i32)TW_SHUFFLE(even, odd, TW_LIST(TW_LANE_ZIP_HIGH, 0));
#endif
}

// The same of memory: `left` columns, no more than a panel; no row at all is zeros.
TW_INLINE void tw_zip_rows(const uint16_t *first, const uint16_t *second, int left, tw_i32 *low, tw_i32 *high) {
  const bool whole = left >= TW_PANEL;
  const tw_i32 a = !first ? (tw_i32){0} : whole ? tw_words(first) : tw_pairs_part(first, left);
  const tw_i32 b = !second ? (tw_i32){0} : whole ? tw_words(second) : tw_pairs_part(second, left);
  tw_zip_pairs(a, b, low, high);
}

TW_FUNCTION void tw_pack_rows_bfloat16(const uint16_t *const *rows, int n, int width, uint32_t *panels,
                                       int64_t panel_stride) {
  for (int k = 0; k < n; k += 2) {
    for (int d = 0; d < width; d += TW_PANEL) {
      uint32_t *out = panels + d / TW_PANEL * panel_stride + (int64_t)(k / 2) * TW_PANEL;
      tw_i32 low, high;
      tw_zip_rows(rows[k] + d, k + 1 < n ? rows[k + 1] + d : 0, width - d, &low, &high);
      memcpy(out, &low, sizeof low);
      memcpy(out + TW_LANES, &high, sizeof high);
    }
  }
}

TW_FUNCTION void tw_round_rows_bfloat16(const float *src, int64_t ld, int rows, int width, uint16_t *dst, int64_t ldd) {
  for (int r = 0; r < rows; r++) {
    int d = 0;
    for (; d + TW_LANES <= width; d += TW_LANES)
      tw_store_bfloat16(dst + r * ldd + d, tw_load_float32(src + r * ld + d));
    if (d < width)
      tw_store_bfloat16_part(dst + r * ldd + d, tw_load_float32_part(src + r * ld + d, width - d), width - d);
  }
}

#endif
