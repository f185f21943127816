// Copies of rows, found through pointers, in the order gemm.h reads them: panels of TW_PANEL columns, each [depth][TW_PANEL].
//
// Panels lie `panel_stride` elements apart, so that a tile may have room for more than it holds.
#ifndef TW_PACK_H
#define TW_PACK_H

#include "gemm.h"

// Rows and columns of a square of words exchanged, by exchanging its quarters, then theirs, and so on.
#define TW_LANE_SWAP_A(i, s) ((i) & (s) ? (i) - (s) + TW_LANES : (i))
#define TW_LANE_SWAP_B(i, s) ((i) & (s) ? (i) + TW_LANES : (i) + (s))
#define TW_SWAP(x, s)                                                  \
  TW_UNROLL for (int i = 0; i < TW_LANES; i++) if (!(i & (s))) {       \
    tw_i32 a = x[i], b = x[i + (s)];                                   \
    x[i] = TW_SHUFFLE(a, b, TW_LIST(TW_LANE_SWAP_A, s));               \
    x[i + (s)] = TW_SHUFFLE(a, b, TW_LIST(TW_LANE_SWAP_B, s));         \
  }
TW_INLINE void tw_transpose(tw_i32 *x) {
#if TW_LANES == 16
  TW_SWAP(x, 8)
#endif
#if TW_LANES >= 8
  TW_SWAP(x, 4)
#endif
  TW_SWAP(x, 2)
  TW_SWAP(x, 1)
}

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

TW_INLINE tw_i32 tw_floats_part(const float *p, int n) { return tw_words_part(p, n); }

// A row becomes a column: squares of TW_LANES rows by TW_LANES words. `per_word` elements make a word.
#define TW_PACK_COLUMNS(name, element, word, per_word, part)                                                     \
  TW_FUNCTION void name(const element *const *rows, int n, int depth, word *panels, int64_t panel_stride) {      \
    const int words = (depth + (per_word) - 1) / (per_word);                                                     \
    for (int j = 0; j < n || j % TW_PANEL; j += TW_LANES) {                                                      \
      word *panel = panels + j / TW_PANEL * panel_stride + j % TW_PANEL;                                         \
      const int count = n - j < TW_LANES ? n - j : TW_LANES;                                                     \
      for (int k = 0; k < words; k += TW_LANES) {                                                                \
        tw_i32 x[TW_LANES];                                                                                      \
        const int left = depth - k * (per_word), deep = words - k < TW_LANES ? words - k : TW_LANES;             \
        if (count == TW_LANES && left >= (per_word) * TW_LANES) {                                                \
          TW_UNROLL for (int i = 0; i < TW_LANES; i++) x[i] = tw_words(rows[j + i] + k * (per_word));            \
          tw_transpose(x);                                                                                       \
          TW_UNROLL for (int i = 0; i < TW_LANES; i++) memcpy(panel + (k + i) * TW_PANEL, &x[i], sizeof x[i]);   \
          continue;                                                                                              \
        }                                                                                                        \
        const int some = left < (per_word) * TW_LANES ? left : (per_word) * TW_LANES;                            \
        TW_UNROLL for (int i = 0; i < TW_LANES; i++)                                                             \
          x[i] = i < count ? part(rows[j + i] + k * (per_word), some) : (tw_i32){0};                             \
        tw_transpose(x);                                                                                         \
        TW_UNROLL for (int i = 0; i < TW_LANES; i++)                                                             \
          if (i < deep) memcpy(panel + (k + i) * TW_PANEL, &x[i], sizeof x[i]);                                  \
      }                                                                                                          \
    }                                                                                                            \
  }
TW_PACK_COLUMNS(tw_pack_columns_float32, float, float, 1, tw_floats_part)
TW_PACK_COLUMNS(tw_pack_columns_bfloat16, uint16_t, uint32_t, 2, tw_pairs_part)

TW_FUNCTION void tw_pack_rows_float32(const float *const *rows, int n, int width, float *panels, int64_t panel_stride) {
  for (int k = 0; k < n; k++) {
    for (int d = 0; d < width; d += TW_PANEL) {
      float *out = panels + d / TW_PANEL * panel_stride + (int64_t)k * TW_PANEL;
      for (int v = 0; v < TW_PANEL; v += TW_LANES) {
        const int left = width - d - v, some = left < 0 ? 0 : left < TW_LANES ? left : TW_LANES;
        tw_store_float32(out + v, some == TW_LANES ? tw_load_float32(rows[k] + d + v)
                                                   : tw_load_float32_part(rows[k] + (some ? d + v : 0), some));
      }
    }
  }
}

// Pairs of elements of two rows, the first row's low, for TW_PANEL columns.
TW_INLINE void tw_zip_halves(tw_u16 a0, tw_u16 a1, tw_u16 b0, tw_u16 b1, tw_i32 *low, tw_i32 *high) {
  *low = (tw_i32)(__builtin_convertvector(a0, tw_u32) | __builtin_convertvector(b0, tw_u32) << 16);
  *high = (tw_i32)(__builtin_convertvector(a1, tw_u32) | __builtin_convertvector(b1, tw_u32) << 16);
}

TW_INLINE void tw_panel_halves(const uint16_t *row, int left, tw_u16 *x) {  // no row at all: zeros
  TW_UNROLL for (int v = 0; v < 2; v++) {
    const int some = !row || left < v * TW_LANES ? 0 : left - v * TW_LANES;
    x[v] = some >= TW_LANES ? tw_halves(row + v * TW_LANES) : some ? tw_halves_part(row + v * TW_LANES, some) : (tw_u16){0};
  }
}

TW_FUNCTION void tw_pack_rows_bfloat16(const uint16_t *const *rows, int n, int width, uint32_t *panels,
                                       int64_t panel_stride) {
  for (int k = 0; k < n; k += 2) {
    for (int d = 0; d < width; d += TW_PANEL) {
      uint32_t *out = panels + d / TW_PANEL * panel_stride + (int64_t)(k / 2) * TW_PANEL;
      tw_u16 a[2], b[2];
      tw_i32 low, high;
      tw_panel_halves(rows[k] + d, width - d, a);
      tw_panel_halves(k + 1 < n ? rows[k + 1] + d : 0, width - d, b);
      tw_zip_halves(a[0], a[1], b[0], b[1], &low, &high);
      memcpy(out, &low, sizeof low);
      memcpy(out + TW_LANES, &high, sizeof high);
    }
  }
}

TW_FUNCTION void tw_round_rows_bfloat16(const float *src, int64_t ld, int rows, int width, uint16_t *dst, int64_t ldd) {
  for (int r = 0; r < rows; r++) {
    int d = 0;
    for (; d + TW_LANES <= width; d += TW_LANES) tw_store_bfloat16(dst + r * ldd + d, tw_load_float32(src + r * ld + d));
    if (d < width)
      tw_store_bfloat16_part(dst + r * ldd + d, tw_load_float32_part(src + r * ld + d, width - d), width - d);
  }
}

TW_INLINE void tw_prefetch(const void *p, int64_t bytes) {  // into the second-level cache
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}

#endif
