// conv_norm_pool_gelu, the gradient kernel: how weights and planes come into shared memory.
#pragma once

#include "conv_norm_pool_gelu_gradient_plan.cuh"
#include "conv_norm_pool_gelu_hopper_planes.cuh"

namespace fxfuse::conv_norm_pool_gelu {

// packed[tap, in the order of HopperTap][term][chunk][64 output channels][16 bytes].
template <Operand operand>
__global__ void __launch_bounds__(kPackThreads) pack_gradient_weight(const __grid_constant__ Weight w, uint4* packed) {
  using Tile = GradientTile<operand>;
  using T = DataOf<operand>;
  constexpr int kOfTerm = Tile::kWeightBytes / kChunkBytes;
  let_next_kernel_start();
  for (int i = blockIdx.x * kPackThreads + threadIdx.x; i < kHopperTaps * kOfTerm; i += gridDim.x * kPackThreads) {
    const int within = i % kOfTerm, channel_out = within % kHopperOutChannels, first_in = within / kHopperOutChannels * Tile::kChunkChannels;
    const HopperTap tap(i / kOfTerm);
    const T* from = static_cast<const T*>(w.data) + channel_out * w.stride[0] + first_in * w.stride[1] + tap.kernel_d * w.stride[2] +
                    tap.kernel_h * w.stride[3] + tap.kernel_w * w.stride[4];
    T values[Tile::kChunkChannels];
#pragma unroll
    for (int c = 0; c < Tile::kChunkChannels; ++c) {
      values[c] = channel_out < w.out_channels && first_in + c < w.in_channels ? from[c * w.stride[1]] : from_float<T>(0.f);
    }
    uint4 terms[Tile::kTerms];
    if constexpr (Tile::kTerms == 1) memcpy(terms, values, kChunkBytes);
    else split_bf16(values, terms);
    uint4* const to = packed + i / kOfTerm * Tile::kTerms * kOfTerm + within;
#pragma unroll
    for (int term = 0; term < Tile::kTerms; ++term) to[term * kOfTerm] = terms[term];
  }
}

// A pixel's chunk of 8 channels, fp32 as bf16 terms.
template <Operand operand>
__device__ __forceinline__ void store_gradient_line(uint32_t line, const DataOf<operand> (&value)[kWarpChannels]) {
  using Tile = GradientTile<operand>;
  static_assert(Tile::kChunkChannels == kWarpChannels);
  uint4 terms[Tile::kTerms];
  if constexpr (Tile::kTerms == 1) {
    const auto pair = [&](int c) { return operand_word<operand>(value[c], value[c + 1]); };
    terms[0] = make_uint4(pair(0), pair(2), pair(4), pair(6));
  } else {
    split_bf16(value, terms);
  }
#pragma unroll
  for (int term = 0; term < Tile::kTerms; ++term) store_pixel<Tile::kCopyBytes>(line + term * Tile::kTermBytes, terms[term]);
}

// The warpgroup that brings what the others multiply: the job's weights once, and the planes of its columns.
template <Operand operand>
__device__ __forceinline__ void produce_gradient_operands(const Problem& p, const GradientJob& job, const ColumnWalk& columns,
                                                          const HopperBarriers& barriers, const char* packed) {
  using Tile = GradientTile<operand>;
  constexpr int kTapBytes = Tile::kTerms * Tile::kWeightBytes;
  if (threadIdx.x % 128 == 0) {
    const int bytes = 3 * job.all_pairs() * kTapBytes;
    wait_for_previous_kernel();  // which packs the weights
    mbarrier_expect(barriers.weights_full(0), bytes);
    bulk_copy(barriers.weights, packed + job.first_tap() * kTapBytes, bytes, barriers.weights_full(0));
  }
  __syncwarp();
  produce_planes<Tile, Tile::kRows + 1, DataOf<operand>>(
      p, columns, barriers, [](uint32_t line, const auto& value) { store_gradient_line<operand>(line, value); });
}

}  // namespace fxfuse::conv_norm_pool_gelu
