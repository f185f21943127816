// cp.async: a copy takes effect when its group is waited for, when it is issued, or at any time between. Until then its
// destination reads as NaN. Copies of one thread finish in order, which the hardware does not promise.
#pragma once
#include "scheduler.hpp"

namespace tw {

inline void mbarrier_copies_done(uint64_t *word, Fiber &f, uint32_t time);

inline void finish_copy(Fiber &f) {
  const Copy c = f.copies.front();
  f.copies.pop_front();
  if (c.mbarrier) return mbarrier_copies_done(c.mbarrier, f, c.time);
  if (c.source_bytes) memcpy(c.to, c.from, c.source_bytes);
  memset(c.to + c.source_bytes, 0, c.bytes - c.source_bytes);
}
inline void issue_copy(const Copy &c) {
  Fiber &f = *current;
  f.copies.push_back(c);
  if (policy.async_mode == kEager) finish_copy(f);
}

void copy_async(void *shared, const void *global, int bytes, int source_bytes) {
  Fiber &f = *current;
  if (uintptr_t(shared) % bytes || (source_bytes && uintptr_t(global) % bytes)) fail("misaligned: cp.async of %d bytes", bytes);
  if (source_bytes) access_global(global, source_bytes, own_access(Op::Read));
  const uint32_t time = ++f.copies_issued;
  access_shared(shared, bytes, {Op::Write, kCopy, f.linear, time, {&f, 1}});
  memset(shared, 0xff, bytes);
  issue_copy({(char *)shared, (const char *)global, bytes, source_bytes, nullptr, time});
}
void mbarrier_arrive_after_copies(uint64_t *word) {
  issue_copy({nullptr, nullptr, 0, 0, word, current->copies_issued});
}
void copy_async_commit() { current->copy_groups.push_back(current->copies_issued); }

// Until at most `groups` committed groups are left; for all copies, committed or not, where that is 0: cp.async.wait_all.
void copy_async_wait(int groups) {
  Fiber &f = *current;
  settle_write();
  while (int(f.copy_groups.size()) > groups) {
    raise(f.own[kCopy], f.copy_groups.front());
    f.copy_groups.pop_front();
  }
  if (groups == 0) raise(f.own[kCopy], f.copies_issued);
  while (f.copies.size() && f.copies.front().time <= f.own[kCopy]) finish_copy(f);
}

} // namespace tw
