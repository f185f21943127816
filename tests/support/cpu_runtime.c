// The runtime headers as a library, each function over arrays and named t_ instead of tw_, for
// tests/test_cpu_runtime*.py to compare.
#include "tilewright.h"

int t_lanes(void) { return TW_LANES; }
int t_micro_rows(void) { return TW_MICRO_ROWS; }

int t_has_bf16_dot(void) {
#if defined(TW_BF16_DOT)
  return 1;
#else
  return 0;
#endif
}

// name(in.., out, n): by vectors, whole ones and a part; name_1: by numbers
#define EACH(n, body)                                            \
  for (long i = 0; i < n; i += TW_LANES) {                       \
    const int some = n - i < TW_LANES ? (int)(n - i) : TW_LANES; \
    body                                                         \
  }
#define UNARY(name, in, out, load, store)                                                         \
  void t_##name(const in *x, out *y, long n) {                                                    \
    EACH(n, tw_store_##store##_part(y + i, tw_##name(tw_load_##load##_part(x + i, some)), some);) \
  }                                                                                               \
  void t_##name##_1(const in *x, out *y, long n) {                                                \
    for (long i = 0; i < n; i++) y[i] = tw_##name##_1(x[i]);                                      \
  }
#define BINARY(name, type, dtype)                                                                                   \
  void t_##name(const type *a, const type *b, type *y, long n) {                                                    \
    EACH(n, tw_store_##dtype##_part(                                                                                \
                y + i, tw_##name(tw_load_##dtype##_part(a + i, some), tw_load_##dtype##_part(b + i, some)), some);) \
  }                                                                                                                 \
  void t_##name##_1(const type *a, const type *b, type *y, long n) {                                                \
    for (long i = 0; i < n; i++) y[i] = tw_##name##_1(a[i], b[i]);                                                  \
  }
UNARY(abs, float, float, float32, float32)
UNARY(sqrt, float, float, float32, float32)
UNARY(exp, float, float, float32, float32)
UNARY(exp_bf16, float, float, float32, float32)
UNARY(log, float, float, float32, float32)
UNARY(tanh, float, float, float32, float32)
UNARY(f32_of_i32, int32_t, float, int32, float32)
UNARY(i32_of_f32, float, int32_t, float32, int32)
UNARY(bits, float, int32_t, float32, int32)
UNARY(from_bits, int32_t, float, int32, float32)
UNARY(abs_i32, int32_t, int32_t, int32, int32)
BINARY(max, float, float32)
BINARY(min, float, float32)
BINARY(floordiv_i32, int32_t, int32)
BINARY(mod_i32, int32_t, int32)
BINARY(max_i32, int32_t, int32)
BINARY(min_i32, int32_t, int32)
BINARY(shl_i32, int32_t, int32)
BINARY(shr_i32, int32_t, int32)

#define WIDE(name)                                                        \
  void t_##name(const int64_t *a, const int64_t *b, int64_t *y, long n) { \
    for (long i = 0; i < n; i++) y[i] = tw_##name(a[i], b[i]);            \
  }
WIDE(floordiv_64)
WIDE(mod_64)
WIDE(max_64)
WIDE(min_64)

// Whole vectors through the whole form, the rest through the part, and every element alone.
#define LOAD(dtype, in, out, whole)                                                       \
  void t_load_##dtype(const in *x, out *y, long n) {                                      \
    EACH(n, if (some == TW_LANES) tw_store_##whole(y + i, tw_load_##dtype(x + i));        \
         else tw_store_##whole##_part(y + i, tw_load_##dtype##_part(x + i, some), some);) \
  }                                                                                       \
  void t_one_##dtype(const in *x, out *y, long n) {                                       \
    for (long i = 0; i < n; i++) y[i] = tw_one_##dtype(x + i);                            \
  }                                                                                       \
  void t_pad_##dtype(const in *x, out *y, int n) { tw_store_##whole(y, tw_load_##dtype##_part(x, n)); }
