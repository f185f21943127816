// What a translated device source calls. The functions are defined in runtime.cpp, which is compiled once and without
// instrumentation; the source itself is compiled with calls to the access hooks (see memory.hpp).
#pragma once
#include <cstddef>
#include <cstdint>

struct dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

// CUtensorMap as the host fills it in: the arguments of cuTensorMapEncodeTiled in the clear, in the 128 bytes of the real one.
struct alignas(64) CUtensorMap {
  char *base;
  uint64_t dims[5], strides[4]; // strides in bytes, of dimensions 1..4
  uint16_t box[5];
  uint8_t element_strides[5], rank, element_bytes, swizzle, nan_fill, is_float;
};
static_assert(sizeof(CUtensorMap) == 128);

namespace tw {

enum class Type : uint8_t { F16, BF16, E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ, F32, TF32 };

// A value of a fiber never changes while its kernel runs, so the compiler may keep it.
__attribute__((const)) dim3 thread_index();
__attribute__((const)) dim3 block_index();
__attribute__((const)) dim3 block_dim();
__attribute__((const)) dim3 grid_dim();
__attribute__((const)) int lane_index();
__attribute__((const)) int warp_index();
__attribute__((const)) int elected_lane();

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char *format, ...);

// ---- memory
void *dynamic_shared();
void *static_shared(const void *declaration, size_t bytes); // the same address for the same declaration in a block
void atomic_access(void *address, size_t bytes);            // to be called before an atomic operation
void relaxed_read(const void *address, size_t bytes);       // a plain read; for reads the hooks do not see

// ---- barriers and warps
void block_barrier();
void named_barrier(int id, int threads, bool wait);
void warp_barrier(uint32_t operation);                 // all lanes meet; no memory is ordered
void warp_sync();                                      // __syncwarp: memory of the lanes is ordered as well
void shuffle(void *value, size_t bytes, int from_lane); // value of another lane
uint64_t ballot(bool predicate);

// ---- sm_80
void copy_async(void *shared, const void *global, int bytes, int source_bytes); // the rest is filled with zeros
void copy_async_commit();
void copy_async_wait(int groups);
void load_matrix(const void *row, void *registers, int count, bool transposed);
void store_matrix(void *row, const uint32_t *registers, int count, bool transposed);
void mma(Type a_type, Type b_type, int k, float *c, const void *a, const void *b); // m16n8

// ---- gfx9: lane l holds row l % m of A, column l % m of B, k elements (l / m) * per onwards; d may be c
void mfma(Type type, int m, int k, const void *a, const void *b, const float *c, float *d);

// ---- sm_90: a word of mbarrier is its state
void mbarrier_init(uint64_t *word, uint32_t arrivals);
void mbarrier_arrive(uint64_t *word, uint32_t expected_bytes, bool arrives);
void mbarrier_wait(uint64_t *word, uint32_t parity);
bool mbarrier_test(uint64_t *word, uint32_t parity);
void mbarrier_arrive_after_copies(uint64_t *word);
void fence_mbarrier_init();
void fence_proxy_async();
void tma_load(const CUtensorMap &map, uint64_t *word, void *shared, int rank, const int *coordinates);
void tma_store(const CUtensorMap &map, const void *shared, int rank, const int *coordinates);
void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *word);
void bulk_store(void *global, const void *shared, uint32_t bytes);
void bulk_commit();
void bulk_wait(int groups, bool only_reads);
uint64_t wgmma_descriptor(const void *start, int layout, int leading, int stride);

struct WgmmaShape {
  Type a, b;
  int n, k;
  bool a_transposed, b_transposed, a_in_registers; // transposed: MN-major in shared memory
  float sign;
  bool operator==(const WgmmaShape &) const = default;
};
void wgmma(const WgmmaShape &shape, uint64_t a, const uint32_t *a_registers, uint64_t b, float *c, bool accumulate);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int groups);

// ---- conversions; to a smaller type: to nearest, ties to even, saturating where `satfinite` says so
float from_fp8(Type type, uint8_t bits);
uint8_t to_fp8(Type type, float value, bool satfinite);

// ---- how the host finds the kernels
struct Kernel {
  const char *name;
  void (*entry)(void **);
};
extern const Kernel kernels[];
extern const int kernel_count;

} // namespace tw
