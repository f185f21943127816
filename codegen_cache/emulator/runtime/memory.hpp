// Where an address belongs, whether it may be accessed, and in what order. The compiler puts a call of a hook before every
// load and store of a device source: -fsanitize=thread with these hooks in place of the sanitizer's own.
#pragma once
#include "shadow.hpp"
#include <sys/mman.h>

namespace tw {

// A run of addresses of which `bytes` are there, in the middle of a larger one that is kept free: what misses the one
// still falls into the other, and is known by its name.
struct Region {
  std::string name;
  char *reserved = nullptr, *base = nullptr;
  size_t reserved_bytes = 0, bytes = 0;
  bool written = false;
  std::vector<Cell> cells; // empty where races are not looked for

  void reserve(size_t size) {
    reserved_bytes = size;
    reserved = (char *)mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  void open(size_t size, size_t alignment_offset) { // base is that many bytes behind a multiple of 1024
    base = reserved + reserved_bytes / 2 + alignment_offset;
    bytes = size;
    char *page = (char *)(uintptr_t(base) & ~uintptr_t(4095));
    mprotect(page, base + size - page + 4096, PROT_READ | PROT_WRITE);
  }
  void close() {
    if (reserved) munmap(reserved, reserved_bytes);
    *this = {};
  }
  bool near(const void *p) const { return size_t((const char *)p - reserved) < reserved_bytes; }
  bool holds(const void *p, size_t n) const { return (const char *)p >= base && (const char *)p + n <= base + bytes; }
};

constexpr size_t kSharedReserve = 1ull << 30, kTensorReserve = 1ull << 34;
inline Region dynamic_region, static_region;
inline std::vector<Region> tensors;
inline char *stacks;
inline size_t stacks_bytes;

// ---- races -----------------------------------------------------------------------------------------------------------------
[[noreturn]] inline void report(const Region &r, size_t offset, const Access &a, const Conflict &c) {
  const Op other = c.with.atomic ? Op::Atomic : c.with_write ? Op::Write : Op::Read;
  const std::string mine = agent_text(a.kind, a.op, a.index);
  const std::string theirs = agent_text(c.with.kind, other, c.with.index);
  if (c.reason == Conflict::Unpublished)
    fail("proxy: byte %zu of %s: no fence.proxy.async between %s and %s", offset, r.name.c_str(), theirs.c_str(), mine.c_str());
  const char *where = c.with.block != block_number ? " in another block" : "";
  fail("race: byte %zu of %s: nothing orders %s after %s%s", offset, r.name.c_str(), mine.c_str(), theirs.c_str(), where);
}

// A write that nothing orders does no harm where it writes what is there already (replicated threads do); what it writes
// is seen at the thread's next step.
struct Unsettled {
  Region *region = nullptr;
  size_t offset;
  unsigned bytes;
  char before[64];
  Access access;
  Conflict conflict;
  void *stack[24];
  int depth;
};
inline Unsettled unsettled;

inline void settle_write() {
  if (!unsettled.region) return;
  Region &r = *unsettled.region;
  unsettled.region = nullptr;
  if (memcmp(unsettled.before, r.base + unsettled.offset, unsettled.bytes)) {
    memcpy(fault_stack, unsettled.stack, sizeof fault_stack);
    fault_depth = unsettled.depth;
    report(r, unsettled.offset, unsettled.access, unsettled.conflict);
  }
  for_each_cell(r.cells, unsettled.offset, unsettled.bytes, [&](Cell &c, uint16_t m) { enter(c, unsettled.access, m, true); });
}

inline void check_order(Region &r, const char *p, size_t n, const Access &a) {
  const size_t offset = p - r.base;
  Conflict found;
  for_each_cell(r.cells, offset, n, [&](Cell &c, uint16_t m) {
    if (!found.reason) found = find_conflict(c, a, m);
  });
  if (found.reason) {
    const bool may_settle = found.reason == Conflict::Unordered && a.op == Op::Write && a.kind == kThread && n <= sizeof unsettled.before;
    if (!may_settle || found.with.kind != kThread || found.with.atomic) report(r, offset, a, found);
    unsettled.region = &r;
    unsettled.offset = offset;
    unsettled.bytes = unsigned(n);
    unsettled.access = a;
    unsettled.conflict = found;
    unsettled.depth = backtrace(unsettled.stack, 24);
    memcpy(unsettled.before, p, n);
    return;
  }
  for_each_cell(r.cells, offset, n, [&](Cell &c, uint16_t m) { enter(c, a, m, false); });
}

// ---- addresses ---------------------------------------------------------------------------------------------------------------
[[noreturn]] inline void report_outside(const Region &r, const void *p, size_t n, const char *what) {
  fail("out of bounds: %s of %zu bytes at byte %td of %s, which has %zu", what, n, (const char *)p - r.base, r.name.c_str(), r.bytes);
}
inline Region *tensor_at(const void *p) {
  for (Region &t : tensors)
    if (t.near(p)) return &t;
  return nullptr;
}
inline const char *name_of(Op op) { return op == Op::Read ? "read" : op == Op::Write ? "write" : "atomic operation"; }

inline void access_region(Region &r, const void *p, size_t n, const Access &a) {
  if (!r.holds(p, n)) report_outside(r, p, n, a.kind == kThread ? name_of(a.op) : agent_name(a.kind, a.op));
  if (r.cells.size()) check_order(r, (const char *)p, n, a);
}
inline void access_tensor(Region &r, const void *p, size_t n, const Access &a) {
  if (a.op != Op::Read && !r.written) {
    r.written = true;
    if (policy.races) r.cells.resize((r.bytes + 15) / 16); // from the first write on
  }
  access_region(r, p, n, a);
}
inline Access own_access(Op op) { return {op, kThread, current->linear, current->own[kThread], {current, 1}}; }

extern "C" char __ehdr_start __attribute__((visibility("hidden"))), _end __attribute__((visibility("hidden")));

inline void access(const void *p, size_t n, Op op) {
  if (size_t((const char *)p - stacks) < stacks_bytes) return;
  settle_write();
  if (!current) return;
  if (dynamic_region.near(p)) return access_region(dynamic_region, p, n, own_access(op));
  if (static_region.near(p)) return access_region(static_region, p, n, own_access(op));
  if (Region *t = tensor_at(p)) return access_tensor(*t, p, n, own_access(op));
  if ((const char *)p >= &__ehdr_start && (const char *)p < &_end) return;
  fail("out of bounds: %s of %zu bytes at %p, which is in no tensor", name_of(op), n, p);
}
inline void aligned_access(const void *p, size_t n, Op op) {
  if (uintptr_t(p) % n && !(size_t((const char *)p - stacks) < stacks_bytes))
    fail("misaligned: %s of %zu bytes at an address that is not a multiple of it", name_of(op), n);
  access(p, n, op);
}

// Global memory that the hardware reads or writes for a thread.
inline void access_global(const void *p, size_t n, const Access &a) {
  settle_write();
  Region *t = tensor_at(p);
  if (!t) fail("out of bounds: %s of %zu bytes at %p, which is in no tensor", name_of(a.op), n, p);
  access_tensor(*t, p, n, a);
}
// Shared memory likewise.
inline void access_shared(const void *p, size_t n, const Access &a) {
  settle_write();
  Region &r = static_region.near(p) ? static_region : dynamic_region;
  if (!r.near(p)) fail("out of bounds: %s at %p, which is not shared memory", agent_name(a.kind, a.op), p);
  access_region(r, p, n, a);
}

void atomic_access(void *p, size_t n) { aligned_access(p, n, Op::Atomic); }
void relaxed_read(const void *p, size_t n) { access(p, n, Op::Read); }

} // namespace tw

#define TW_HIDDEN extern "C" __attribute__((visibility("hidden")))
#define TW_HOOKS(n)                                                                                  \
  TW_HIDDEN void __tsan_read##n(void *p) { tw::aligned_access(p, n, tw::Op::Read); }                 \
  TW_HIDDEN void __tsan_write##n(void *p) { tw::aligned_access(p, n, tw::Op::Write); }               \
  TW_HIDDEN void __tsan_unaligned_read##n(void *p) { tw::access(p, n, tw::Op::Read); }               \
  TW_HIDDEN void __tsan_unaligned_write##n(void *p) { tw::access(p, n, tw::Op::Write); }
TW_HOOKS(1)
TW_HOOKS(2)
TW_HOOKS(4)
TW_HOOKS(8)
TW_HOOKS(16)
#undef TW_HOOKS
TW_HIDDEN void __tsan_read_range(void *p, size_t n) { tw::access(p, n, tw::Op::Read); }
TW_HIDDEN void __tsan_write_range(void *p, size_t n) { tw::access(p, n, tw::Op::Write); }
TW_HIDDEN void *__tsan_memcpy(void *to, const void *from, size_t n) {
  tw::access(from, n, tw::Op::Read);
  tw::access(to, n, tw::Op::Write);
  return memcpy(to, from, n);
}
TW_HIDDEN void *__tsan_memmove(void *to, const void *from, size_t n) {
  tw::access(from, n, tw::Op::Read);
  tw::access(to, n, tw::Op::Write);
  return memmove(to, from, n);
}
TW_HIDDEN void *__tsan_memset(void *to, int value, size_t n) {
  tw::access(to, n, tw::Op::Write);
  return memset(to, value, n);
}
TW_HIDDEN void __tsan_func_entry(void *) {}
TW_HIDDEN void __tsan_func_exit(void *) {}
TW_HIDDEN void __tsan_init() {}
TW_HIDDEN void __tsan_vptr_update(void **, void *) {}
TW_HIDDEN void __tsan_vptr_read(void **) {}