LOAD(float32, float, float, float32)
LOAD(float16, uint16_t, float, float32)
LOAD(bfloat16, uint16_t, float, float32)
LOAD(float8_e4m3fn, uint8_t, float, float32)
LOAD(int32, int32_t, int32_t, int32)
LOAD(uint32, uint32_t, int32_t, int32)
LOAD(int64, int64_t, int32_t, int32)
LOAD(uint8, uint8_t, int32_t, int32)
LOAD(bool, uint8_t, int32_t, int32)

#define STORE(dtype, in, out, whole)                                                      \
  void t_store_##dtype(const in *x, out *y, long n) {                                     \
    EACH(n, if (some == TW_LANES) tw_store_##dtype(y + i, tw_load_##whole(x + i));        \
         else tw_store_##dtype##_part(y + i, tw_load_##whole##_part(x + i, some), some);) \
  }                                                                                       \
  void t_put_##dtype(const in *x, out *y, long n) {                                       \
    for (long i = 0; i < n; i++) tw_put_##dtype(y + i, x[i]);                             \
  }
STORE(float32, float, float, float32)
STORE(float16, float, uint16_t, float32)
STORE(bfloat16, float, uint16_t, float32)
STORE(int32, int32_t, int32_t, int32)
STORE(uint32, int32_t, uint32_t, int32)
STORE(int64, int32_t, int64_t, int32)
STORE(uint8, int32_t, uint8_t, int32)
STORE(bool, int32_t, uint8_t, int32)

void t_reduce_float(const float *x, float *y) {
  const tw_f32 v = tw_load_float32(x);
  y[0] = tw_sum(v), y[1] = tw_max_of(v), y[2] = tw_min_of(v);
  tw_f32 each[TW_LANES];
  for (int i = 0; i < TW_LANES; i++) each[i] = v;
  tw_store_float32(y + 3, tw_sum_each(each));
}

void t_reduce_int(const int32_t *x, int32_t *y) {
  const tw_i32 v = tw_load_int32(x);
  y[0] = tw_sum_i32(v), y[1] = tw_max_of_i32(v), y[2] = tw_min_of_i32(v), y[3] = tw_any(v != 0), y[4] = tw_all(v != 0);
}

void t_choose(const float *a, const float *b, float *y) {  // the smaller lanewise, through a mask; then fma and iota
  const tw_f32 v = tw_load_float32(a), w = tw_load_float32(b);
  tw_store_float32(y, tw_select_f32(v < w, v, w));
  tw_store_float32(y + TW_LANES, tw_fma(v, w, tw_f32_of_i32(tw_iota())));
}

void t_gemm_float32(int rows, int lo, int hi, int k0, int k1, const float *a, long lda, const float *b, long stride,
                    float *c, long ldc, int accumulate) {
  tw_gemm_float32(rows, lo, hi, k0, k1, a, lda, b, stride, c, ldc, accumulate);
}
void t_pack_columns_bfloat16(const uint16_t *const *rows, int n, int depth, uint32_t *panels, long stride) {
  tw_pack_columns_bfloat16(rows, n, depth, panels, stride);
}
void t_pack_rows_bfloat16(const uint16_t *const *rows, int n, int width, uint32_t *panels, long stride) {
  tw_pack_rows_bfloat16(rows, n, width, panels, stride);
}
void t_round_rows_bfloat16(const float *src, long ld, int rows, int width, uint16_t *dst, long ldd) {
  tw_round_rows_bfloat16(src, ld, rows, width, dst, ldd);
}
#define PRODUCTS(name, element)                                                                                      \
  void t_pack_columns_##name(const element *const *rows, int n, int depth, float *panels, long stride) {             \
    tw_pack_columns_##name(rows, n, depth, panels, stride);                                                          \
  }                                                                                                                  \
  void t_pack_rows_##name(const element *const *rows, int n, int width, float *panels, long stride) {                \
    tw_pack_rows_##name(rows, n, width, panels, stride);                                                             \
  }                                                                                                                  \
  void t_dot_rows_##name(int rows, const float *a, long lda, const element *const *b, int n, int depth, float *c,    \
                         long ldc) {                                                                                 \
    tw_dot_rows_##name(rows, a, lda, b, n, depth, c, ldc, (const void *const *)b, n);                                \
  }                                                                                                                  \
  void t_combine_rows_##name(int rows, const float *a, long lda, const element *const *b, int lo, int hi, int width, \
                             float *c, long ldc, int accumulate) {                                                   \
    tw_combine_rows_##name(rows, a, lda, b, lo, hi, width, c, ldc, accumulate, (const void *const *)b, hi);          \
  }
