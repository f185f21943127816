// 16-bit and 8-bit floating point types. Every operation computes in float and rounds once, as the devices do.
#pragma once
#include "interface.hpp"
#include <cmath>
#include <cstring>

namespace tw {

template <class Bits, class Self> struct SmallFloat {
  friend Self operator+(Self a, Self b) { return Self(float(a) + float(b)); }
  friend Self operator-(Self a, Self b) { return Self(float(a) - float(b)); }
  friend Self operator*(Self a, Self b) { return Self(float(a) * float(b)); }
  friend Self operator/(Self a, Self b) { return Self(float(a) / float(b)); }
  friend Self operator-(Self a) { return Self(-float(a)); }
  friend Self &operator+=(Self &a, Self b) { return a = a + b; }
  friend Self &operator-=(Self &a, Self b) { return a = a - b; }
  friend Self &operator*=(Self &a, Self b) { return a = a * b; }
  friend Self &operator/=(Self &a, Self b) { return a = a / b; }
  friend bool operator<(Self a, Self b) { return float(a) < float(b); }
  friend bool operator>(Self a, Self b) { return float(a) > float(b); }
  friend bool operator<=(Self a, Self b) { return float(a) <= float(b); }
  friend bool operator>=(Self a, Self b) { return float(a) >= float(b); }
  friend bool operator==(Self a, Self b) { return float(a) == float(b); }
  friend bool operator!=(Self a, Self b) { return float(a) != float(b); }
};

} // namespace tw

struct half_t : tw::SmallFloat<uint16_t, half_t> {
  uint16_t bits;
  half_t() = default;
  half_t(float f) {
    const _Float16 h = f;
    memcpy(&bits, &h, 2);
  }
  half_t(double f) : half_t(float(f)) {}
  half_t(int i) : half_t(float(i)) {}
  operator float() const {
    _Float16 h;
    memcpy(&h, &bits, 2);
    return h;
  }
};

struct bfloat16_t : tw::SmallFloat<uint16_t, bfloat16_t> {
  uint16_t bits;
  bfloat16_t() = default;
  bfloat16_t(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    bits = f != f ? 0x7fff : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  bfloat16_t(double f) : bfloat16_t(float(f)) {}
  bfloat16_t(int i) : bfloat16_t(float(i)) {}
  operator float() const {
    const uint32_t u = uint32_t(bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
};

template <tw::Type encoding> struct Fp8 : tw::SmallFloat<uint8_t, Fp8<encoding>> {
  static constexpr tw::Type type = encoding;
  uint8_t data;
  Fp8() = default;
  Fp8(float f) : data(tw::to_fp8(type, f, true)) {}
  Fp8(double f) : Fp8(float(f)) {}
  Fp8(int i) : Fp8(float(i)) {}
  Fp8(half_t h) : Fp8(float(h)) {}
  Fp8(bfloat16_t h) : Fp8(float(h)) {}
  operator float() const { return tw::from_fp8(type, data); }
};
#ifdef TW_FNUZ // encodings without infinity and negative zero
using fp8_e4_t = Fp8<tw::Type::E4M3_FNUZ>;
using fp8_e5_t = Fp8<tw::Type::E5M2_FNUZ>;
#else
using fp8_e4_t = Fp8<tw::Type::E4M3>;
using fp8_e5_t = Fp8<tw::Type::E5M2>;
#endif
