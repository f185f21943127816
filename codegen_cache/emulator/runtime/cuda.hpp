// CUDA: TileLang's templates for sm_80 and sm_90a, as calls into the runtime.
#pragma once
#include "common.hpp"

namespace tl {
// ---- barriers ----------------------------------------------------------------------------------------------------------
inline void __sync_thread_partial(int id = 0, int threads = 0) { tw::named_barrier(id, threads, true); }
inline void __named_barrier_arrive(int id, int threads) { tw::named_barrier(id, threads, false); }

// ---- cp.async ----------------------------------------------------------------------------------------------------------
template <int N> void cp_async_gs(const void *shared, const void *global) {
  static_assert(N == 4 || N == 8 || N == 16);
  tw::copy_async((void *)shared, global, N, N);
}
template <int N> void cp_async_gs_conditional(const void *shared, const void *global, bool condition) {
  static_assert(N == 4 || N == 8 || N == 16);
  tw::copy_async((void *)shared, global, N, condition ? N : 0);
}
inline void cp_async_commit() { tw::copy_async_commit(); }
template <int N> void cp_async_wait() { tw::copy_async_wait(N); }
template <class B> void mbarrier_cp_async_arrive_noinc(B &b) { tw::mbarrier_arrive_after_copies((uint64_t *)&b); }

// ---- ldmatrix, stmatrix, mma -----------------------------------------------------------------------------------------------
#define TW_MATRIX_MOVES(count)                                                                                             \
  inline void ptx_ldmatrix_x##count(const void *s, void *d) { tw::load_matrix(s, d, count, false); }                       \
  inline void ptx_ldmatrix_x##count##_trans(const void *s, void *d) { tw::load_matrix(s, d, count, true); }                \
  template <class... R> void ptx_stmatrix_m8n8_x##count(void *p, R... registers) {                                         \
    const uint32_t r[count] = {uint32_t(registers)...};                                                                    \
    tw::store_matrix(p, r, count, false);                                                                                  \
  }                                                                                                                        \
  template <class... R> void ptx_stmatrix_m8n8_x##count##_trans(void *p, R... registers) {                                 \
    const uint32_t r[count] = {uint32_t(registers)...};                                                                    \
    tw::store_matrix(p, r, count, true);                                                                                   \
  }
TW_MATRIX_MOVES(1)
TW_MATRIX_MOVES(2)
TW_MATRIX_MOVES(4)
#undef TW_MATRIX_MOVES

enum class DataType { kFloat16, kBFloat16, kFloat32, kTensorFloat32, kFloat8_e4m3, kFloat8_e5m2 };
constexpr tw::Type emulated_type(DataType t) {
  switch (t) {
  case DataType::kFloat16: return tw::Type::F16;
  case DataType::kBFloat16: return tw::Type::BF16;
  case DataType::kTensorFloat32: return tw::Type::TF32;
  case DataType::kFloat8_e4m3: return tw::Type::E4M3;
  case DataType::kFloat8_e5m2: return tw::Type::E5M2;
  default: return tw::Type::F32;
  }
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool a_transposed, bool b_transposed>
void mma_sync(float *c, const unsigned *a, const unsigned *b) {
  static_assert(C == DataType::kFloat32 && M == 16 && N == 8 && !a_transposed && b_transposed, "not emulated");
  static_assert(TW_SM >= 89 || (A < DataType::kFloat8_e4m3 && B < DataType::kFloat8_e4m3), "this part has no products of fp8");
  tw::mma(emulated_type(A), emulated_type(B), K, c, a, b);
}
} // namespace tl

// ---- mbarriers -------------------------------------------------------------------------------------------------------------
struct alignas(8) Barrier {
  uint64_t word;
  Barrier() = delete;
  void init(uint32_t arrivals) { tw::mbarrier_init(&word, arrivals); }
  void wait(uint32_t parity) { tw::mbarrier_wait(&word, parity); }
  bool try_wait(uint32_t parity) { return tw::mbarrier_test(&word, parity); }
  bool test_wait(uint32_t parity, uint32_t predicate = 1) { return predicate && tw::mbarrier_test(&word, parity); }
  void arrive() { tw::mbarrier_arrive(&word, 0, true); }
  void expect_transaction(uint32_t bytes) { tw::mbarrier_arrive(&word, bytes, false); }
  void arrive_and_expect_tx(uint32_t bytes) { tw::mbarrier_arrive(&word, bytes, true); }
};

