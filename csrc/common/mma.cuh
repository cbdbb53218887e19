// Tensor core products as every GPU from sm_80 on has them: ldmatrix, mma.sync, cp.async, and the roundings of their operands.
//
// Lane l of a warp has group g = l / 4 and quad lane q = l % 4. For D[16 x 8] += A[16 x K] * B[K x 8], K = 32 bytes of a row:
//   a[0] row g, a[1] row g + 8, both of the first 16 bytes of K;  a[2], a[3] the same rows of the second 16 bytes
//   b[0] column g, first 16 bytes of K;  b[1] second;  a lane holds the q-th 4 of the 16 bytes
//   d[0], d[1] row g, columns 2q and 2q + 1;  d[2], d[3] row g + 8
// ldmatrix reads 16-byte rows from addresses that the lanes give one by one and hands each lane exactly that share, for any dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/cuda.cuh"

namespace fxfuse {

constexpr int kChunkBytes = 16;  // what one lane's address brings in: 4 fp32 or 8 16-bit values

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 16-byte matrices; lanes 0-7 address the rows of the first, 8-15 of the second, and so on.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// The operand's type: fp32 data rounded to TF32 by round_tf32, bf16, fp16. Sums are fp32.
struct Tf32 {};

// d = a * b + c; c may be d, or what the sum starts from.
#define FXFUSE_MMA(name, shape, type)                                                                                  \
  __device__ __forceinline__ void mma(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1, const float (&c)[4],    \
                                      name) {                                                                          \
    asm("mma.sync.aligned." shape ".row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "  \
        "{%10, %11, %12, %13};"                                                                                        \
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                               \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));       \
  }
FXFUSE_MMA(Tf32, "m16n8k8", "tf32")
FXFUSE_MMA(__nv_bfloat16, "m16n8k16", "bf16")
FXFUSE_MMA(__half, "m16n8k16", "f16")
#undef FXFUSE_MMA

// ---- cp.async: global to shared memory without registers -----------------------------------------------------------

// 16 bytes, around L1; zeros where `inside` is false (the address is not read then, but must be a valid one).
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool inside = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

// ---- TF32 ----------------------------------------------------------------------------------------------------------

// To nearest, ties away; the hardware itself truncates, which costs four times the error. The bits are a valid fp32 too.
__device__ __forceinline__ uint32_t round_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// ---- products as accurate as fp32's --------------------------------------------------------------------------------

// x = high + low, high in TF32 and low 2^-11 of it. Then a b = high high + (high low + low high), the first a product of TF32 and the two in
// brackets one of bf16, whose 8 bits leave 2^-20 of a b and whose exponents reach as far as fp32's, so that no value needs a scale.
// Bf16 values come in half the bytes: the cross chunk of 4 channels, high parts of one operand against low parts of the other, is as large
// as the chunk of their high parts, and a product of K = 16 does what would take two of TF32.

// Rounding the largest finite values up would make inf of them: those are truncated. inf and nan are low alone: then they meet the other
// operand's high part once, and no low part that is 0, which would make nan of inf.
__device__ __forceinline__ void split_tf32(float x, float& high, float& low) {
  constexpr uint32_t kTruncate = 0xffffe000u;
  high = __uint_as_float(round_tf32(x));
  if (!is_finite(high)) high = is_finite(x) ? __uint_as_float(__float_as_uint(x) & kTruncate) : 0.f;
  low = x - high;
}

// Two parts as bf16, to nearest, the first in the lower half. High ones are kept finite: fp32's largest are beyond bf16's.
__device__ __forceinline__ uint32_t bf16_high_parts(float first, float second) {
  uint32_t bits;
  asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
__device__ __forceinline__ uint32_t bf16_low_parts(float first, float second) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

// Values as sums of so many of bf16 each, the largest first: two leave 2^-16 of a value, three nothing. inf is the last part's.
template <int kParts>
__device__ __forceinline__ void split_bf16(float first, float second, uint32_t (&parts)[kParts]) {
#pragma unroll
  for (int i = 0; i < kParts - 1; ++i) {
    parts[i] = bf16_high_parts(first, second);
    first -= __uint_as_float(parts[i] << 16), second -= __uint_as_float(parts[i] & 0xffff0000u);
  }
  parts[kParts - 1] = bf16_low_parts(first, second);
}
template <int kParts>
__device__ __forceinline__ void split_bf16(const float (&x)[8], uint4 (&parts)[kParts]) {
  uint32_t words[4][kParts];
#pragma unroll
  for (int i = 0; i < 4; ++i) split_bf16(x[2 * i], x[2 * i + 1], words[i]);
#pragma unroll
  for (int part = 0; part < kParts; ++part) parts[part] = {words[0][part], words[1][part], words[2][part], words[3][part]};
}

// Calls f(part of a, part of b) for the products of two such sums that are not beyond the parts' own error. Small ones come first: the tensor
// cores add towards zero.
template <int kParts, typename F>
__device__ __forceinline__ void for_each_product(F&& f) {
#pragma unroll
  for (int sum = kParts - 1; sum >= 0; --sum) {
#pragma unroll
    for (int i = 0; i <= sum; ++i) f(i, sum - i);
  }
}

// 4 channels' cross chunk. One operand has its high parts first, the other its low ones.
enum class CrossOrder { HighFirst, LowFirst };
template <CrossOrder order>
__device__ __forceinline__ uint4 cross_chunk(const float (&high)[4], const float (&low)[4]) {
  const uint2 highs{bf16_high_parts(high[0], high[1]), bf16_high_parts(high[2], high[3])};
  const uint2 lows{bf16_low_parts(low[0], low[1]), bf16_low_parts(low[2], low[3])};
  if constexpr (order == CrossOrder::HighFirst) return {highs.x, highs.y, lows.x, lows.y};
  else return {lows.x, lows.y, highs.x, highs.y};
}

}  // namespace fxfuse
