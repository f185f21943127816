// ldmatrix, stmatrix, mma and mfma: which lane holds which element. Products accumulate in float, in plain order; the
// hardware's order and inner precision differ.
#pragma once
#include "scheduler.hpp"
#include <cmath>

namespace tw {

// ---- element types ---------------------------------------------------------------------------------------------------------------
inline float decoded(Type type, const void *p) { // one element
  uint16_t h;
  uint32_t u;
  float f;
  switch (type) {
  case Type::F16: {
    _Float16 x;
    memcpy(&x, p, 2);
    return x;
  }
  case Type::BF16:
    memcpy(&h, p, 2);
    u = uint32_t(h) << 16;
    memcpy(&f, &u, 4);
    return f;
  case Type::F32: memcpy(&f, p, 4); return f;
  case Type::TF32: // 10 bits of the fraction are used
    memcpy(&u, p, 4);
    u &= ~0x1fffu;
    memcpy(&f, &u, 4);
    return f;
  default: return from_fp8(type, *(const uint8_t *)p);
  }
}
constexpr int size_of(Type type) {
  switch (type) {
  case Type::F16:
  case Type::BF16: return 2;
  case Type::F32:
  case Type::TF32: return 4;
  default: return 1;
  }
}
inline void decode(Type type, const void *from, int count, float *to) {
  if (type == Type::F16) {
    for (int i = 0; i < count; i++) to[i] = ((const _Float16 *)from)[i];
  } else {
    for (int i = 0; i < count; i++) to[i] = decoded(type, (const char *)from + i * size_of(type));
  }
}

// ---- fp8 -------------------------------------------------------------------------------------------------------------------------
struct Fp8Format { int mantissa, bias; bool finite_only, unsigned_zero; float limit; };
constexpr Fp8Format fp8_format(Type type) {
  switch (type) {
  case Type::E4M3: return {3, 7, true, false, 448};
  case Type::E5M2: return {2, 15, false, false, 57344};
  case Type::E4M3_FNUZ: return {3, 8, true, true, 240};
  default: return {2, 16, true, true, 57344};
  }
}
inline float fp8_value(Type type, int bits) {
  const Fp8Format f = fp8_format(type);
  const int magnitude = bits & 127, e = magnitude >> f.mantissa, m = magnitude & ((1 << f.mantissa) - 1);
  if (f.unsigned_zero && bits == 0x80) return NAN;
  if (!f.unsigned_zero && f.finite_only && magnitude == 127) return NAN;
  if (!f.finite_only && e == 31) return m ? NAN : bits & 128 ? -INFINITY : INFINITY;
  const float unit = 1.f / (1 << f.mantissa), value = e ? ldexpf(1 + m * unit, e - f.bias) : ldexpf(m * unit, 1 - f.bias);
  return bits & 128 ? -value : value;
}
struct Fp8Table {
  float value[256];
  explicit Fp8Table(Type type) {
    for (int i = 0; i < 256; i++) value[i] = fp8_value(type, i);
  }
};
inline const float *fp8_table(Type type) {
  static const Fp8Table tables[] = {Fp8Table(Type::E4M3), Fp8Table(Type::E5M2), Fp8Table(Type::E4M3_FNUZ), Fp8Table(Type::E5M2_FNUZ)};
  return tables[int(type) - int(Type::E4M3)].value;
}
float from_fp8(Type type, uint8_t bits) { return fp8_table(type)[bits]; }

uint8_t to_fp8(Type type, float value, bool satfinite) {
  const Fp8Format f = fp8_format(type);
  const uint8_t nan = f.unsigned_zero ? 0x80 : 0x7f, sign = std::signbit(value) ? 0x80 : 0;
  if (value != value) return nan;
  const float *t = fp8_table(type), a = fabsf(value);
  int count = 128; // magnitudes in order
  while (!(t[count - 1] <= f.limit)) count--;
  if (a >= f.limit) {
    const float step = f.limit - t[count - 2];
    const bool over = a > f.limit + step / 2 || (a == f.limit + step / 2 && ((count - 1) & 1)) || std::isinf(a);
    if (over && !satfinite) return f.finite_only ? (f.unsigned_zero ? nan : sign | nan) : sign | uint8_t(count);
    return sign | uint8_t(count - 1);
  }
  int high = int(std::upper_bound(t, t + count, a) - t), low = high - 1; // t[low] <= a < t[high]
  const float down = a - t[low], up = t[high] - a;
  const int nearest = down < up || (down == up && !(low & 1)) ? low : high;
  return f.unsigned_zero && !nearest ? 0 : sign | uint8_t(nearest);
}

// ---- ldmatrix and stmatrix -----------------------------------------------------------------------------------------------------------
// 8x8 matrices of 16-bit elements. Lane 8m + r gives the address of row r of matrix m; lane l has elements 2 (l % 4) and the
// next of row l / 4, or of that column.
struct MatrixLane { char *row; void *registers; };
template <class Move> void for_each_element(int count, bool transposed, Move &&move) {
  for (int l = 0; l < 32; l++)
    for (int m = 0; m < count; m++)
      for (int e = 0; e < 2; e++) {
        const int a = l >> 2, b = 2 * (l & 3) + e;
        move(l, m, e, 8 * m + (transposed ? b : a), 2 * (transposed ? a : b));
      }
}
void load_matrix(const void *row, void *registers, int count, bool transposed) {
  MatrixLane mine{(char *)row, registers};
  if (current->lane < 8 * count) {
    if (uintptr_t(row) % 16) fail("misaligned: ldmatrix of a row that is not at a multiple of 16 bytes");
    access_shared(row, 16, own_access(Op::Read));
  }
  meet_warp(kLoadMatrix + count * 2 + transposed, &mine, false, [&](auto &lanes) {
    uint16_t values[32][8];
    for_each_element(count, transposed, [&](int l, int m, int e, int from, int byte) {
      memcpy(&values[l][2 * m + e], ((MatrixLane *)lanes[from])->row + byte, 2);
    });
    for (int l = 0; l < 32; l++) memcpy(((MatrixLane *)lanes[l])->registers, values[l], 4 * count);
  });
}
void store_matrix(void *row, const uint32_t *registers, int count, bool transposed) {
  MatrixLane mine{(char *)row, (void *)registers};
  if (current->lane < 8 * count) {
    if (uintptr_t(row) % 16) fail("misaligned: stmatrix of a row that is not at a multiple of 16 bytes");
    access_shared(row, 16, own_access(Op::Write));
  }
  unsettled.region = nullptr; // rows are written when all lanes have come
  meet_warp(kStoreMatrix + count * 2 + transposed, &mine, false, [&](auto &lanes) {
    for_each_element(count, transposed, [&](int l, int m, int e, int to, int byte) {
      memcpy(((MatrixLane *)lanes[to])->row + byte, (char *)((MatrixLane *)lanes[l])->registers + 4 * m + 2 * e, 2);
    });
  });
}

// ---- mma m16n8k -----------------------------------------------------------------------------------------------------------------------
// A register r of lane l: row l / 4 + 8 (r % 2), columns from `per` (l % 4) + K/2 (r / 2) on; B likewise, its column l / 4.
inline void unpack_a(Type type, int k, const void *registers, int l, float (*a)[32]) {
  const int per = 4 / size_of(type), half = 4 * per, count = k / half * 2;
  for (int r = 0; r < count; r++) decode(type, (const char *)registers + 4 * r, per, &a[(l >> 2) + 8 * (r & 1)][(l & 3) * per + half * (r >> 1)]);
}
struct MmaLane { float *c; const void *a, *b; };
void mma(Type a_type, Type b_type, int k, float *c, const void *a, const void *b) {
  MmaLane mine{c, a, b};
  meet_warp(kMma + k, &mine, false, [&](auto &lanes) {
    float left[16][32], right[8][32];
    const int per = 4 / size_of(b_type), half = 4 * per;
    for (int l = 0; l < 32; l++) {
      const MmaLane &lane = *(MmaLane *)lanes[l];
      unpack_a(a_type, k, lane.a, l, left);
      for (int r = 0; r < k / half; r++) decode(b_type, (const char *)lane.b + 4 * r, per, &right[l >> 2][(l & 3) * per + half * r]);
    }
    for (int m = 0; m < 16; m++)
      for (int n = 0; n < 8; n++) {
        float sum = 0;
        for (int i = 0; i < k; i++) sum += left[m][i] * right[n][i];
        ((MmaLane *)lanes[(m & 7) * 4 + n / 2])->c[2 * (m >> 3) + (n & 1)] += sum;
      }
  });
}

// ---- mfma -----------------------------------------------------------------------------------------------------------------------------
// C register r of lane l: of 16 rows, row 4 (l / 16) + r; of 32, row 8 (r / 4) + 4 (l / 32) + r % 4; column l % m.
struct MfmaLane { const char *a, *b; const float *c; float *d; };
void mfma(Type type, int m, int k, const void *a, const void *b, const float *c, float *d) {
  MfmaLane mine{(const char *)a, (const char *)b, c, d};
  meet_warp(kMfma + k * 64 + m, &mine, false, [&](auto &lanes) {
    float left[32][32], right[32][32];
    const int per = k * m / 64;
    for (int l = 0; l < 64; l++) {
      const MfmaLane &lane = *(MfmaLane *)lanes[l];
      decode(type, lane.a, per, &left[l % m][l / m * per]);
      decode(type, lane.b, per, &right[l % m][l / m * per]);
    }
    for (int l = 0; l < 64; l++) {
      const MfmaLane &lane = *(MfmaLane *)lanes[l];
      for (int r = 0; r < m * m / 64; r++) {
        const int row = m == 16 ? 4 * (l / 16) + r : 8 * (r / 4) + 4 * (l / 32) + r % 4;
        float sum = 0;
        for (int i = 0; i < k; i++) sum += left[row][i] * right[l % m][i];
        lane.d[r] = lane.c[r] + sum;
      }
    }
  });
}

} // namespace tw
