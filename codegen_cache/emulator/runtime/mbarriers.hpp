// mbarriers. A phase ends when all arrivals it expects have come and all bytes it expects are there. The hardware's wait looks
// at the parity of the phase alone, so a waiter that two phases pass by hangs. TileLang lets idle producer warps run into
// that; such waits are let through and counted, unless the policy wants them to hang.
#pragma once
#include "copies.hpp"

namespace tw {

constexpr int kPhaseBits = 14;
struct MbarrierWord { // what an initialised word holds; the hardware's own encoding is not documented
  uint64_t phase : kPhaseBits, expected : 14, missing : 14;
  int64_t bytes : 20;
  uint64_t valid : 2; // 1: initialised
};
static_assert(sizeof(MbarrierWord) == 8);

struct Mbarrier { // what the emulator keeps beside the word
  const uint64_t *word;
  int initialiser;
  bool fenced;    // its initialisation, for TMA
  uint32_t loads; // so far
  Sum sum;        // of all who have arrived
  View completed; // at the end of the last phase
};
inline std::deque<Mbarrier> mbarriers; // of the block, in the order of their initialisation
inline long overtaken_waits;

inline std::string mbarrier_text(const uint64_t *word) {
  size_t i = 0;
  while (i < mbarriers.size() && mbarriers[i].word != word) i++;
  const MbarrierWord &b = *(const MbarrierWord *)word;
  return std::to_string(i) + " (phase " + std::to_string(b.phase) + ", missing " + std::to_string(b.missing) + " of " +
         std::to_string(b.expected) + " arrivals, " + std::to_string(b.bytes) + " bytes)";
}
inline Mbarrier &mbarrier_at(uint64_t *word, const char *what) {
  const MbarrierWord &b = *(const MbarrierWord *)word;
  if (b.valid == 1)
    for (Mbarrier &m : mbarriers)
      if (m.word == word) return m;
  fail("mbarrier: %s on one that is not initialised", what);
}
inline int index_of(const Mbarrier &m) {
  int i = 0;
  while (&mbarriers[i] != &m) i++;
  return i;
}
inline void end_phase_if_done(uint64_t *word, Mbarrier &m) {
  MbarrierWord &b = *(MbarrierWord *)word;
  if (b.missing || b.bytes) return;
  b.phase++;
  b.missing = b.expected;
  m.completed = m.sum.view();
}
inline void count_arrival(uint64_t *word, Mbarrier &m) {
  MbarrierWord &b = *(MbarrierWord *)word;
  if (!b.missing) fail("mbarrier: too many arrivals on %s", mbarrier_text(word).c_str());
  b.missing--;
  end_phase_if_done(word, m);
}

void mbarrier_init(uint64_t *word, uint32_t arrivals) {
  access_shared(word, 8, own_access(Op::Write));
  unsettled.region = nullptr;
  MbarrierWord b{};
  b.expected = b.missing = arrivals;
  b.valid = 1;
  memcpy(word, &b, 8);
  if (!arrivals) fail("mbarrier: initialised for no arrival");
  if (mbarriers.size() == kMbarriers) fail("mbarrier: more than %d", kMbarriers);
  mbarriers.push_back({word, current->linear, false, 0, {}, nullptr});
  mbarriers.back().sum.clear();
  mbarriers.back().completed = mbarriers.back().sum.view();
}
void fence_mbarrier_init() {
  settle_write();
  for (Mbarrier &m : mbarriers) m.fenced |= m.initialiser == current->linear;
}

void mbarrier_arrive(uint64_t *word, uint32_t bytes, bool arrives) {
  access_shared(word, 8, own_access(Op::Atomic));
  Mbarrier &m = mbarrier_at(word, "an arrival");
  ((MbarrierWord *)word)->bytes += bytes;
  if (!arrives) return;
  release(m.sum, *current);
  count_arrival(word, m);
}
inline void mbarrier_copies_done(uint64_t *word, Fiber &f, uint32_t time) {
  Mbarrier &m = mbarrier_at(word, "an arrival of cp.async");
  m.sum.add(kCopy, f.linear, time);
  count_arrival(word, m);
}
inline void mbarrier_bytes_done(uint64_t *word, uint32_t bytes, uint32_t load) {
  Mbarrier &m = mbarrier_at(word, "bytes of a TMA load");
  m.sum.add(kTma, index_of(m), load);
  ((MbarrierWord *)word)->bytes -= bytes;
  end_phase_if_done(word, m);
}

// ---- waiting -------------------------------------------------------------------------------------------------------------------------
inline int phases_between(int from, int to) { // modulo the width of the counter
  return int(int64_t(uint64_t(to - from) << (64 - kPhaseBits)) >> (64 - kPhaseBits));
}
inline bool parity_blocks(const uint64_t *word, int parity) { return (((const MbarrierWord *)word)->phase & 1) == uint64_t(parity); }
inline bool mbarrier_blocks(const Fiber &f) {
  if (!parity_blocks(f.word, f.parity)) return false;
  return policy.hang_overtaken || phases_between(f.phase, int(((const MbarrierWord *)f.word)->phase)) <= 0;
}
void mbarrier_wait(uint64_t *word, uint32_t parity) {
  access_shared(word, 8, own_access(Op::Atomic));
  Mbarrier &m = mbarrier_at(word, "a wait");
  Fiber &f = *current;
  parity &= 1;
  Awaited *last = nullptr;
  for (Awaited &a : f.awaited)
    if (a.word == word) last = &a;
  if (!last) {
    f.awaited.push_back({word, -2});
    last = &f.awaited.back();
  }
  int phase = last->phase + 1; // the next one of this parity, as the thread counts
  if (uint32_t(phase & 1) != parity) phase++;
  f.word = word;
  f.parity = int(parity);
  f.phase = phase;
  if (mbarrier_blocks(f)) wait_for(Wait::Mbarrier);
  const bool overtaken = parity_blocks(word, int(parity));
  overtaken_waits += overtaken;
  last->phase = overtaken ? phase : int(((const MbarrierWord *)word)->phase) - 1;
  acquire(f, m.completed);
}
bool mbarrier_test(uint64_t *word, uint32_t parity) {
  access_shared(word, 8, own_access(Op::Atomic));
  Mbarrier &m = mbarrier_at(word, "a test");
  if (parity_blocks(word, parity & 1)) {
    current->wait = Wait::Polling; // the others, and what is in flight, go on
    yield();
    current->wait = Wait::None;
    if (parity_blocks(word, parity & 1)) return false;
  }
  acquire(*current, m.completed);
  return true;
}

} // namespace tw
