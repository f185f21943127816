// Products of bfloat16 pairs by AMX, as gemm.h describes them: A's words and B's panels are tiles as they lie.
//
// 16 words of the depth are summed apart, then added to C: an element's bits depend on the depth range alone.
// Denormal operands and sums count as 0, as in AVX512-BF16.
#ifndef TW_AMX_H
#define TW_AMX_H

#include <sys/syscall.h>
#include <unistd.h>

#include "memory.h"

#define TW_TILE 16       // rows of a tile, and words of its rows
#define TW_TILE_ROWS 32  // rows of a block: C is 2 by 2 tiles

// Linux allows tiles on request, once for all threads of a process. Where it refuses, dsl/isa.py does not offer them.
#define TW_ARCH_REQ_XCOMP_PERM 0x1023
#define TW_XFEATURE_XTILEDATA 18
__attribute__((constructor)) static void tw_request_tiles(void) {
  syscall(SYS_arch_prctl, TW_ARCH_REQ_XCOMP_PERM, TW_XFEATURE_XTILEDATA);
}

// ---- shapes of tiles: setting them costs as much as a tenth of a product, so that they can be kept ------------------

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];  // of a row
  uint8_t rows[16];
} tw_tile_config;

#define TW_TILES_KEPT (1 << 30)
static __thread int tw_tiles;  // TW_TILES_KEPT and the shape that this thread has set; 0 where none is kept

// Until tw_end_products, products of this thread keep the shapes of tiles. Nothing else may use tiles in between.
TW_FUNCTION void tw_begin_products(void) { tw_tiles = TW_TILES_KEPT; }

// Released, tiles cost nothing when threads are switched, and whoever uses them next sets shapes first.
TW_FUNCTION void tw_end_products(void) {
  if (tw_tiles != TW_TILES_KEPT) __asm__ volatile("tilerelease" ::: "memory");
  tw_tiles = 0;
}

