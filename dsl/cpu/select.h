// The k largest integers of a row, in order: what the language's `best` leaves in a list.
#ifndef TW_SELECT_H
#define TW_SELECT_H

#include "memory.h"
#include "primitives.h"

#define TW_NOT_A_CANDIDATE INT32_MIN
#define TW_SAMPLE 1024  // keys looked at before all of them

// Scratch: the chosen ones twice for sorting, each a distance from the largest key and a column, with room for one
// more; a key and a column of every candidate.
TW_FUNCTION int64_t tw_best_scratch(int64_t count, int64_t k) {
  return 64 + 8 * (count + TW_LANES) + 16 * ((k < count ? k : count) + 1);
}

TW_LOCAL int64_t tw_count_at_least(const int32_t *keys, int64_t n, int32_t bound) {
  tw_i32 total = {0};
  int64_t i = 0;
  for (; i + TW_LANES <= n; i += TW_LANES) total -= tw_load_int32(keys + i) >= bound;
  const int left = (int)(n - i);
  total -= (tw_load_int32_part(keys + i, left) >= bound) & (tw_iota() < left);
  return tw_sum_i32(total);
}

// The k-th largest of n >= k >= 1 keys, bit by bit from the top: counting is a vector at a time and needs no histogram,
// whose increments wait for each other where keys are equal.
TW_LOCAL int32_t tw_kth_largest(const int32_t *keys, int64_t n, int64_t k) {
  uint32_t found = 0;  // of the keys made unsigned
  for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
    int64_t above = tw_count_at_least(keys, n, (int32_t)((found | bit) ^ 0x80000000u));
    if (above >= k) found |= bit;
    if (above == k) break;
  }
  return (int32_t)(found ^ 0x80000000u);
}

// Keys of at least `bound` with their columns, in order; room for TW_LANES more.
TW_LOCAL int64_t tw_candidates(const int32_t *row, int64_t count, int32_t bound, int32_t *keys, int32_t *columns) {
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

// A lower bound that about k keys of the row reach, from a sample; the sample is spread unevenly, as rows may be
// periodic.
TW_LOCAL int32_t tw_guess_bound(const int32_t *row, int64_t count, int64_t k, int32_t *sample) {
  uint32_t random = 1;
  const int64_t stretch = count / TW_SAMPLE;
  for (int64_t i = 0; i < TW_SAMPLE; i++) {
    random = random * 1664525u + 1013904223u;
    sample[i] = row[i * stretch + (int64_t)((uint64_t)random * (uint64_t)stretch >> 32)];
  }
  const float share = (float)k * TW_SAMPLE / (float)count;
  const int64_t rank = (int64_t)(share + 3 * __builtin_sqrtf(share) + 2);
  const int32_t bound = rank > TW_SAMPLE ? TW_NOT_A_CANDIDATE : tw_kth_largest(sample, TW_SAMPLE, rank);
  return bound == TW_NOT_A_CANDIDATE ? bound + 1 : bound;
}

// Ascending by the upper 32 bits, which are `most` or less, equal ones as they were: by digits from the lowest.
TW_LOCAL uint64_t *tw_sort_pairs(uint64_t *pairs, uint64_t *other, int64_t n, uint32_t most) {
  const int width = n > 4096 ? 11 : 8;
  int32_t first[1 << 11];
  for (int shift = 32; most; shift += width, most >>= width) {
    const uint64_t mask = (1u << width) - 1;
    memset(first, 0, sizeof *first << width);
    for (int64_t i = 0; i < n; i++) first[pairs[i] >> shift & mask]++;
    int32_t sum = 0;
    for (int d = 0; d < 1 << width; d++) {
      const int32_t here = first[d];
      first[d] = sum;
      sum += here;
    }
    for (int64_t i = 0; i < n; i++) other[first[pairs[i] >> shift & mask]++] = pairs[i];
    uint64_t *swap = pairs;
    pairs = other, other = swap;
  }
  return pairs;
}

// The k-th largest of n > k candidates, none of them below `bound`, which often it is: many scores are equal.
TW_LOCAL int32_t tw_last_chosen(const int32_t *keys, int64_t n, int64_t k, int32_t bound) {
  if (bound == INT32_MAX || tw_count_at_least(keys, n, bound + 1) < k) return bound;
  return tw_kth_largest(keys, n, k);
}

// out[0..k): the columns of the largest keys among row[0..count), descending, equal ones by ascending column,
// candidates only; then -1.
TW_FUNCTION void tw_best(const int32_t *row, int64_t count, int64_t k, int32_t *out, void *scratch) {
  int64_t written = 0;
  if (count > 0 && k > 0) {
    const int64_t room = count + TW_LANES, most = k < count ? k : count;
    uint64_t *pairs = (uint64_t *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63), *other = pairs + most + 1;
    int32_t *keys = (int32_t *)(other + most + 1), *columns = keys + room;
    int32_t bound = TW_NOT_A_CANDIDATE + 1;
    if (count >= 4 * TW_SAMPLE) bound = tw_guess_bound(row, count, k, keys);
    int64_t n = tw_candidates(row, count, bound, keys, columns);
    if (n < k && bound > TW_NOT_A_CANDIDATE + 1) {  // too high a guess
      bound = TW_NOT_A_CANDIDATE + 1;
      n = tw_candidates(row, count, bound, keys, columns);
    }
    const int32_t last = n > k ? tw_last_chosen(keys, n, k, bound) : TW_NOT_A_CANDIDATE;
    // Those above the last key are sorted; those equal to it follow in the order they have. Without branches, which
    // would be guesses: a pair that is not chosen is overwritten by the next.
    int32_t largest = last;
    for (int64_t i = 0; i < n; i++) largest = keys[i] > largest ? keys[i] : largest;
    int64_t chosen = 0;
    for (int64_t i = 0; i < n; i++) {
      pairs[chosen] = (uint64_t)((uint32_t)largest - (uint32_t)keys[i]) << 32 | (uint32_t)columns[i];
      chosen += keys[i] > last;
    }
    const uint64_t *sorted = tw_sort_pairs(pairs, other, chosen, (uint32_t)largest - (uint32_t)last - 1);
    for (; written < chosen; written++) out[written] = (int32_t)(uint32_t)sorted[written];
    for (int64_t i = 0; n > k && written < k; i++)
      if (keys[i] == last) out[written++] = columns[i];
  }
  while (written < k) out[written++] = -1;
}

#endif
