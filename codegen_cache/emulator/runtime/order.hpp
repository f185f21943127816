// Which accesses of threads and their asynchronous operations are ordered.
#pragma once
#include "state.hpp"

namespace tw {

inline void Sum::add(const Fiber &f) {
  if (f.view != last) {
    raise_all(known, *f.view);
    last = f.view;
  }
  for (Kind kind : {kThread, kCopy, kStore}) raise(known[layout.first[kind] + f.linear], f.own[kind]);
  raise(known[layout.first[kWgmma] + f.warp], f.own[kWgmma]);
  for (int kind = 0; kind < kGeneric; kind++) raise(known[layout.first_published[kind] + f.linear], f.own_published[kind]);
}

// A thread lets others know of what it has done so far; what it does next is later.
inline void release(Sum &sum, Fiber &f) {
  sum.add(f);
  f.own[kThread]++;
}
inline void acquire(Fiber &f, const View &view) { f.view = joined(f.view, view); }

// Those on whose behalf an access is made: a thread, or the lanes of a warp, which know together what each of them knows.
struct Viewer {
  Fiber *first;
  int count;
};

inline bool knows(const Fiber &f, Kind kind, int index, uint32_t time) {
  const bool own = kind == kWgmma ? index == f.warp : kind != kTma && index == f.linear;
  return (own && time <= f.own[kind]) || time <= (*f.view)[layout.first[kind] + index];
}
inline bool published_to(const Fiber &f, Kind kind, int index, uint32_t time) {
  return (index == f.linear && time <= f.own_published[kind]) || time <= (*f.view)[layout.first_published[kind] + index];
}
template <class Check> bool any_of(Viewer v, Check check) {
  for (int i = 0; i < v.count; i++)
    if (check(v.first[i])) return true;
  return false;
}

} // namespace tw
