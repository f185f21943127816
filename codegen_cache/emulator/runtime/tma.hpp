// TMA: tiles of a tensor map of rank 1 to 5, filled with zero (or NaN) outside the tensor, swizzled over 32, 64 or 128 bytes
// by the bits of the shared address; bulk copies; stores, which leave out what lies outside. Not emulated: interleaved
// layouts, im2col, multicast, reductions.
#pragma once
#include "mbarriers.hpp"

namespace tw {

void fence_proxy_async() {
  settle_write();
  Fiber &f = *current;
  f.view = published(f.view);
  f.own_published[kThread] = f.own[kThread];
  f.own_published[kCopy] = f.own[kCopy];
  f.own[kThread]++; // what follows is not published
}

inline uint32_t swizzled(uint32_t offset, int mode) { // mode 1, 2, 3: 32, 64, 128 bytes
  return mode ? offset ^ (offset >> 3 & ((1 << mode) - 1) << 4) : offset;
}
inline uint32_t shared_offset(const void *p, size_t bytes, uint32_t alignment, const char *what) {
  if (!dynamic_region.holds(p, bytes)) {
    if (!dynamic_region.near(p)) fail("%s: not in dynamic shared memory", what);
    report_outside(dynamic_region, p, bytes, what);
  }
  const uint32_t offset = uint32_t((const char *)p - dynamic_region.base);
  if (offset % alignment) fail("misaligned: %s at byte %u of shared memory, not a multiple of %u", what, offset, alignment);
  return offset;
}

inline int steps(const CUtensorMap &m, int d) { return d < m.rank ? (m.box[d] + m.element_strides[d] - 1) / m.element_strides[d] : 1; }
inline uint32_t tile_bytes(const CUtensorMap &m) {
  uint32_t n = m.element_bytes;
  for (int d = 0; d < m.rank; d++) n *= steps(m, d);
  return n;
}
// The start of the row of a tile, or null where it lies outside.
inline char *tile_row(const CUtensorMap &m, const int *coordinates, const int *i) {
  char *row = m.base;
  for (int d = 1; d < m.rank; d++) {
    const int64_t c = int64_t(coordinates[d]) + int64_t(i[d]) * m.element_strides[d];
    if (c < 0 || c >= int64_t(m.dims[d])) return nullptr;
    row += c * int64_t(m.strides[d - 1]);
  }
  return row;
}
// Calls f(shared offset, global address or null, bytes) for pieces of at most 16 bytes.
template <class F> void for_each_piece(const CUtensorMap &m, const int *coordinates, uint32_t shared, F &&f) {
  const int size = m.element_bytes, step = std::max(1, 16 / size), columns = steps(m, 0);
  int i[5];
  for (i[4] = 0; i[4] < steps(m, 4); i[4]++)
    for (i[3] = 0; i[3] < steps(m, 3); i[3]++)
      for (i[2] = 0; i[2] < steps(m, 2); i[2]++)
        for (i[1] = 0; i[1] < steps(m, 1); i[1]++) {
          char *row = tile_row(m, coordinates, i);
          for (int x = 0; x < columns; x += step) {
            const int n = std::min(step, columns - x);
            const int64_t c = int64_t(coordinates[0]) + x;
            if (row && c >= 0 && c + n <= int64_t(m.dims[0])) {
              f(swizzled(shared, m.swizzle), row + c * size, n * size);
            } else {
              for (int e = 0; e < n; e++) {
                const bool inside = row && c + e >= 0 && c + e < int64_t(m.dims[0]);
                f(swizzled(shared + e * size, m.swizzle), inside ? row + (c + e) * size : nullptr, size);
              }
            }
            shared += n * size;
          }
        }
}

// ---- loads -------------------------------------------------------------------------------------------------------------------------------
struct Load {
  const CUtensorMap *map;
  int coordinates[5];
  const char *from;
  uint32_t shared, bytes, number;
  uint64_t *mbarrier;
};
inline std::vector<Load> loads;

inline void finish_load(size_t i) {
  const Load l = loads[i];
  loads[i] = loads.back();
  loads.pop_back();
  char *base = dynamic_region.base;
  if (l.map) {
    const int fill = l.map->nan_fill && l.map->is_float ? 0xff : 0;
    for_each_piece(*l.map, l.coordinates, l.shared, [&](uint32_t to, const char *from, int n) {
      if (from) memcpy(base + to, from, n);
      else memset(base + to, fill, n);
    });
  } else {
    memcpy(base + l.shared, l.from, l.bytes);
  }
  mbarrier_bytes_done(l.mbarrier, l.bytes, l.number);
}
inline void issue_load(Load l, const char *what) {
  access_shared(l.mbarrier, 8, own_access(Op::Atomic));
  Mbarrier &m = mbarrier_at(l.mbarrier, what);
  if (!m.fenced) fail("mbarrier: %s on %s, whose initialisation is not fenced", what, mbarrier_text(l.mbarrier).c_str());
  const Access global{Op::Read, kThread, current->linear, current->own[kThread], {current, 1}};
  if (l.map) for_each_piece(*l.map, l.coordinates, l.shared, [&](uint32_t, const char *from, int n) {
    if (from) access_global(from, n, global);
  });
  else access_global(l.from, l.bytes, global);
  l.number = ++m.loads;
  for (const Load &o : loads)
    if (l.shared < o.shared + o.bytes && o.shared < l.shared + l.bytes) fail("race: two TMA loads in flight to byte %u of shared memory", l.shared);
  char *to = dynamic_region.base + l.shared;
  access_shared(to, l.bytes, {Op::Write, kTma, index_of(m), l.number, {current, 1}});
  memset(to, 0xff, l.bytes);
  loads.push_back(l);
  if (policy.async_mode == kEager) finish_load(loads.size() - 1);
}
void tma_load(const CUtensorMap &map, uint64_t *word, void *shared, int rank, const int *coordinates) {
  if (rank != map.rank) fail("TMA load: %d coordinates for a tensor map of rank %d", rank, map.rank);
  Load l{&map, {}, nullptr, 0, tile_bytes(map), 0, word};
  l.shared = shared_offset(shared, l.bytes, 128, "TMA load");
  std::copy_n(coordinates, rank, l.coordinates);
  issue_load(l, "a TMA load");
}
void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *word) {
  if (bytes % 16 || uintptr_t(global) % 16) fail("misaligned: bulk load of %u bytes", bytes);
  issue_load({nullptr, {}, (const char *)global, shared_offset(shared, bytes, 16, "bulk load"), bytes, 0, word}, "a bulk load");
}