// Tiles 0 to 3 are C: 0 and 1 of `top` rows, 2 and 3 of `bottom` rows. 4 and 5 are A, top and bottom; 6 and 7 are B.
TW_INLINE void tw_shape_tiles(int top, int bottom, int words) {
  const int shape = TW_TILES_KEPT | top | bottom << 8 | words << 16;
  if (tw_tiles == shape) return;
  tw_tiles = shape;
  const uint8_t t = (uint8_t)top, b = (uint8_t)bottom, w = (uint8_t)words;
  const uint16_t part = (uint16_t)(4 * words);
  const tw_tile_config config = {1, 0, {0}, {64, 64, 64, 64, part, part, 64, 64}, {t, t, b, b, t, b, w, w}};
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

// ---- a block of C ---------------------------------------------------------------------------------------------------

// Not the compilers' intrinsics: gcc 12's do not say that they read memory.
#define TW_TILE_LOAD(tile, p, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(p), "r"((int64_t)(stride) * 4) : "memory")
#define TW_TILE_STORE(tile, p, stride) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(p), "r"((int64_t)(stride) * 4) : "memory")
#define TW_TILE_ZERO(tile) __asm__ volatile("tilezero %tmm" #tile)
#define TW_TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %tmm" #b ", %tmm" #a ", %tmm" #c)

typedef struct {
  const uint32_t *a, *panels;
  float *c;
  int64_t lda, panel_stride, ldc;
  int steps, words;  // the depth: `steps` tiles of `words` words
  bool accumulate;
  bool whole;  // rows fill their tiles
} tw_tile_product;

// Row tile r of A at step k, vector v of columns of B there, and where they meet in C.
#define TW_A(tile, r, k) TW_TILE_LOAD(tile, p->a + (r) * TW_TILE * p->lda + (k) * TW_TILE, p->lda)
#define TW_B(tile, v, k) TW_TILE_LOAD(tile, b[v] + (int64_t)(k) * TW_TILE * TW_PANEL, TW_PANEL)
#define TW_C_AT(r, v) (c + (r) * TW_TILE * p->ldc + (v) * TW_TILE)
#define TW_C_END(tile, r, v) TW_TILE_STORE(tile, TW_C_AT(r, v), p->ldc)
#define TW_C_START(tile, r, v)                   \
  do {                                           \
    if (p->accumulate)                           \
      TW_TILE_LOAD(tile, TW_C_AT(r, v), p->ldc); \
    else                                         \
      TW_TILE_ZERO(tile);                        \
  } while (0)

// Half of B's tile two steps on, which may be the next block's: a few lines at a time, between loads.
TW_INLINE void tw_prefetch_tile(const tw_tile_product *p, const uint32_t *b, const uint32_t *next, int k, int half) {
  const uint32_t *from = k + 2 < p->steps ? b + (int64_t)(k + 2) * TW_TILE * TW_PANEL
                                          : next + (int64_t)(k + 2 - p->steps) * TW_TILE * TW_PANEL;
  TW_UNROLL
  for (int i = half * TW_TILE / 2; i < (half + 1) * TW_TILE / 2; i++) __builtin_prefetch(from + i * TW_PANEL, 0, 3);
}
#define TW_B_AHEAD(v, k, half) tw_prefetch_tile(p, b[v], next[v], k, half)

// The last two steps of 2 by 2 whole tiles, one tile of C after another: each is stored while the next is computed.
TW_INLINE void tw_tile_last_steps(const tw_tile_product *p, const uint32_t *const *b, const uint32_t *const *next,
                                  float *c, int k) {
  TW_A(4, 0, k);
  TW_B(6, 0, k);
  TW_TILE_DOT(0, 4, 6);
  TW_B_AHEAD(0, k, 0);
  TW_A(5, 0, k + 1);
  TW_B(7, 0, k + 1);
  TW_TILE_DOT(0, 5, 7);
  TW_C_END(0, 0, 0);
  TW_B_AHEAD(1, k, 0);
  TW_A(4, 1, k);
  TW_TILE_DOT(2, 4, 6);
  TW_B_AHEAD(0, k, 1);
  TW_A(5, 1, k + 1);
  TW_TILE_DOT(2, 5, 7);
  TW_C_END(2, 1, 0);
  TW_B_AHEAD(1, k, 1);
  TW_B(6, 1, k);
  TW_TILE_DOT(3, 4, 6);
  TW_B_AHEAD(0, k + 1, 0);
  TW_B(7, 1, k + 1);
  TW_TILE_DOT(3, 5, 7);
  TW_C_END(3, 1, 1);
  TW_B_AHEAD(1, k + 1, 0);
  TW_A(4, 0, k);
  TW_TILE_DOT(1, 4, 6);
  TW_B_AHEAD(0, k + 1, 1);
  TW_A(5, 0, k + 1);
  TW_TILE_DOT(1, 5, 7);
  TW_C_END(1, 0, 1);
  TW_B_AHEAD(1, k + 1, 1);
}

TW_INLINE void tw_tile_step(const int tiles, const int vectors, const tw_tile_product *p, const uint32_t *const *b,
                            const uint32_t *const *next, int k) {
  TW_A(4, 0, k);
  TW_B(6, 0, k);
  TW_TILE_DOT(0, 4, 6);
  TW_B_AHEAD(0, k, 0);
  if (tiles == 2) {
    TW_A(5, 1, k);
    TW_TILE_DOT(2, 5, 6);
  }
  TW_B_AHEAD(0, k, 1);
  if (vectors == 1) return;
  TW_B(7, 1, k);
  TW_TILE_DOT(1, 4, 7);
  TW_B_AHEAD(1, k, 0);
  if (tiles == 2) TW_TILE_DOT(3, 5, 7);
  TW_B_AHEAD(1, k, 1);
}

// `tiles` of rows by `vectors` of columns: constants, 1 or 2.
TW_INLINE void tw_tile_block(const int tiles, const int vectors, const tw_tile_product *p, const uint32_t *const *b,
                             const uint32_t *const *next, float *c) {
  const bool apart = tiles == 2 && vectors == 2 && p->whole && p->steps >= 2;
  const int steps = apart ? p->steps - 2 : p->steps;
  TW_C_START(0, 0, 0);
  if (tiles == 2) TW_C_START(2, 1, 0);
  if (vectors == 2) TW_C_START(1, 0, 1);
  if (tiles == 2 && vectors == 2) TW_C_START(3, 1, 1);
  for (int k = 0; k < steps; k++) tw_tile_step(tiles, vectors, p, b, next, k);
  if (apart) {
    tw_tile_last_steps(p, b, next, c, steps);
    return;
  }
  TW_C_END(0, 0, 0);
  if (tiles == 2) TW_C_END(2, 1, 0);
  if (vectors == 2) TW_C_END(1, 0, 1);
  if (tiles == 2 && vectors == 2) TW_C_END(3, 1, 1);
}

// ---- all of C -------------------------------------------------------------------------------------------------------

// Where a vector of columns, and the one after it, begin in the panels.
TW_INLINE void tw_tile_columns(const tw_tile_product *p, int column, const uint32_t **b) {
  for (int v = 0; v < 2; v++, column += TW_TILE)
    b[v] = p->panels + column / TW_PANEL * p->panel_stride + column % TW_PANEL;
}

// One or two tiles of rows against all columns.
TW_INLINE void tw_tile_rows(const int tiles, const tw_tile_product *p, int column_lo, int column_hi) {
  const uint32_t *b[2], *next[2];
  tw_tile_columns(p, column_lo, next);
  for (int j = column_lo; j < column_hi; j += TW_PANEL) {
    const int left = column_hi - j;
    b[0] = next[0], b[1] = next[1];
    tw_tile_columns(p, left > TW_PANEL ? j + TW_PANEL : column_lo, next);
    if (left >= TW_PANEL)
      tw_tile_block(tiles, 2, p, b, next, p->c + j);
    else
      tw_tile_block(tiles, 1, p, b, next, p->c + j);
  }
}

TW_LOCAL void tw_tile_depth(int rows, int column_lo, int column_hi, tw_tile_product p) {
  for (int some; rows > 0; rows -= some) {
    some = rows < TW_TILE_ROWS ? rows : TW_TILE_ROWS;
    p.whole = some == TW_TILE_ROWS;
    if (some > TW_TILE) {
      tw_shape_tiles(TW_TILE, some - TW_TILE, p.words);
      tw_tile_rows(2, &p, column_lo, column_hi);
    } else {
      tw_shape_tiles(some, TW_TILE, p.words);
      tw_tile_rows(1, &p, column_lo, column_hi);
    }
    p.a += some * p.lda, p.c += some * p.ldc;
  }
}

// Words that fill no tile come last, in narrower tiles.
TW_FUNCTION void tw_gemm_bfloat16(int rows, int column_lo, int column_hi, int depth_lo, int depth_hi, const uint32_t *a,
                                  int64_t lda, const uint32_t *panels, int64_t panel_stride, float *c, int64_t ldc,
                                  bool accumulate) {
  const bool alone = !tw_tiles;
  const int depth = depth_hi > depth_lo ? depth_hi - depth_lo : 0, steps = depth / TW_TILE, left = depth % TW_TILE;
  tw_tile_product p = {.a = a + depth_lo, .lda = lda, .c = c, .ldc = ldc, .accumulate = accumulate};
  p.panels = panels + (int64_t)depth_lo * TW_PANEL, p.panel_stride = panel_stride;
  p.steps = steps, p.words = TW_TILE;
  if (alone) tw_begin_products();
  if (steps || !left) tw_tile_depth(rows, column_lo, column_hi, p);
  if (left) {
    p.a += steps * TW_TILE, p.panels += (int64_t)steps * TW_TILE * TW_PANEL;
    p.accumulate = accumulate || steps, p.steps = 1, p.words = left;
    tw_tile_depth(rows, column_lo, column_hi, p);
  }
  if (alone) tw_end_products();
}

#endif
