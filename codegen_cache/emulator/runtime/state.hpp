// The running block: its fibers, what they wait for, and how a launch is abandoned.
#pragma once
#include "interface.hpp"
#include "known.hpp"
#include <array>
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <execinfo.h>
#include <string>
#include <vector>

namespace tw {

#ifdef TW_WAVE64
constexpr int kWarp = 64;
#else
constexpr int kWarp = 32;
#endif
constexpr size_t kStackBytes = 128 << 10;
constexpr int kBarriers = 16;

enum WarpOrder { kAscending, kDescending, kRandomPriority, kRandomStep };
enum AsyncMode { kLate, kEager, kRandom };
struct Policy {        // mirrored in schedules.py
  int32_t warp_order;  // which warp goes next, of those that can
  int32_t async_mode;  // when operations in flight take effect: when waited for, when issued, or at any time between
  int32_t elected;     // the lane that elect.sync picks: the hardware promises only that it is always the same
  int32_t races;       // report accesses that nothing orders
  int32_t proxies;     // report generic writes that wgmma or TMA reads without fence.proxy.async
  int32_t hang_overtaken; // a wait that two phases have passed hangs, as on the hardware; otherwise it is counted
  uint64_t seed;
};
inline Policy policy;
inline uint64_t random_state;
inline uint32_t random_below(uint32_t n) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return uint32_t(random_state >> 33) % n;
}

// ---- fibers --------------------------------------------------------------------------------------------------------------
struct Copy { // of cp.async, or the arrival at an mbarrier that follows earlier copies
  char *to;
  const char *from;
  int bytes, source_bytes;
  uint64_t *mbarrier;
  uint32_t time;
};
struct Store { // of cp.async.bulk from shared to global memory, or the end of a group of them
  const CUtensorMap *map;
  int coordinates[5];
  char *to;
  uint32_t shared, bytes;
  bool commit;
};
enum class Wait : uint8_t { None, Barrier, Warp, Mbarrier, Polling };
struct Awaited {
  const uint64_t *word;
  int phase;
};

struct Fiber {
  void *stack_pointer;
  char *stack;
  dim3 index;
  int linear, lane, warp;
  bool done, released;
  Wait wait;
  const uint64_t *word; // of the mbarrier waited for
  int parity, phase, barrier;
  View view;                                    // what this thread knows of the others
  uint32_t own[kKinds], own_published[kGeneric]; // and of itself and its own asynchronous operations
  uint32_t copies_issued, stores_issued;
  std::deque<Copy> copies;
  std::deque<uint32_t> copy_groups; // committed and not waited for: the last copy of each
  std::deque<Store> stores;
  std::vector<Awaited> awaited; // the last phase waited for, per mbarrier
};

struct Rendezvous { // of a barrier or a warp
  int arrived, expected;
  uint64_t members, last_members; // warps
  std::vector<Fiber *> waiting;
  Sum sum;
};
struct Warp {
  Rendezvous meeting;
  std::array<void *, kWarp> lanes;
  uint32_t operation;
  int live;
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline std::array<Rendezvous, kBarriers> barriers;
inline Fiber *current;
inline void *scheduler_stack;
inline int thread_count, live_count;
inline dim3 running_block, running_grid, running_dim;
inline void (*kernel_entry)(void **);
inline void **kernel_arguments;

// ---- giving up -----------------------------------------------------------------------------------------------------------
inline char error_text[4096];
inline bool failed;
inline sigjmp_buf abandoned;

extern "C" void tw_switch(void **save, void *to);
asm(R"(
.text
.type tw_switch,@function
tw_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
inline void settle_write(); // memory.hpp
inline void yield() {
  settle_write();
  tw_switch(&current->stack_pointer, scheduler_stack);
}

inline void *fault_stack[24]; // return addresses, the innermost first, for the host to find the line
inline int fault_depth;

// The first problem of a launch is kept; the launch ends.
void fail(const char *format, ...) {
  if (!failed) {
    if (current && !fault_depth) fault_depth = backtrace(fault_stack, 24);
    int n = snprintf(error_text, sizeof error_text, "block (%u, %u, %u)", running_block.x, running_block.y, running_block.z);
    if (current) n += snprintf(error_text + n, sizeof error_text - n, ", thread %d", current->linear);
    n += snprintf(error_text + n, sizeof error_text - n, ": ");
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text + n, sizeof error_text - n, format, arguments);
    va_end(arguments);
  }
  failed = true;
  if (!current) siglongjmp(abandoned, 1);
  for (;;) tw_switch(&current->stack_pointer, scheduler_stack);
}

} // namespace tw