PRODUCTS(float32, float)
PRODUCTS(float32_float16, uint16_t)
PRODUCTS(float32_bfloat16, uint16_t)
PRODUCTS(float32_float8_e4m3fn, uint8_t)
#if defined(TW_BF16_DOT)
void t_gemm_bfloat16(int rows, int lo, int hi, int k0, int k1, const uint32_t *a, long lda, const uint32_t *b,
                     long stride, float *c, long ldc, int accumulate) {
  tw_gemm_bfloat16(rows, lo, hi, k0, k1, a, lda, b, stride, c, ldc, accumulate);
}
void t_begin_products(void) { tw_begin_products(); }
void t_end_products(void) { tw_end_products(); }
#if defined(__AMX_TILE__)
int t_tiles_in_use(void) {
  unsigned char config[64];
  __asm__ volatile("sttilecfg %0" : "=m"(config));
  return config[0] != 0;
}
#endif
void t_dot_rows_bfloat16(int rows, const uint32_t *a, long lda, const uint16_t *const *b, int n, int depth, float *c,
                         long ldc) {
  tw_dot_rows_bfloat16(rows, a, lda, b, n, depth, c, ldc, (const void *const *)b, n);
}
void t_combine_rows_bfloat16(int rows, const uint16_t *p, long ldp, const uint16_t *const *b, int lo, int hi, int width,
                             float *c, long ldc, int accumulate) {
  tw_combine_rows_bfloat16(rows, p, ldp, b, lo, hi, width, c, ldc, accumulate, (const void *const *)b, hi);
}
#endif

long t_best_scratch(long count, long k) { return tw_best_scratch(count, k); }
void t_best(const int32_t *row, long count, long k, int32_t *out, void *scratch) {
  tw_best(row, count, k, out, scratch);
}
void t_prefetch(const void *p, long bytes) { tw_prefetch(p, bytes); }

#if defined(WITH_MAIN)
// Everything in blocks of exactly the size it may touch, for a sanitizer to watch.
#include <stdlib.h>

static void *block(long bytes) {
  unsigned char *p = malloc(bytes > 0 ? bytes : 1);
  for (long i = 0; i < bytes; i++) p[i] = (unsigned char)(i * 37 % 120);  // no type has a NaN of these
  return p;
}

static void elements(int n) {
  void *x = block(8 * n), *y = block(8 * n), *z = block(8 * n);
#define CHECK_LOAD(dtype, size)                        \
  {                                                    \
    void *in = block((size) * n), *out = block(4 * n); \
    t_load_##dtype(in, out, n);                        \
    t_one_##dtype(in, out, n);                         \
    free(in), free(out);                               \
  }
  CHECK_LOAD(float32, 4)
  CHECK_LOAD(float16, 2)
  CHECK_LOAD(bfloat16, 2)
  CHECK_LOAD(float8_e4m3fn, 1)
  CHECK_LOAD(int32, 4)
  CHECK_LOAD(int64, 8)
  CHECK_LOAD(uint8, 1)
  CHECK_LOAD(bool, 1)
#define CHECK_STORE(dtype, size)                       \
  {                                                    \
    void *in = block(4 * n), *out = block((size) * n); \
    t_store_##dtype(in, out, n);                       \
    t_put_##dtype(in, out, n);                         \
    free(in), free(out);                               \
  }
  CHECK_STORE(float32, 4)
  CHECK_STORE(float16, 2)
  CHECK_STORE(bfloat16, 2)
  CHECK_STORE(int32, 4)
  CHECK_STORE(int64, 8)
  CHECK_STORE(uint8, 1)
  CHECK_STORE(bool, 1)
  t_exp(x, y, n), t_exp_bf16(x, y, n), t_log(x, y, n), t_tanh(x, y, n), t_log_1(x, y, n), t_i32_of_f32(x, y, n);
  for (int i = 0; i < n; i++) ((int32_t *)x)[i] = i % 3 ? INT32_MIN + i : INT32_MAX - i, ((int32_t *)y)[i] = i % 5 - 2;
  t_floordiv_i32(x, y, z, n), t_mod_i32(x, y, z, n), t_floordiv_i32_1(x, y, z, n), t_mod_i32_1(x, y, z, n);
  t_shl_i32(x, y, z, n), t_shr_i32(x, y, z, n), t_shl_i32_1(x, y, z, n), t_shr_i32_1(x, y, z, n);
  t_abs_i32(x, z, n), t_abs_i32_1(x, z, n);
  for (int i = 0; i < n; i++) ((int64_t *)x)[i] = INT64_MIN + i, ((int64_t *)y)[i] = i % 5 - 2;
  t_floordiv_64(x, y, z, n), t_mod_64(x, y, z, n);
  free(x), free(y), free(z);
}

