// HIP for gfx9: vector types, copies and matrix instructions that TileLang's HIP sources use.
#pragma once
#include "common.hpp"

using float16_t = half_t;
struct alignas(4) bfloat16x2 { bfloat16_t x, y; };
struct alignas(8) bfloat16x4 { bfloat16_t data[4]; };
struct alignas(16) bfloat16x8 { bfloat16_t data[8]; };

// Registers of the matrix instructions. Their elements are never computed with, so raw bits do.
using float16x2 = uint16_t __attribute__((vector_size(4)));
using float16x4 = uint16_t __attribute__((vector_size(8)));
using float16x8 = uint16_t __attribute__((vector_size(16)));
using bfloat16x4_vec = short __attribute__((vector_size(8)));
using bfloat16x8_vec = short __attribute__((vector_size(16)));
using float32x4 = float __attribute__((vector_size(16)));
using float32x16 = float __attribute__((vector_size(64)));
using int32x4 = int __attribute__((vector_size(16)));

namespace tw {
template <Type type, int m, int k, class A, class C> C mfma_values(A a, A b, C c) {
  C d;
  mfma(type, m, k, &a, &b, (const float *)&c, (float *)&d);
  return d;
}
} // namespace tw
// The last three operands, broadcast controls, are 0 in all that TileLang emits.
#define __builtin_amdgcn_mfma_f32_16x16x4f32(a, b, c, x, y, z) tw::mfma_values<tw::Type::F32, 16, 4>(a, b, c)
#define __builtin_amdgcn_mfma_f32_32x32x2f32(a, b, c, x, y, z) tw::mfma_values<tw::Type::F32, 32, 2>(a, b, c)
#define __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, x, y, z) tw::mfma_values<tw::Type::F16, 16, 16>(a, b, c)
#define __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, c, x, y, z) tw::mfma_values<tw::Type::F16, 32, 8>(a, b, c)
#define __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, x, y, z) tw::mfma_values<tw::Type::BF16, 16, 16>(a, b, c)
#define __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, b, c, x, y, z) tw::mfma_values<tw::Type::BF16, 32, 8>(a, b, c)
#define __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(a, b, c, x, y, z) tw::mfma_values<fp8_e4_t::type, 16, 32>(a, b, c)
#define __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(a, b, c, x, y, z) tw::mfma_values<fp8_e4_t::type, 32, 16>(a, b, c)
#define __builtin_amdgcn_mfma_f32_16x16x32_f16(a, b, c, x, y, z) tw::mfma_values<tw::Type::F16, 16, 32>(a, b, c)
#define __builtin_amdgcn_mfma_f32_16x16x32_bf16(a, b, c, x, y, z) tw::mfma_values<tw::Type::BF16, 16, 32>(a, b, c)
#define __builtin_amdgcn_wavefrontsize() 64

namespace tl {
// On gfx9 a copy is a load and a store; there is nothing to commit or to wait for.
template <int N> void cp_async_gs(void *shared, const void *global) {
  using Word = std::conditional_t<N == 16, uint4, std::conditional_t<N == 8, uint2, uint>>;
  *(Word *)shared = *(const Word *)global;
}
template <int N> void cp_async_gs_conditional(void *shared, const void *global, bool condition) {
  using Word = std::conditional_t<N == 16, uint4, std::conditional_t<N == 8, uint2, uint>>;
  *(Word *)shared = condition ? *(const Word *)global : Word{};
}
inline void cp_async_commit() {}
template <int = 0> void cp_async_wait() {}
} // namespace tl
