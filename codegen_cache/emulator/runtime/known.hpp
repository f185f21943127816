// Who knows of whose actions: vector clocks. An action of an agent (a thread, or hardware that works for it) has a time;
// it happened before another action where the agent of that other action knows of that time.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace tw {

struct Fiber;

// Agents. The first two write through the generic proxy, so what they write must be published before wgmma or TMA may use it.
enum Kind : uint8_t { kThread, kCopy, kStore, kWgmma, kTma, kKinds };
constexpr int kGeneric = 2;
constexpr int kMbarriers = 128; // TMA loads of one mbarrier are one agent

// How a vector of known times is laid out, in a block of some size.
struct Layout {
  int first[kKinds], first_published[kGeneric], size;
  void fit(int threads, int warps) {
    const int counts[kKinds] = {threads, threads, threads, warps, kMbarriers};
    size = 0;
    for (int k = 0; k < kKinds; k++) first[k] = size, size += counts[k];
    for (int k = 0; k < kGeneric; k++) first_published[k] = size, size += counts[k];
  }
  int published_size() const { return first_published[0]; }
};
inline Layout layout;

using Known = std::vector<uint32_t>;
using View = std::shared_ptr<const Known>; // shared by all threads that came out of the same barrier

inline void raise(uint32_t &time, uint32_t to) {
  if (time < to) time = to;
}
inline void raise_all(Known &known, const Known &by) {
  for (size_t i = 0; i < known.size(); i++) known[i] = known[i] < by[i] ? by[i] : known[i];
}

// The union of two views. The threads of a warp ask for the same ones, one after the other.
inline View joined(const View &a, const View &b) {
  if (a == b) return a;
  static struct { View a, b, both; } last;
  if (last.a != a || last.b != b) {
    auto both = std::make_shared<Known>(*a);
    raise_all(*both, *b);
    last = {a, b, std::move(both)};
  }
  return last.both;
}

// Everything known is published as well: fence.proxy.async.
inline View published(const View &view) {
  static struct { View from, to; } last;
  if (last.from != view) {
    auto to = std::make_shared<Known>(*view);
    const int n = layout.size - layout.published_size();
    for (int i = 0; i < n; i++) raise((*to)[layout.published_size() + i], (*view)[i]); // kThread and kCopy come first
    last = {view, std::move(to)};
  }
  return last.to;
}

// What all who arrive at a barrier know together.
class Sum {
public:
  void clear() {
    known.assign(layout.size, 0);
    last = nullptr;
  }
  void add(const Fiber &fiber);
  void add(Kind kind, int index, uint32_t time) { raise(known[layout.first[kind] + index], time); }
  View view() const { return std::make_shared<Known>(known); }

private:
  Known known;
  View last; // kept, so that its address stays its own
};

} // namespace tw
