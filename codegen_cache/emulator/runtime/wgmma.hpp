// wgmma. Every warp of a warpgroup queues its own 16 rows; what is queued runs in order when its group is waited for, when it
// is issued, or at any time between. Accumulators read as NaN while in flight; registers and shared memory are read when it
// runs. Not emulated: the order of sums, the shorter accumulator of fp8, accumulators of other types, sparsity.
#pragma once
#include "matrix.hpp"
#include "tma.hpp"

namespace tw {

struct Accumulator { // of a warp, 16 x n, while in flight
  float *registers[kWarp];
  int n, users;
  std::vector<float> values;
};
struct Product {
  WgmmaShape shape;
  uint64_t a, b; // descriptors
  const uint32_t *a_registers[kWarp];
  Accumulator *accumulator;
  bool accumulate;
  uint32_t group;
  int quarter; // of the warpgroup
};
struct Descriptors {
  uint64_t a, b;
  bool operator==(const Descriptors &) const = default;
};
struct WgmmaQueue { // of a warp
  std::deque<Product> products;
  std::vector<std::unique_ptr<Accumulator>> accumulators;
  std::vector<Descriptors> issued;
  uint32_t groups = 0;
  bool fenced = false;
};
inline std::deque<WgmmaQueue> wgmma_queues; // one per warp

// Bits 0..13: address / 16, 16..29: leading offset / 16, 32..45: stride offset / 16, 62..63: layout.
uint64_t wgmma_descriptor(const void *start, int layout_type, int leading, int stride) {
  const uint64_t address = shared_offset(start, 0, 16, "wgmma descriptor") >> 4 & 0x3fff;
  return address | uint64_t(leading & 0x3fff) << 16 | uint64_t(stride & 0x3fff) << 32 | uint64_t(layout_type) << 62;
}

// Calls f(row, column along K, shared address, whether the 16 bytes there run along K) for `rows` x k of an operand.
template <class F> void for_each_chunk(uint64_t descriptor, Type type, int k, bool transposed, int row0, int rows, F &&f) {
  const uint32_t start = uint32_t(descriptor & 0x3fff) << 4, leading = uint32_t(descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
  const int layout_type = int(descriptor >> 62), swizzle = layout_type ? 4 - layout_type : 0; // 1, 2, 3: 128, 64, 32 bytes
  const uint32_t span = 16u << swizzle;
  const int per = 16 / size_of(type), chunks = int(span / 16);
  if (descriptor >> 49 & 7) fail("wgmma: a descriptor with a base offset");
  auto chunk = [&](int row, int column, uint32_t offset, bool along_k) {
    char *p = dynamic_region.base + swizzled(offset, swizzle);
    if (!dynamic_region.holds(p, 16)) report_outside(dynamic_region, p, 16, "wgmma");
    f(row, column, p, along_k);
  };
  if (!transposed) {
    for (int r = row0; r < row0 + rows; r++)
      for (int c = 0; c < k / per; c++)
        chunk(r - row0, c * per, start + (r & 7) * span + (r >> 3) * stride + (swizzle ? c * 16 : c * leading), true);
    return;
  }
  if (size_of(type) != 2) fail("wgmma: only 16-bit operands can be transposed");
  for (int column = 0; column < k; column++)
    for (int c = row0 / per; c < (row0 + rows) / per; c++) {
      const uint32_t plain = start + c * stride + (column & 7) * 16 + (column >> 3) * leading;
      const uint32_t tiled = start + (c % chunks) * 16 + (c / chunks) * leading + (column & 7) * span + (column >> 3) * stride;
      chunk(c * per - row0, column, swizzle ? tiled : plain, false);
    }
}
// As [k][rows], so that the products run along rows.
inline void read_operand(uint64_t descriptor, Type type, int k, bool transposed, int row0, int rows, std::vector<float> &to) {
  const int per = 16 / size_of(type);
  to.resize(size_t(k) * rows);
  for_each_chunk(descriptor, type, k, transposed, row0, rows, [&](int row, int column, const char *p, bool along_k) {
    float values[16];
    decode(type, p, per, values);
    for (int e = 0; e < per; e++) to[along_k ? (column + e) * rows + row : column * rows + row + e] = values[e];
  });
}

inline void run_product(const Product &p) {
  const WgmmaShape &s = p.shape;
  static std::vector<float> a, b;
  if (s.a_in_registers) {
    float rows[16][32];
    for (int l = 0; l < 32; l++) unpack_a(s.a, s.k, p.a_registers[l], l, rows);
    a.resize(16 * s.k);
    for (int i = 0; i < s.k; i++)
      for (int m = 0; m < 16; m++) a[i * 16 + m] = rows[m][i];
  } else {
    read_operand(p.a, s.a, s.k, s.a_transposed, 16 * p.quarter, 16, a);
  }
  read_operand(p.b, s.b, s.k, s.b_transposed, 0, s.n, b);
  std::vector<float> &values = p.accumulator->values;
  if (!p.accumulate) std::fill(values.begin(), values.end(), 0.f);
  static float sums[256];
  for (int m = 0; m < 16; m++) {
    std::fill_n(sums, s.n, 0.f);
    for (int i = 0; i < s.k; i++) {
      const float x = a[i * 16 + m] * s.sign, *y = &b[i * s.n];
      for (int n = 0; n < s.n; n++) sums[n] += x * y[n];
    }
    for (int n = 0; n < s.n; n++) values[m * s.n + n] += sums[n];
  }
}

// Registers of lane l: 4 j and the next are row l / 4, columns 8 j + 2 (l % 4) and the next; 4 j + 2 and the next, row l / 4 + 8.
template <class F> void for_each_register(Accumulator &a, F &&f) {
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < a.n / 2; i++)
      f(a.registers[l][i], a.values[((l >> 2) + (i & 2) * 4) * a.n + (i >> 2) * 8 + 2 * (l & 3) + (i & 1)]);
}
inline void finish_product(WgmmaQueue &q) {
  const Product p = q.products.front();
  q.products.pop_front();
  run_product(p);
  if (--p.accumulator->users) return;
  for_each_register(*p.accumulator, [](float &in_lane, float value) { in_lane = value; });
  std::erase_if(q.accumulators, [&](auto &a) { return a.get() == p.accumulator; });
}

// ---- issuing ---------------------------------------------------------------------------------------------------------------------------
struct WgmmaLane {
  uint64_t a, b;
  const uint32_t *a_registers;
  float *c;
  bool accumulate;
};
inline void check_operands(const Product &p, int warp) {
  const WgmmaShape &s = p.shape;
  const Access read{Op::Read, kWgmma, warp, p.group + 1, whole_warp(warp)};
  auto check = [&](int, int, const char *at, bool) { access_shared(at, 16, read); };
  if (!s.a_in_registers) for_each_chunk(p.a, s.a, s.k, s.a_transposed, 16 * p.quarter, 16, check);
  for_each_chunk(p.b, s.b, s.k, s.b_transposed, 0, s.n, check);
}
inline Accumulator *accumulator_of(WgmmaQueue &q, std::array<void *, kWarp> &lanes, int n) {
  for (auto &a : q.accumulators)
    if (a->registers[0] == ((WgmmaLane *)lanes[0])->c && a->n == n) return a.get();
  q.accumulators.push_back(std::make_unique<Accumulator>());
  Accumulator &a = *q.accumulators.back();
  a.n = n;
  a.users = 0;
  a.values.resize(16 * n);
  for (int l = 0; l < 32; l++) a.registers[l] = ((WgmmaLane *)lanes[l])->c;
  for_each_register(a, [](float &in_lane, float &value) {
    value = in_lane;
    in_lane = NAN;
  });
  return &a;
}
inline void issue_wgmma(const WgmmaShape &shape, std::array<void *, kWarp> &lanes) {
  const int warp = current->warp, group = warp / 4 * 4;
  WgmmaQueue &q = wgmma_queues[warp];
  const WgmmaLane &first = *(WgmmaLane *)lanes[0];
  if (!q.fenced) fail("wgmma: no wgmma.fence (warpgroup_arrive) before it");
  const Descriptors mine{first.a, first.b};
  for (int w = group; w < std::min(group + 4, int(warps.size())); w++) {
    const auto &others = wgmma_queues[w].issued;
    if (others.size() > q.issued.size() && !(others[q.issued.size()] == mine)) fail("wgmma: warps of a warpgroup issue different ones");
  }
  q.issued.push_back(mine);
  Product p{shape, first.a, first.b, {}, nullptr, first.accumulate, q.groups, warp % 4};
  check_operands(p, warp);
  for (int l = 0; l < 32; l++) p.a_registers[l] = ((WgmmaLane *)lanes[l])->a_registers;
  p.accumulator = accumulator_of(q, lanes, shape.n);
  p.accumulator->users++;
  q.products.push_back(p);
  if (policy.async_mode == kEager) finish_product(q);
}
void wgmma(const WgmmaShape &shape, uint64_t a, const uint32_t *a_registers, uint64_t b, float *c, bool accumulate) {
  WgmmaLane mine{a, b, a_registers, c, accumulate};
  meet_warp(kWgmmaIssue, &mine, false, [&](auto &lanes) { issue_wgmma(shape, lanes); });
}
void wgmma_fence() {
  meet_warp(kWgmmaFence, nullptr, false, [](auto &) { wgmma_queues[current->warp].fenced = true; });
}
void wgmma_commit() {
  meet_warp(kWgmmaCommit, nullptr, false, [](auto &) {
    WgmmaQueue &q = wgmma_queues[current->warp];
    q.groups++;
    q.fenced = false;
  });
}
void wgmma_wait(int groups) {
  meet_warp(kWgmmaWait + uint32_t(groups), nullptr, false, [&](auto &) {
    WgmmaQueue &q = wgmma_queues[current->warp];
    while (q.products.size() && int(q.groups - q.products.front().group) > groups) finish_product(q);
    if (int(q.groups) <= groups) return;
    for (int l = 0; l < kWarp; l++) raise(fibers[current->warp * kWarp + l].own[kWgmma], q.groups - groups);
  });
}

} // namespace tw
