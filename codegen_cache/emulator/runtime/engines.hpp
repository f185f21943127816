// The asynchronous engines as the scheduler sees them, and what must be over when a thread or a block ends.
#pragma once
#include "wgmma.hpp"

namespace tw {

inline void finish_copies_to_arrival(Fiber &f) {
  for (bool arrived = false; !arrived;) {
    arrived = f.copies.front().mbarrier;
    finish_copy(f);
  }
}
// What a waiting thread may wait for: a TMA load, or copies that an arrival at an mbarrier follows.
inline bool finish_needed() {
  std::vector<Fiber *> arriving;
  for (Fiber &f : fibers)
    if (std::any_of(f.copies.begin(), f.copies.end(), [](const Copy &c) { return c.mbarrier; })) arriving.push_back(&f);
  const size_t total = loads.size() + arriving.size();
  if (!total) return false;
  const size_t pick = random_below(uint32_t(total));
  if (pick < loads.size()) finish_load(pick);
  else finish_copies_to_arrival(*arriving[pick - loads.size()]);
  return true;
}
inline bool finish_any_copies() { // the oldest of every lane of some warp
  const int w = int(random_below(uint32_t(warps.size()))) * kWarp;
  bool any = false;
  for (int i = w; i < std::min(thread_count, w + kWarp); i++)
    if (fibers[i].copies.size()) {
      finish_copy(fibers[i]);
      any = true;
    }
  return any;
}
inline bool finish_something(bool needed) {
  if (needed) return finish_needed();
  switch (random_below(4)) {
  case 0:
    if (loads.empty()) return false;
    finish_load(random_below(uint32_t(loads.size())));
    return true;
  case 1: {
    WgmmaQueue &q = wgmma_queues[random_below(uint32_t(wgmma_queues.size()))];
    if (q.products.empty()) return false;
    finish_product(q);
    return true;
  }
  case 2: {
    Fiber &f = fibers[random_below(uint32_t(thread_count))];
    if (f.stores.empty()) return false;
    finish_store(f);
    return true;
  }
  default: return finish_any_copies();
  }
}

inline void reset_engines() {
  loads.clear();
  mbarriers.clear();
  wgmma_queues.clear();
  wgmma_queues.resize(warps.size());
}
inline void check_thread_end(Fiber &f) {
  if (f.own[kStore] < f.stores_issued + std::any_of(f.stores.begin(), f.stores.end(), [](const Store &s) { return !s.commit; }))
    fail("a thread ends with a bulk store that it has not waited for");
  if (wgmma_queues[f.warp].products.size() || f.own[kWgmma] < wgmma_queues[f.warp].groups) fail("a warp ends with wgmma that it has not waited for");
}
inline void check_block_end() {
  for (size_t w = 0; w < warps.size(); w++)
    if (wgmma_queues[w].issued.size() != wgmma_queues[w / 4 * 4].issued.size()) fail("wgmma: warps of a warpgroup issue different numbers of them");
  if (loads.size()) fail("a block ends with %zu TMA loads in flight", loads.size());
  for (const Mbarrier &m : mbarriers) { // allowed, but never meant: a wrong count
    const MbarrierWord &b = *(const MbarrierWord *)m.word;
    if (b.missing != b.expected || b.bytes) fail("a block ends in the middle of a phase of mbarrier %s", mbarrier_text(m.word).c_str());
  }
}

} // namespace tw