namespace tl {
inline void mbarrier_wait(uint64_t &word, int parity) { tw::mbarrier_wait(&word, parity); }
inline void mbarrier_arrive(uint64_t &word) { tw::mbarrier_arrive(&word, 0, true); }
inline void fence_barrier_init() { tw::fence_mbarrier_init(); }
inline void fence_proxy_async() { tw::fence_proxy_async(); }

// ---- TMA -------------------------------------------------------------------------------------------------------------------
enum class CacheHintSm90 : uint64_t { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST }; // no effect on values
inline void prefetch_tma_descriptor(const CUtensorMap &) {}
template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL, class B, class... C>
void tma_load(const CUtensorMap &map, B &barrier, const void *shared, C... coordinates) {
  const int c[] = {int(coordinates)...};
  tw::tma_load(map, (uint64_t *)&barrier, (void *)shared, sizeof...(C), c);
}
template <class B> void tma_load(void *shared, const void *global, B &barrier, uint32_t bytes) {
  tw::bulk_load(shared, global, bytes, (uint64_t *)&barrier);
}
template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL, class... C>
void tma_store(const CUtensorMap &map, const void *shared, C... coordinates) {
  const int c[] = {int(coordinates)...};
  tw::tma_store(map, shared, sizeof...(C), c);
}
template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL> void tma_store(void *global, void *shared, uint32_t bytes) {
  tw::bulk_store(global, shared, bytes);
}
inline void tma_store_arrive() { tw::bulk_commit(); }
template <int N, bool only_reads = true> void tma_store_wait() { tw::bulk_wait(N, only_reads); }

// ---- warps and warpgroups --------------------------------------------------------------------------------------------------
// One lane of every (threads / 32)-th warp; of warp 0 where threads is 0.
template <int threads> bool tl_shuffle_elect() {
  tw::warp_barrier(1);
  const int every = (threads + 31) / 32;
  return tw::lane_index() == tw::elected_lane() && (threads ? tw::warp_index() % every == 0 : tw::warp_index() == 0);
}
template <int> void warpgroup_reg_alloc() {} // register budgets are not emulated
template <int> void warpgroup_reg_dealloc() {}

// ---- wgmma -----------------------------------------------------------------------------------------------------------------
struct GmmaDescriptor {
  uint64_t bits = 0;
  operator uint64_t() const { return bits; }
  template <class T> GmmaDescriptor operator+(T offset) const { // to the lower half: the address
    GmmaDescriptor moved;
    moved.bits = (bits & ~0xffffffffull) | uint32_t(uint32_t(bits) + uint32_t(offset));
    return moved;
  }
};
template <int layout, int leading, int stride, class T> void initialize_wgmma_descriptor(GmmaDescriptor &d, T *start) {
  d.bits = tw::wgmma_descriptor((const void *)start, layout, leading, stride);
}
template <class T> void increase_descriptor_offset(GmmaDescriptor &d, T bytes) { d = d + (bytes >> 4); }

template <DataType A, DataType B, DataType C, int M, int N, int K, bool a_transposed, bool b_transposed, int a_sign, int b_sign>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t *c, bool accumulate) {
  static_assert(C == DataType::kFloat32 && M == 64, "not emulated");
  const tw::WgmmaShape s{emulated_type(A), emulated_type(B), N, K, a_transposed, b_transposed, false, float(a_sign * b_sign)};
  tw::wgmma(s, a, nullptr, b, (float *)c, accumulate);
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool a_transposed, bool b_transposed, int a_sign, int b_sign>
void wgmma_rs(const uint32_t *a, uint64_t b, uint32_t *c, bool accumulate) {
  static_assert(C == DataType::kFloat32 && M == 64 && !a_transposed, "not emulated");
  const tw::WgmmaShape s{emulated_type(A), emulated_type(B), N, K, false, b_transposed, true, float(a_sign * b_sign)};
  tw::wgmma(s, 0, a, b, (float *)c, accumulate);
}
inline void warpgroup_arrive() { tw::wgmma_fence(); }
inline void warpgroup_commit_batch() { tw::wgmma_commit(); }
template <int N> void warpgroup_wait() { tw::wgmma_wait(N); }
template <int N> void wait_wgmma() { tw::wgmma_wait(N); }
template <class T> void warpgroup_fence_operand(T *, int) {} // holds the compiler back, nothing else
} // namespace tl
