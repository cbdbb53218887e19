// conv_norm_pool_gelu on sm_80 and newer: an implicit GEMM whose output rows are normalised, pooled and finished where they were made.
//
// M = output channels, N = columns of W, K = taps x input channels, both operands from shared memory. A warp makes one pooled row of 16 or
// 32 channels: for each row of the pool window its accumulators hold all of W, so the norm needs no other warp. The warps of a block
// share the input's pages, and the weights, which come through a ring a stage ahead.
//
// Bound by instructions, not by tensor cores, L2 or memory (H200, headline's shape in TF32: 6 % of 478 M instructions were MMAs).
#pragma once

#include "conv_norm_pool_gelu_epilogue.cuh"
#include "conv_norm_pool_gelu_params.cuh"
#include "conv_norm_pool_gelu_stage.cuh"
#include "conv_norm_pool_gelu_weights.cuh"

namespace fxfuse::conv_norm_pool_gelu {

struct PortableGrid {
  FastDiv channel_blocks, row_blocks, pooled_d, pooled_w;
  StageIndex stage;
};

inline PortableGrid make_portable_grid(const Problem& p, const PortablePlan& plan) {
  return {FastDiv(plan.channel_blocks), FastDiv(plan.row_blocks), FastDiv(p.d.pooled), FastDiv(p.w.pooled), make_stage_index(p, plan)};
}

// Adds the products of one chunk of an input row with the taps of a stage. `line` is the chunk's row in the page and `weights` the stage,
// both from the lane's own bytes on.
template <Operand operand, int kPhases, int kColumns, int kTiles>
__device__ __forceinline__ void accumulate(Row<kPhases, kColumns, kTiles>& row, const PortablePlan& plan, const char* line,
                                           const char* weights) {
  const int tap_bytes = plan.tiles_per_block() * kFragmentBytes;
  for (int offset = 0; offset < plan.num_offsets; ++offset) {
    uint2 b[kColumns];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) b[n] = *reinterpret_cast<const uint2*>(line + plan.shift[offset] + n * 8 * kRecordBytes);
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
      if (!(plan.has_tap >> (2 * offset + phase) & 1)) continue;
      uint4 a[kTiles];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) a[m] = *reinterpret_cast<const uint4*>(weights + m * kFragmentBytes);
      multiply_tiles<operand>(row.value[phase], a, b);
      weights += tap_bytes;
    }
  }
}

