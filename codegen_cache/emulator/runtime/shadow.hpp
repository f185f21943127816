// Data races. For every 16 bytes the accesses are kept that a later one might not be ordered after; an access that knows of
// all of them takes their place. Found in every schedule, as the order the threads happened to run in plays no part.
#pragma once
#include "order.hpp"

namespace tw {

struct Record {
  uint32_t time, block;
  uint16_t index, mask; // of the agent; the bytes
  Kind kind;
  bool atomic;
  bool same(const Record &o) const { return index == o.index && kind == o.kind && block == o.block && atomic == o.atomic; }
};
struct Cell {
  std::vector<Record> writes, reads;
};
enum class Op : uint8_t { Read, Write, Atomic };

struct Access { // by an agent, on behalf of a viewer
  Op op;
  Kind kind;
  int index;
  uint32_t time;
  Viewer viewer;
  bool async() const { return kind >= kGeneric; }
};
inline uint32_t block_number; // counts blocks over a launch

inline const char *agent_name(Kind kind, Op op) {
  switch (kind) {
  case kThread: return op == Op::Read ? "read" : op == Op::Write ? "write" : "atomic operation";
  case kCopy: return "cp.async";
  case kStore: return "bulk store";
  case kWgmma: return "wgmma";
  default: return "TMA load";
  }
}
inline std::string agent_text(Kind kind, Op op, int index) {
  const char *owner = kind == kWgmma ? " of warp " : kind == kTma ? " on mbarrier " : " by thread ";
  return agent_name(kind, op) + std::string(owner) + std::to_string(index);
}

inline bool is_known(const Access &a, const Record &r) {
  return r.block == block_number && any_of(a.viewer, [&](const Fiber &f) { return knows(f, r.kind, r.index, r.time); });
}
inline bool is_published(const Access &a, const Record &r) {
  return any_of(a.viewer, [&](const Fiber &f) { return published_to(f, r.kind, r.index, r.time); });
}

struct Conflict {
  enum Reason : uint8_t { None, Unordered, Unpublished } reason = None;
  Record with{};
  bool with_write = false;
};

// The first earlier access that `a` must be ordered after, and is not.
inline Conflict find_conflict(const Cell &cell, const Access &a, uint16_t mask) {
  uint16_t known = 0; // of several writers of one value, any will do
  for (const Record &w : cell.writes)
    if (!w.atomic && w.mask & mask && is_known(a, w)) known |= w.mask;
  for (const Record &w : cell.writes) {
    if (!(w.mask & mask) || (w.atomic && a.op == Op::Atomic)) continue;
    const bool ordered = w.atomic ? is_known(a, w) : !(w.mask & mask & ~known);
    if (!ordered) return {Conflict::Unordered, w, true};
    if (policy.proxies && a.async() && w.kind < kGeneric && is_known(a, w) && !is_published(a, w))
      return {Conflict::Unpublished, w, true};
  }
  if (a.op != Op::Read)
    for (const Record &r : cell.reads)
      if (r.mask & mask && !is_known(a, r)) return {Conflict::Unordered, r, false};
  return {};
}

// `a` takes the place of what it knows of, where it is at least as strict. keep_writes: others have written the same.
inline void enter(Cell &cell, const Access &a, uint16_t mask, bool keep_writes) {
  const Record mine{a.time, block_number, uint16_t(a.index), mask, a.kind, a.op == Op::Atomic};
  if (a.op == Op::Read) {
    for (Record &r : cell.reads)
      if (r.same(mine) && !(r.mask & ~mask)) return void(r = mine);
    const size_t n = cell.reads.size();
    if (n >= 8 && !(n & (n - 1))) std::erase_if(cell.reads, [&](const Record &r) { return !(r.mask & ~mask) && is_known(a, r); });
    cell.reads.push_back(mine);
    return;
  }
  if (a.op == Op::Atomic) {
    for (Record &w : cell.writes)
      if (w.same(mine) && !(w.mask & ~mask)) return void(w = mine);
    std::erase_if(cell.writes, [&](const Record &w) { return !(w.mask & ~mask) && is_known(a, w); });
  } else if (keep_writes) {
    for (Record &w : cell.writes)
      if (w.same(mine) && !(w.mask & ~mask)) return void(w = mine);
  } else {
    for (Record &w : cell.writes) w.mask &= ~mask;
    std::erase_if(cell.writes, [](const Record &w) { return !w.mask; });
  }
  if (!keep_writes) {
    for (Record &r : cell.reads)
      if (is_known(a, r)) r.mask &= ~mask;
    std::erase_if(cell.reads, [](const Record &r) { return !r.mask; });
  }
  cell.writes.push_back(mine);
}

// Calls f(cell, mask) for the cells of a range of bytes.
template <class F> void for_each_cell(std::vector<Cell> &cells, size_t offset, size_t bytes, F &&f) {
  for (size_t end = offset + bytes; offset < end;) {
    const size_t in = offset % 16, n = std::min(16 - in, end - offset);
    f(cells[offset / 16], uint16_t(((1u << n) - 1) << in));
    offset += n;
  }
}

} // namespace tw
