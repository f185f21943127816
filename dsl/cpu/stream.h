// Stores of large results past the caches: memory need not be read first, and what kernels still use stays cached.
#ifndef TW_STREAM_H
#define TW_STREAM_H

#include "memory.h"

// Results from this size on are streamed; of smaller ones the next operator may find some in a cache.
#define TW_STREAMED ((int64_t)4 << 20)

#if defined(TW_AVX2) || defined(TW_AVX512)
TW_INLINE bool tw_apart(const void *p, int bytes) { return ((uintptr_t)p & (uintptr_t)(bytes - 1)) != 0; }

// A processor's streamed stores may be seen late; this orders them before all that follows.
TW_INLINE void tw_end_stream(void) { _mm_sfence(); }
#else
TW_INLINE void tw_end_stream(void) {}
#endif

TW_INLINE void tw_stream_float32(float *p, tw_f32 x, bool large) {
#if defined(TW_AVX512)
  if (large && !tw_apart(p, 64)) {
    _mm512_stream_ps(p, x);
    return;
  }
#elif defined(TW_AVX2)
  if (large && !tw_apart(p, 32)) {
    _mm256_stream_ps(p, x);
    return;
  }
#endif
  (void)large;
  tw_store_float32(p, x);
}

TW_INLINE void tw_stream_bfloat16(uint16_t *p, tw_f32 x, bool large) {
#if defined(TW_AVX512)
  if (large && !tw_apart(p, 32)) {
    _mm256_stream_si256((__m256i *)p, (__m256i)tw_narrow_bfloat16(x));
    return;
  }
#elif defined(TW_AVX2)
  if (large && !tw_apart(p, 16)) {
    _mm_stream_si128((__m128i *)p, (__m128i)tw_narrow_bfloat16(x));
    return;
  }
#endif
  (void)large;
  tw_store_bfloat16(p, x);
}

#endif