template <Operand operand, int kPhases, int kColumns, int kTiles>
__global__ void __launch_bounds__(kMaxWarps * kWarpSize, kPhases * kColumns * kTiles <= kAccumulatorTiles ? 2 : 1)
portable_kernel(const __grid_constant__ Problem p, const __grid_constant__ PortablePlan plan, const __grid_constant__ PortableGrid grid,
                const char* __restrict__ packed) {
  using T = DataOf<operand>;
  constexpr int kOutputs = kPhases * kColumns * 8, kChannels = kTiles * 16;
  extern __shared__ uint4 shared[];
  float* norm_weight = reinterpret_cast<float*>(shared);
  float* pooled_bias = norm_weight + kOutputs;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, num_warps = blockDim.x / kWarpSize;
  float* sums = pooled_bias + kOutputs + warp * kChannels * plan.sums_pitch;
  char* stages = reinterpret_cast<char*>(pooled_bias + kOutputs + num_warps * kChannels * plan.sums_pitch);
  char* pages = stages + kWeightStages * plan.stage_bytes();

  // Channels fastest: blocks that run together read the same input.
  uint32_t channel_block, row_block, pooled_d;
  const uint32_t plane_block = grid.row_blocks.divide(grid.channel_blocks.divide(blockIdx.x, channel_block), row_block);
  const int64_t n = grid.pooled_d.divide(plane_block, pooled_d);
  const int first_d = pooled_d * p.d.pool, first_pooled_h = row_block * plan.row_warps, first_h = first_pooled_h * p.h.pool;
  const int pooled_h = first_pooled_h + warp / plan.channel_warps, block_tile = warp % plan.channel_warps * kTiles;
  const int first_channel = channel_block * plan.channels_per_block() + block_tile * 16;
  const bool is_idle = pooled_h >= p.h.pooled || first_channel >= p.out_channels;
  const int first_plane = p.d.first_input(first_d, p.transposed), first_row = p.h.first_input(first_h, p.transposed);

  const int64_t block_bytes = int64_t{1} * p.d.kernel * p.h.kernel * plan.num_chunks * plan.weight_bytes;
  WeightRing ring(p, plan, first_d, first_h, packed + channel_block * block_bytes, stages);
  ring.fill();
  stage_norm_params<T>(p, norm_weight, pooled_bias, kOutputs);
  float poison[kTiles][2];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) poison[i / 2][i % 2] = poison_of<T>(p, first_channel + 8 * i + lane / 4);
  if (plan.resident) stage_pages<operand>(p, plan, grid.stage, pages, n, first_plane, plan.pages, first_row, 0);
  __syncthreads();  // for a block whose planes meet no input: it has no stage to wait for

  const int line_bytes = p.w_step() * plan.line_slots * kRecordBytes, chunk_bytes = plan.page_rows * line_bytes;
  const char* lane_pages = pages + lane / 4 * kRecordBytes + lane % 4 * 8;
  Row<kPhases, kColumns, kTiles> row;
  for (int window_row = 0, window_d = 0, window_h = 0; window_row < p.d.pool * p.h.pool; ++window_row) {
    row.zero();
    // The order of WeightRing.
    for (int kernel_d = 0; kernel_d < p.d.kernel; ++kernel_d) {
      const int plane = p.d.input_at(first_d + window_d, kernel_d, p.transposed);
      if (plane == kNoInput) continue;
      for (int page_chunk = 0; page_chunk < plan.num_chunks; page_chunk += plan.page_chunks) {
        if (!plan.resident) {
          __syncthreads();
          stage_pages<operand>(p, plan, grid.stage, pages, n, plane, 1, first_row, page_chunk);
        }
        const int page_end = min(page_chunk + plan.page_chunks, plan.num_chunks);
        const char* page = lane_pages + (plan.resident ? (plane - first_plane) * plan.page_chunks * chunk_bytes : 0);
        for (int kernel_h = 0; kernel_h < p.h.kernel; ++kernel_h) {
          if (!ring.uses(window_h, kernel_h)) continue;
          const int h = p.h.input_at(pooled_h * p.h.pool + window_h, kernel_h, p.transposed);
          const char* line = page + (h - first_row) * line_bytes;
          for (int chunk = page_chunk; chunk < page_end; chunk += plan.stage_chunks) {
            const char* weights = ring.next() + block_tile * kFragmentBytes + lane * 16;
            if (is_idle || h == kNoInput) continue;
            for (int i = chunk; i < min(chunk + plan.stage_chunks, page_end); ++i, line += chunk_bytes, weights += plan.weight_bytes) {
              accumulate<operand>(row, plan, line, weights);
            }
          }
        }
      }
    }
    if (!is_idle) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        float* channel_sums = sums + (16 * m + lane / 4) * plan.sums_pitch;
        add_normalised<0>(row, m, p, poison[m][0], norm_weight, channel_sums, p.w.pool % 2 == 0, window_row == 0);
        add_normalised<1>(row, m, p, poison[m][1], norm_weight, channel_sums + 8 * plan.sums_pitch, p.w.pool % 2 == 0, window_row == 0);
      }
    }
    if (++window_h == p.h.pool) window_h = 0, ++window_d;
  }
  if (is_idle) return;
  __syncwarp();
  const int64_t channel_size = int64_t{1} * p.d.pooled * p.h.pooled * p.w.pooled;
  const int64_t first_output = (n * p.out_channels + first_channel) * channel_size +
                               (static_cast<int64_t>(pooled_d) * p.h.pooled + pooled_h) * p.w.pooled;
  const int num_channels = min(kChannels, p.out_channels - first_channel);
  store_pooled<operand>(p, sums, plan.sums_pitch, pooled_bias, num_channels, grid.pooled_w, first_output, channel_size);
}

}  // namespace fxfuse::conv_norm_pool_gelu