static void products(int rows, int n, int depth) {
  const int panels = (n + TW_PANEL - 1) / TW_PANEL, wide = (depth + TW_PANEL - 1) / TW_PANEL;
  void **keys = block(n * 8);
  float *a = block(4 * rows * depth), *p = block(4 * rows * n), *c = block(4 * rows * n), *o = block(4 * rows * depth);
  float *columns = block(4l * panels * depth * TW_PANEL), *across = block(4l * wide * n * TW_PANEL);
  float *s = block(4l * rows * panels * TW_PANEL);
#define CHECK_PRODUCTS(name, size)                                                     \
  for (int i = 0; i < n; i++) keys[i] = block((size) * depth);                         \
  t_pack_columns_##name((const void *)keys, n, depth, columns, depth *TW_PANEL);       \
  t_pack_rows_##name((const void *)keys, n, depth, across, n *TW_PANEL);               \
  t_dot_rows_##name(rows, a, depth, (const void *)keys, n, depth, c, n);               \
  t_combine_rows_##name(rows, p, n, (const void *)keys, n / 3, n, depth, o, depth, 1); \
  for (int i = 0; i < n; i++) free(keys[i]);
  CHECK_PRODUCTS(float32, 4)
  CHECK_PRODUCTS(float32_float16, 2)
  CHECK_PRODUCTS(float32_bfloat16, 2)
  CHECK_PRODUCTS(float32_float8_e4m3fn, 1)
  t_gemm_float32(rows, 0, panels * TW_PANEL, depth / 3, depth, a, depth, columns, depth * TW_PANEL, s,
                 panels * TW_PANEL, 1);
  for (int i = 0; i < n; i++) keys[i] = block(2 * depth);
  t_pack_columns_bfloat16((const void *)keys, n, depth, (void *)columns, (depth + 1) / 2 * TW_PANEL);
  t_pack_rows_bfloat16((const void *)keys, n, depth, (void *)across, (n + 1) / 2 * TW_PANEL);
  uint16_t *rounded = block(2 * rows * depth);
  t_round_rows_bfloat16(a, depth, rows, depth, rounded, depth);
  for (int i = 0; i < n; i++) free(keys[i]);
  free(keys), free(a), free(p), free(c), free(o), free(columns), free(across), free(s), free(rounded);
}

static void selection(long count, long k, uint32_t kinds) {
  int32_t *row = block(4 * count), *out = block(4 * k);
  void *scratch = block(t_best_scratch(count, k));
  for (long i = 0; i < count; i++) row[i] = i % 7 ? (int32_t)((uint32_t)i * 2654435761u % kinds) : INT32_MIN;
  t_best(row, count, k, out, scratch);
  free(row), free(out), free(scratch);
}

int main(void) {
  for (int n = 1; n <= 3 * TW_LANES; n++) elements(n);
  for (int rows = 1; rows <= 13; rows++)
    for (int n = 1; n < 3 * TW_PANEL; n += 3)
      for (int depth = 1; depth < 3 * TW_PANEL; depth += 4) products(rows, n, depth);
  const long sizes[] = {1, 5, 100, 4095, 5000, 20000};
  for (int i = 0; i < 6; i++)
    for (int j = 0; j < 6; j++)
      for (uint32_t kinds = 1; kinds < 2000000000; kinds *= 1000) selection(sizes[i], sizes[j], kinds);
  return 0;
}
#endif
