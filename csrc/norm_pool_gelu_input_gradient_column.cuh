// norm_pool_gelu_input_gradient on channels_last_3d input: a thread's column of a tile in shared memory, its rows copied and their statistics.
#pragma once

#include "norm_pool_gelu_channels_last.cuh"

namespace fxfuse::norm_pool_gelu {

// Over the lanes of one column.
template <int kColumns, int kVec>
__device__ __forceinline__ void sum_over_positions(float (&x)[kVec]) {
#pragma unroll
  for (int offset = kColumns; offset < kWarpSize; offset *= 2) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) x[j] += __shfl_xor_sync(0xffffffffu, x[j], offset);
  }
}

// A thread's column of a block's tile, and where its rows are.
template <typename T, int kVec, int kColumns>
struct ColumnOfTile {
  static constexpr int kChannels = kVec * kColumns, kPositions = kWarpSize / kColumns;
  int warp, position, column;
  bool is_channel;

  // first_channel: the tile's.
  __device__ __forceinline__ ColumnOfTile(int first_channel, int num_channels)
      : warp(threadIdx.x / kWarpSize), position(threadIdx.x % kWarpSize / kColumns), column(threadIdx.x % kColumns * kVec),
        is_channel(first_channel + column < num_channels) {}

  // Mean and rstd of a row that this warp has copied; `row` is at position 0 of the tile's row.
  __device__ __forceinline__ void take_statistics(const Problem& p, const T* row, const float (&poison)[kVec], float2* statistics) const {
    Vec<T, kVec> held;
    float pivot[kVec], mean[kVec] = {}, square[kVec] = {};
    held.zero();
    if (position < p.w.input) held.load(row + position * kChannels + column);
#pragma unroll
    for (int j = 0; j < kVec; ++j) pivot[j] = __shfl_sync(0xffffffffu, held[j], column / kVec);
#pragma unroll 4
    for (int w = position; w < p.w.input; w += kPositions) {
      held.load(row + w * kChannels + column);
#pragma unroll
      for (int j = 0; j < kVec; ++j) mean[j] = fmaf(held[j] - pivot[j], p.inverse_group_size, mean[j]);
    }
    sum_over_positions<kColumns>(mean);
#pragma unroll 4
    for (int w = position; w < p.w.input; w += kPositions) {
      held.load(row + w * kChannels + column);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float centred = held[j] - pivot[j] - mean[j];
        square[j] = fmaf(centred, centred, square[j]);
      }
    }
    sum_over_positions<kColumns>(square);
    if (position != 0) return;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      statistics[column + j] = make_float2(pivot[j] + mean[j], rsqrtf(fmaf(square[j], p.inverse_group_size, p.eps)) + poison[j]);
    }
  }

  // Starts copying a row; `from` is at the row's position 0 and the tile's first channel.
  __device__ __forceinline__ void copy_row(const Problem& p, const T* from, T* row) const {
    if (!is_channel) return;
#pragma unroll 4
    for (int w = position; w < p.w.input; w += kPositions) {
      const T* own = from + static_cast<int64_t>(w) * p.num_channels + column;
      T* to = row + w * kChannels + column;
      if constexpr (kVec * sizeof(T) == kVecBytes) copy_async_16(to, own);
      else *to = *own;
    }
  }
};

}  // namespace fxfuse::norm_pool_gelu