// ---- stores ------------------------------------------------------------------------------------------------------------------------------
inline void finish_store(Fiber &f) {
  const Store s = f.stores.front();
  f.stores.pop_front();
  if (s.commit) return;
  const char *from = dynamic_region.base;
  if (s.map) for_each_piece(*s.map, s.coordinates, s.shared, [&](uint32_t o, char *to, int n) {
    if (to) memcpy(to, from + o, n);
  });
  else memcpy(s.to, from + s.shared, s.bytes);
}
inline void issue_store(const Store &s) {
  Fiber &f = *current;
  access_shared(dynamic_region.base + s.shared, s.bytes, {Op::Read, kStore, f.linear, f.stores_issued + 1, {&f, 1}});
  const Access global{Op::Write, kStore, f.linear, f.stores_issued + 1, {&f, 1}};
  if (s.map) for_each_piece(*s.map, s.coordinates, s.shared, [&](uint32_t, char *to, int n) {
    if (to) access_global(to, n, global);
  });
  else access_global(s.to, s.bytes, global);
  f.stores.push_back(s);
  if (policy.async_mode == kEager) finish_store(f);
}
void tma_store(const CUtensorMap &map, const void *shared, int rank, const int *coordinates) {
  if (rank != map.rank) fail("TMA store: %d coordinates for a tensor map of rank %d", rank, map.rank);
  Store s{&map, {}, nullptr, 0, tile_bytes(map), false};
  s.shared = shared_offset(shared, s.bytes, 128, "TMA store");
  std::copy_n(coordinates, rank, s.coordinates);
  issue_store(s);
}
void bulk_store(void *global, const void *shared, uint32_t bytes) {
  if (bytes % 16 || uintptr_t(global) % 16) fail("misaligned: bulk store of %u bytes", bytes);
  issue_store({nullptr, {}, (char *)global, shared_offset(shared, bytes, 16, "bulk store"), bytes, false});
}
void bulk_commit() { // time of the agent: groups committed
  current->stores_issued++;
  current->stores.push_back({nullptr, {}, nullptr, 0, 0, true});
}
// .read waits until shared memory has been read; that the global write is done is not told apart here.
void bulk_wait(int groups, bool) {
  Fiber &f = *current;
  settle_write();
  int committed = 0;
  for (const Store &s : f.stores) committed += s.commit;
  while (committed > groups) {
    committed -= f.stores.front().commit;
    finish_store(f);
  }
  if (int(f.stores_issued) > groups) raise(f.own[kStore], f.stores_issued - groups);
}

} // namespace tw
