// One block at a time, each thread a fiber, all in one thread of the host. A fiber runs until it must wait; then another goes
// on. Warps are picked in the order the policy asks for, lanes of a warp one after the other, now from the first, now from
// the last on.
#pragma once
#include "memory.hpp"
#include <csignal>

namespace tw {

// What the asynchronous engines do for the scheduler (engines.hpp).
inline bool finish_something(bool needed); // an operation in flight; `needed`: one that a waiting thread may wait for
inline void reset_engines();
inline void check_thread_end(Fiber &);
inline void check_block_end();
inline bool mbarrier_blocks(const Fiber &);
inline std::string mbarrier_text(const uint64_t *);

dim3 thread_index() { return current->index; }
dim3 block_index() { return running_block; }
dim3 block_dim() { return running_dim; }
dim3 grid_dim() { return running_grid; }
int lane_index() { return current->lane; }
int warp_index() { return current->warp; }
int elected_lane() { return policy.elected; }
void *dynamic_shared() { return dynamic_region.base; }

// ---- waiting -----------------------------------------------------------------------------------------------------------------
inline bool blocked(const Fiber &f) {
  switch (f.wait) {
  case Wait::None:
  case Wait::Polling: return false;
  case Wait::Mbarrier: return mbarrier_blocks(f);
  default: return !f.released;
  }
}
inline void wait_for(Wait what) {
  Fiber &f = *current;
  f.wait = what;
  f.released = false;
  do yield();
  while (blocked(f));
  f.wait = Wait::None;
}
// Everybody has come: all go on, and know what each of them knew.
inline void complete(Rendezvous &r, bool orders_memory) {
  if (orders_memory) {
    const View all = r.sum.view();
    for (Fiber *f : r.waiting) f->view = all;
    r.sum.clear();
  }
  for (Fiber *f : r.waiting) f->released = true;
  r.waiting.clear();
  r.last_members = r.members;
  r.members = 0;
  r.arrived = 0;
}

// bar.sync, or bar.arrive where the thread does not wait. The hardware counts warps, this counts threads: the same where
// whole warps come. Two groups of warps that use one barrier at a time are mixed up; noticed where they overlap in part.
void named_barrier(int id, int threads, bool wait) {
  if (id < 0 || id >= kBarriers) fail("barrier %d: there are %d", id, kBarriers);
  Rendezvous &r = barriers[id];
  if (id && (threads <= 0 || threads % kWarp)) fail("barrier %d: %d threads are not whole warps", id, threads);
  if (r.arrived && r.expected != threads) fail("barrier %d: some come with %d threads, some with %d", id, r.expected, threads);
  settle_write();
  r.expected = threads;
  r.members |= 1ull << current->warp;
  release(r.sum, *current);
  if (wait) r.waiting.push_back(current);
  current->barrier = id;
  if (++r.arrived == threads) {
    const bool mixed = r.members != r.last_members && r.members & r.last_members;
    if (id && mixed && __builtin_popcountll(r.members) == __builtin_popcountll(r.last_members))
      fail("barrier %d: used by different groups of warps at the same time", id);
    complete(r, true);
  } else if (wait) {
    wait_for(Wait::Barrier);
  }
}
void block_barrier() { named_barrier(0, live_count, true); }

// All lanes of a warp that have not ended meet, for one operation; the last to come does the work of all.
template <class Work> void meet_warp(uint32_t operation, void *argument, bool orders_memory, Work &&work) {
  Warp &w = warps[current->warp];
  Rendezvous &r = w.meeting;
  if (r.arrived && w.operation != operation) fail("lanes of warp %d are in different warp-wide operations", current->warp);
  if (w.live != kWarp) fail("a warp-wide operation after lanes of warp %d have ended", current->warp);
  settle_write();
  w.operation = operation;
  w.lanes[current->lane] = argument;
  r.waiting.push_back(current);
  if (orders_memory) release(r.sum, *current);
  if (++r.arrived == kWarp) {
    work(w.lanes);
    complete(r, orders_memory);
  } else {
    wait_for(Wait::Warp);
  }
}
enum WarpOperation : uint32_t { kSync, kElect, kShuffle = 1 << 8, kBallot = 2 << 8, kLoadMatrix = 3 << 8, kStoreMatrix = 4 << 8,
                                kMma = 5 << 8, kMfma = 6 << 8, kWgmmaIssue = 7 << 8, kWgmmaFence = 8 << 8, kWgmmaCommit = 9 << 8, kWgmmaWait = 10 << 8 };
void warp_barrier(uint32_t operation) {
  meet_warp(operation, nullptr, false, [](auto &) {});
}
void warp_sync() {
  meet_warp(kSync, nullptr, true, [](auto &) {});
}
inline Viewer whole_warp(int warp) { return {&fibers[warp * kWarp], kWarp}; }

void shuffle(void *value, size_t bytes, int from_lane) {
  struct Lane { void *value; int from; char copy[16]; } mine{value, from_lane, {}};
  if (bytes > sizeof mine.copy) fail("a shuffle of %zu bytes", bytes);
  memcpy(mine.copy, value, bytes);
  meet_warp(kShuffle + uint32_t(bytes), &mine, false, [&](auto &lanes) {
    for (void *p : lanes) memcpy(((Lane *)p)->value, ((Lane *)lanes[((Lane *)p)->from & (kWarp - 1)])->copy, bytes);
  });
}
uint64_t ballot(bool predicate) {
  struct Lane { bool predicate; uint64_t votes; } mine{predicate, 0};
  meet_warp(kBallot, &mine, false, [](auto &lanes) {
    uint64_t votes = 0;
    for (int i = 0; i < kWarp; i++) votes |= uint64_t(((Lane *)lanes[i])->predicate) << i;
    for (void *p : lanes) ((Lane *)p)->votes = votes;
  });
  return mine.votes;
}

// ---- static shared memory ------------------------------------------------------------------------------------------------------
struct Declaration { const void *what; size_t offset; };
inline std::vector<Declaration> declarations; // of the launch
inline size_t static_bytes;
void *static_shared(const void *what, size_t bytes) {
  for (const Declaration &d : declarations)
    if (d.what == what) return static_region.base + d.offset;
  const size_t offset = static_bytes;
  static_bytes += (bytes + 15) / 16 * 16;
  if (static_bytes > static_region.bytes) fail("%zu bytes of static shared memory", static_bytes);
  declarations.push_back({what, offset});
  return static_region.base + offset;
}

// ---- the scheduler ---------------------------------------------------------------------------------------------------------------
inline void run_fiber() {
  kernel_entry(kernel_arguments);
  settle_write();
  check_thread_end(*current);
  current->done = true;
  live_count--;
  warps[current->warp].live--;
  Rendezvous &r = barriers[0]; // __syncthreads is for threads that have not ended
  if (r.arrived) {
    r.expected = live_count;
    if (r.arrived == live_count) complete(r, true);
  }
  for (;;) tw_switch(&current->stack_pointer, scheduler_stack);
}

inline std::string wait_text(const Fiber &f) {
  switch (f.wait) {
  case Wait::Mbarrier: return "mbarrier " + mbarrier_text(f.word) + ", parity " + std::to_string(f.parity);
  case Wait::Warp: return "the other lanes of its warp";
  case Wait::Polling: return "a condition it polls";
  default: break;
  }
  const Rendezvous &r = barriers[f.barrier];
  return "barrier " + std::to_string(f.barrier) + ", where " + std::to_string(r.arrived) + " of " + std::to_string(r.expected) + " have come";
}
[[noreturn]] inline void report_deadlock() {
  std::string text = "deadlock:", last;
  for (const Fiber &f : fibers) {
    if (f.linear >= thread_count || f.done) continue;
    const std::string what = wait_text(f);
    if (what == last || text.size() > 2000) continue;
    text += (last.empty() ? " thread " : "; thread ") + std::to_string(f.linear) + " waits for " + what;
    last = what;
  }
  current = nullptr;
  fail("%s", text.c_str());
}

inline bool run_warp(int w, int &left) { // every lane that can, up to where it must wait
  const int first = w * kWarp, count = std::min(thread_count - first, kWarp);
  const bool backwards = policy.warp_order == kDescending || (policy.warp_order >= kRandomPriority && random_below(2));
  bool ran = false;
  for (int i = 0; i < count; i++) {
    Fiber &f = fibers[backwards ? first + count - 1 - i : first + i];
    if (f.done || blocked(f)) continue;
    current = &f;
    const bool polls = f.wait == Wait::Polling;
    tw_switch(&scheduler_stack, f.stack_pointer);
    current = nullptr;
    if (failed) siglongjmp(abandoned, 1);
    left -= f.done;
    ran |= !(polls && f.wait == Wait::Polling && !f.done); // polling again is no progress
  }
  return ran;
}

inline void start_fiber(Fiber &f, int i, const View &nothing) {
  const int bx = running_dim.x, by = running_dim.y;
  f.index = {uint32_t(i % bx), uint32_t(i / bx % by), uint32_t(i / (bx * by))};
  f.linear = i;
  f.lane = i % kWarp;
  f.warp = i / kWarp;
  f.done = f.released = false;
  f.wait = Wait::None;
  f.view = nothing;
  std::fill_n(f.own, kKinds, 0);
  f.own[kThread] = 1;
  std::fill_n(f.own_published, kGeneric, 0);
  f.copies_issued = f.stores_issued = 0;
  f.copies.clear();
  f.copy_groups.clear();
  f.stores.clear();
  f.awaited.clear();
  f.stack = stacks + i * kStackBytes;
  void **sp = (void **)(f.stack + kStackBytes);
  *--sp = nullptr;
  *--sp = (void *)run_fiber;
  for (int k = 0; k < 6; k++) *--sp = nullptr;
  f.stack_pointer = sp;
}

inline void start_block() {
  const int count = (thread_count + kWarp - 1) / kWarp;
  live_count = thread_count;
  current = nullptr;
  block_number++;
  layout.fit(thread_count, count);
  const View nothing = std::make_shared<Known>(layout.size);
  fibers.resize(thread_count);
  for (int i = 0; i < thread_count; i++) start_fiber(fibers[i], i, nothing);
  warps.resize(count);
  for (int w = 0; w < count; w++) {
    warps[w].live = std::min(kWarp, thread_count - w * kWarp);
    warps[w].meeting = {};
    warps[w].meeting.sum.clear();
  }
  for (Rendezvous &b : barriers) {
    b = {};
    b.sum.clear();
  }
  declarations.clear();
  static_bytes = 0;
  for (Region *r : {&dynamic_region, &static_region}) {
    memset(r->base, 0xff, r->bytes); // NaN in every floating point type used
    for (Cell &c : r->cells) c.writes.clear(), c.reads.clear();
  }
  reset_engines();
}

inline void run_block() {
  start_block();
  const int count = int(warps.size());
  std::vector<int> order(count);
  for (int w = 0; w < count; w++) order[w] = policy.warp_order == kDescending ? count - 1 - w : w;
  auto mix = [&] {
    for (int i = count - 1; i > 0; i--) std::swap(order[i], order[random_below(i + 1)]);
  };
  if (policy.warp_order >= kRandomPriority) mix();
  for (int left = thread_count; left;) {
    bool any = false;
    if (policy.warp_order == kRandomStep || (policy.warp_order == kRandomPriority && !random_below(16))) mix();
    for (int w : order) {
      if (policy.async_mode == kRandom && !random_below(3)) any |= finish_something(false);
      bool ran = run_warp(w, left);
      any |= ran;
      if (policy.warp_order == kRandomStep) {
        if (ran) break; // one step, then the next warp is drawn
        continue;
      }
      while (ran) { // stay with a warp while it can go on
        if (policy.async_mode == kRandom && !random_below(8)) finish_something(false);
        ran = run_warp(w, left);
      }
    }
    if (!any && left && !finish_something(true)) report_deadlock();
  }
  check_block_end();
}

} // namespace tw
