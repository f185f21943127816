// The emulation runtime in one object, and what the host calls.
#include <algorithm>
#include "engines.hpp"

namespace tw {

struct Launch { // mirrored in run.py
  const char *kernel;
  void **arguments;
  dim3 grid, block;
  uint64_t shared_bytes;
  Policy policy;
  // answers
  const char *error;
  int64_t overtaken_waits;
  int64_t stack[24]; // of the fault: return addresses as places in this library
  int32_t depth;
};

static void on_signal(int signal) {
  if (!failed) {
    const int thread = current ? current->linear : -1;
    snprintf(error_text, sizeof error_text, "block (%u, %u, %u), thread %d: %s", running_block.x, running_block.y, running_block.z, thread,
             signal == SIGFPE ? "division by zero" : "memory access that the hardware would refuse, or a stack overflow");
  }
  failed = true;
  current = nullptr;
  siglongjmp(abandoned, 1);
}

struct Signals { // ours while a launch runs
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction old[3];
  stack_t old_stack;
  static inline char stack[64 << 10];
  Signals() {
    stack_t ours{stack, 0, sizeof stack};
    sigaltstack(&ours, &old_stack);
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 3; i++) sigaction(kSignals[i], &action, &old[i]);
  }
  ~Signals() {
    for (int i = 0; i < 3; i++) sigaction(kSignals[i], &old[i], nullptr);
    sigaltstack(&old_stack, nullptr);
  }
};

static void open_memory(uint64_t shared_bytes) {
  for (Region *r : {&dynamic_region, &static_region}) {
    r->close();
    r->reserve(kSharedReserve);
    r->name = r == &dynamic_region ? "shared memory" : "static shared memory";
    r->open(r == &dynamic_region ? shared_bytes : 48 << 10, 0);
    if (policy.races) r->cells.resize((r->bytes + 15) / 16);
  }
  stacks_bytes = size_t(thread_count) * kStackBytes;
  stacks = (char *)mmap(nullptr, stacks_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (int i = 0; i < thread_count; i++) mprotect(stacks + i * kStackBytes, 4096, PROT_NONE);
  for (Region &t : tensors) t.cells.clear(); // launches are ordered
  for (Region &t : tensors)
    if (t.written && policy.races) t.cells.resize((t.bytes + 15) / 16);
}
static void close_memory() {
  dynamic_region.close();
  static_region.close();
  munmap(stacks, stacks_bytes);
  fibers.clear();
}

static void run_blocks() {
  const dim3 g = running_grid;
  std::vector<uint32_t> order(size_t(g.x) * g.y * g.z);
  for (size_t i = 0; i < order.size(); i++) order[i] = policy.warp_order == kDescending ? uint32_t(order.size() - 1 - i) : uint32_t(i);
  if (policy.warp_order >= kRandomPriority)
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_below(uint32_t(i))]);
  for (uint32_t b : order) {
    running_block = {b % g.x, b / g.x % g.y, b / (g.x * g.y)};
    run_block();
  }
}

} // namespace tw

using namespace tw;
#define TW_API extern "C" __attribute__((visibility("default")))

// Room for a tensor, `offset` bytes behind a multiple of 1024; its address.
TW_API void *tw_open_tensor(const char *name, uint64_t bytes, uint64_t offset) {
  tensors.emplace_back();
  Region &r = tensors.back();
  r.name = name;
  r.reserve(kTensorReserve + 2 * ((bytes + 4095) / 4096 * 4096));
  if (r.reserved == MAP_FAILED) {
    tensors.pop_back();
    return nullptr;
  }
  r.open(bytes, offset);
  return r.base;
}
TW_API int tw_written(int tensor) { return tensors[tensor].written; }
TW_API void tw_close_tensors() {
  for (Region &t : tensors) t.close();
  tensors.clear();
}

TW_API int tw_launch(Launch *l) {
  kernel_entry = nullptr;
  for (int i = 0; i < kernel_count; i++)
    if (!strcmp(kernels[i].name, l->kernel)) kernel_entry = kernels[i].entry;
  if (!kernel_entry) return -1;
  policy = l->policy;
  random_state = policy.seed * 2 + 1;
  for (int i = 0; i < 4; i++) random_below(2);
  running_grid = l->grid;
  running_dim = l->block;
  thread_count = int(l->block.x * l->block.y * l->block.z);
  kernel_arguments = l->arguments;
  error_text[0] = 0;
  failed = false;
  current = nullptr;
  overtaken_waits = 0;
  fault_depth = 0;
  unsettled.region = nullptr;
  open_memory(l->shared_bytes);
  {
    Signals ours;
    if (!sigsetjmp(abandoned, 1)) run_blocks();
  }
  close_memory();
  l->error = failed ? error_text : nullptr;
  l->overtaken_waits = overtaken_waits;
  l->depth = fault_depth;
  for (int i = 0; i < fault_depth; i++) l->stack[i] = (char *)fault_stack[i] - &__ehdr_start;
  return failed;
}
