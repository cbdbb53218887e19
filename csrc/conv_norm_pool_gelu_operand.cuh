// conv_norm_pool_gelu: what the operands of its matrix products are made of.
//
// An operand travels in records: 32 bytes of one pixel's (or one output channel's) input channels, 8 in fp32 and 16 in 16-bit types,
// which is what one MMA takes along K. The order of K inside an MMA is free as long as both operands agree, so lane q of a quad takes bytes
// [8q, 8q + 8) of a record as its two K slots: one 8-byte load, no shuffle, the same for every dtype.
#pragma once

#include "common/cuda.cuh"
#include "common/mma.cuh"

namespace fxfuse::conv_norm_pool_gelu {

// fp32 rounded to TF32; fp32 as it is, split in front of each product (common/mma.cuh); 16 bits.
enum class Operand { Tf32, Fp32, Bf16, Fp16 };

template <Operand> struct OperandTypes { using Data = float; using Mma = fxfuse::Tf32; };
template <> struct OperandTypes<Operand::Bf16> { using Data = __nv_bfloat16; using Mma = __nv_bfloat16; };
template <> struct OperandTypes<Operand::Fp16> { using Data = __half; using Mma = __half; };
template <Operand operand> using DataOf = typename OperandTypes<operand>::Data;
template <Operand operand> using MmaOf = typename OperandTypes<operand>::Mma;

constexpr int kRecordBytes = 32, kRecordWords = 8;
constexpr int kFragmentBytes = 16 * kRecordBytes;  // of 16 output channels, as a warp holds them: 16 bytes a lane
template <Operand operand>
constexpr int kRecordChannels = kRecordBytes / static_cast<int>(sizeof(DataOf<operand>));

// fp32 as an operand: rounded to nearest TF32, or whole. The largest finite values (within 2^-12 of FLT_MAX), which rounding would make
// inf, are cut off.
template <Operand operand>
__device__ __forceinline__ uint32_t fp32_word(float x) {
  const uint32_t rounded = round_tf32(x), bits = __float_as_uint(x);
  const bool overflows = (rounded & 0x7fffffffu) == 0x7f800000u;  // or x is inf, which cutting off leaves alone
  if constexpr (operand == Operand::Tf32) return overflows ? bits & 0xffffe000u : rounded;
  else return overflows ? bits & 0xffffe000u : bits;
}

// A word of a record: one fp32 channel, or two of 16 bits.
template <Operand operand>
__device__ __forceinline__ uint32_t operand_word(DataOf<operand> first, DataOf<operand> second) {
  if constexpr (sizeof(DataOf<operand>) == 4) return fp32_word<operand>(first);
  else {
    uint16_t low, high;
    memcpy(&low, &first, sizeof(low));
    memcpy(&high, &second, sizeof(high));
    return static_cast<uint32_t>(high) << 16 | low;
  }
}

// The two parts of an operand's word. inf gives (inf, nan): any row that it reaches is nan after the norm anyway.
__device__ __forceinline__ void split_word(uint32_t word, float& high, float& low) {
  high = __uint_as_float(round_tf32(__uint_as_float(word)));
  low = __uint_as_float(word) - high;
}

// The same with both parts as operands of TF32.
__device__ __forceinline__ void split_word(uint32_t word, uint32_t& high, uint32_t& low) {
  float high_part, low_part;
  split_word(word, high_part, low_part);
  high = __float_as_uint(high_part), low = round_tf32(low_part);
}

struct SplitFragment { uint4 high, low; };

__device__ __forceinline__ SplitFragment split_fragment(const uint4& a) {
  SplitFragment s;
  split_word(a.x, s.high.x, s.low.x);
  split_word(a.y, s.high.y, s.low.y);
  split_word(a.z, s.high.z, s.low.z);
  split_word(a.w, s.high.w, s.low.w);
  return s;
}

// d += A B for kM x kN tiles of 16 x 8. Fp32 takes three products of TF32 parts, to 2^-23 of each: the norm over a row of few columns
// magnifies what one of bf16 would leave. Small ones first they are summed from zero and then added in fp32: the tensor core's own
// running sums truncate, which over 10^3 steps of K costs 10^-5.
template <Operand operand, int kM, int kN>
__device__ __forceinline__ void multiply_tiles(float (&d)[kM][kN][4], const uint4 (&a)[kM], const uint2 (&b)[kN]) {
  using Type = MmaOf<operand>;
  if constexpr (operand == Operand::Fp32) {
    SplitFragment split[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) split[m] = split_fragment(a[m]);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      uint2 high, low;
      split_word(b[n].x, high.x, low.x);
      split_word(b[n].y, high.y, low.y);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float products[4] = {};
        mma(products, split[m].low, high.x, high.y, products, Type{});
        mma(products, split[m].high, low.x, low.y, products, Type{});
        mma(products, split[m].high, high.x, high.y, products, Type{});
#pragma unroll
        for (int i = 0; i < 4; ++i) d[m][n][i] += products[i];
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m) mma(d[m][n], a[m], b[n].x, b[n].y, d[m][n], Type{});
    }
  }
}

}  // namespace fxfuse::conv_norm_pool_gelu
