// The k largest integers of a row, in order: what the language's `best` leaves in a list.
#ifndef TW_SELECT_H
#define TW_SELECT_H

#include "memory.h"

#define TW_NOT_A_CANDIDATE INT32_MIN
#define TW_SAMPLE 1024

// Scratch: a key and a column of every candidate, then the chosen ones twice for sorting, as (inverted key, column).
TW_FUNCTION int64_t tw_best_scratch(int64_t count, int64_t k) {
  return 64 + 8 * (count + TW_LANES) + 16 * (k < count ? k : count);
}

TW_FUNCTION int64_t tw_count_at_least(const int32_t *keys, int64_t n, int32_t bound) {
  tw_i32 total = {0};
  int64_t i = 0;
  for (; i + TW_LANES <= n; i += TW_LANES) total -= tw_load_int32(keys + i) >= bound;
  const int left = (int)(n - i);
  total -= (tw_load_int32_part(keys + i, left) >= bound) & (tw_iota() < left);
  return tw_sum_i32(total);
}

// The k-th largest of n >= k >= 1 keys, bit by bit from the top: counting is a vector at a time and needs no histogram,
// whose increments wait for each other where keys are equal.
TW_FUNCTION int32_t tw_kth_largest(const int32_t *keys, int64_t n, int64_t k) {
  uint32_t found = 0;  // of the keys made unsigned
  for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
    int64_t above = tw_count_at_least(keys, n, (int32_t)((found | bit) ^ 0x80000000u));
    if (above >= k) found |= bit;
    if (above == k) break;
  }
  return (int32_t)(found ^ 0x80000000u);
}

// Keys of at least `bound` with their columns, in order; room for TW_LANES more.
TW_FUNCTION int64_t tw_candidates(const int32_t *row, int64_t count, int32_t bound, int32_t *keys, int32_t *columns) {
  int64_t n = 0, j = 0;
#if defined(TW_AVX512)
  tw_i32 column = tw_iota();
  for (; j < count; j += TW_LANES, column += TW_LANES) {
    const __mmask16 valid = count - j < TW_LANES ? tw_first((int)(count - j)) : 0xffff;
    const __m512i x = _mm512_maskz_loadu_epi32(valid, row + j);
    const __mmask16 good = _mm512_mask_cmpge_epi32_mask(valid, x, _mm512_set1_epi32(bound));
    _mm512_storeu_si512(keys + n, _mm512_maskz_compress_epi32(good, x));
    _mm512_storeu_si512(columns + n, _mm512_maskz_compress_epi32(good, (__m512i)column));
    n += __builtin_popcount(good);
  }
#else
  for (; j < count; j++) {
    keys[n] = row[j];
    columns[n] = (int32_t)j;
    n += row[j] >= bound;
  }
#endif
  return n;
}

// A lower bound that about k keys of the row reach, from a sample; the sample is spread unevenly, as rows may be periodic.
TW_FUNCTION int32_t tw_guess_bound(const int32_t *row, int64_t count, int64_t k, int32_t *sample) {
  uint32_t random = 1;
  const int64_t stretch = count / TW_SAMPLE;
  for (int64_t i = 0; i < TW_SAMPLE; i++) {
    random = random * 1664525u + 1013904223u;
    sample[i] = row[i * stretch + (int64_t)((uint64_t)random * (uint64_t)stretch >> 32)];
  }
  const float share = (float)k * TW_SAMPLE / (float)count;
  const int64_t rank = (int64_t)(share + 3 * __builtin_sqrtf(share) + 2);
  const int32_t bound = rank > TW_SAMPLE ? INT32_MIN : tw_kth_largest(sample, TW_SAMPLE, rank);
  return bound == INT32_MIN ? INT32_MIN + 1 : bound;
}

// Ascending by the upper 32 bits, equal ones as they were: by bytes from the lowest, those that all share left out.
TW_FUNCTION uint64_t *tw_sort_pairs(uint64_t *pairs, uint64_t *other, int64_t n) {
  int32_t first[4][256];
  memset(first, 0, sizeof first);
  for (int64_t i = 0; i < n; i++)
    for (int b = 0; b < 4; b++) first[b][pairs[i] >> (32 + 8 * b) & 255]++;
  for (int b = 0; b < 4 && n; b++) {
    const int shift = 32 + 8 * b;
    if (first[b][pairs[0] >> shift & 255] == n) continue;
    int32_t sum = 0;
    for (int d = 0; d < 256; d++) {
      const int32_t here = first[b][d];
      first[b][d] = sum;
      sum += here;
    }
    for (int64_t i = 0; i < n; i++) other[first[b][pairs[i] >> shift & 255]++] = pairs[i];
    uint64_t *swap = pairs;
    pairs = other, other = swap;
  }
  return pairs;
}

// out[0..k): the columns of the largest keys among row[0..count), descending, equal ones by ascending column,
// candidates only; then -1.
TW_FUNCTION void tw_best(const int32_t *row, int64_t count, int64_t k, int32_t *out, void *scratch) {
  int64_t n = 0, chosen = 0, written = 0;
  if (count > 0 && k > 0) {
    const int64_t room = count + TW_LANES, most = k < count ? k : count;
    uint64_t *pairs = (uint64_t *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63), *other = pairs + most;
    int32_t *keys = (int32_t *)(other + most), *columns = keys + room;
    int32_t bound = INT32_MIN + 1;
    if (count >= 4 * TW_SAMPLE) bound = tw_guess_bound(row, count, k, keys);
    n = tw_candidates(row, count, bound, keys, columns);
    if (n < k && bound > INT32_MIN + 1) n = tw_candidates(row, count, INT32_MIN + 1, keys, columns);
    const int32_t last = n > k ? tw_kth_largest(keys, n, k) : INT32_MIN;
    for (int64_t i = 0; i < n; i++)
      if (keys[i] > last) pairs[chosen++] = (uint64_t)(uint32_t)(INT32_MAX ^ keys[i]) << 32 | (uint32_t)columns[i];
    uint64_t *sorted = tw_sort_pairs(pairs, other, chosen);
    for (; written < chosen; written++) out[written] = (int32_t)(uint32_t)sorted[written];
    for (int64_t i = 0; i < n && written < most && n > k; i++)
      if (keys[i] == last) out[written++] = columns[i];
  }
  while (written < k) out[written++] = -1;
}

#endif
