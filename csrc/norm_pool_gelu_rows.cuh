// norm_pool_gelu on contiguous input, norm over W, W up to 1024: 2^k lanes hold a row in registers.
//
// A group of `lanes` lanes makes one output row. It reads the window's d * h input rows, one or two at a time, takes each row's
// statistics by shuffles and adds the normalised row to its accumulators, so that pooling over d and h never leaves a thread. Pairs
// along w are pooled in registers too. Any other window along w crosses lanes through W floats of shared memory, where every kernel,
// stride and padding is a plain loop. Windows that overlap read a row again, from L2.
#pragma once

#include "norm_pool_gelu_problem.cuh"

namespace fxfuse::norm_pool_gelu {

constexpr int kRowsThreads = 256;

enum class RowsMode {
  General,
  Pairs,  // every window is whole and takes two elements along w, side by side
  Exact,  // the same, and every lane holds kVecs vectors of the row
};

struct RowsGrid {
  uint32_t lanes, log2_lanes;
  uint32_t num_rows;       // output rows of this launch
  int64_t first_n;         // its first sample
  int64_t first_volume;    // (n, c)
  int64_t first_out_row;
  FastDiv by_oh, by_od, by_c;
};

struct Channel {
  int64_t n;
  uint32_t c;
  float constant;
};

template <typename T>
__device__ __forceinline__ Channel channel_of(const Problem& p, const RowsGrid& grid, uint32_t row_idx) {
  Channel channel;
  uint32_t od, oh;
  channel.n = grid.first_n + grid.by_c.divide(grid.by_od.divide(grid.by_oh.divide(row_idx, oh), od), channel.c);
  channel.constant = channel_constant<T>(p, channel.n, channel.c);
  return channel;
}

// A thread's part of a block's look at all channels' constants: true if one may be inf or nan. One look a block costs less than every
// group's own look at its channel.
template <typename T>
__device__ __forceinline__ bool may_be_infinite(const Problem& p) {
  if (!p.has_constant) return !isfinite(p.addend_value);
  if (p.addend_strides.n != 0) return true;
  bool found = false;
#pragma unroll 1
  for (int c = threadIdx.x; c < p.num_channels; c += kRowsThreads) found |= !isfinite(channel_constant<T>(p, 0, c));
  return found;
}

template <int kRows>
__device__ __forceinline__ void sum_over_lanes(float (&x)[kRows], uint32_t lanes) {
  for (uint32_t offset = lanes >> 1; offset > 0; offset >>= 1) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) x[u] += __shfl_xor_sync(0xffffffffu, x[u], offset);
  }
}

// Element (v * lanes + lane) * kVec + j of a row is value j of vector v of its lane. kRows rows are loaded before the first is used.
// kAddend: the addend varies within a channel.
template <typename T, int kVec, int kVecs, int kRows, RowsMode kMode, bool kAddend>
__global__ void __launch_bounds__(kRowsThreads)
    rows_kernel(const __grid_constant__ Problem p, const __grid_constant__ RowsGrid grid) {
  constexpr bool kPairs = kMode != RowsMode::General, kExact = kMode == RowsMode::Exact;
  extern __shared__ __align__(16) float shared[];
  float *norm_weight = shared, *norm_bias = shared + p.w.input;

  const int first_w = (threadIdx.x & (grid.lanes - 1)) * kVec, vec_stride = grid.lanes * kVec;
  const int group = threadIdx.x >> grid.log2_lanes;
  const uint32_t group_idx = blockIdx.x * (kRowsThreads >> grid.log2_lanes) + group;
  const bool live = group_idx < grid.num_rows;  // the last block's spare groups redo row 0 and store nothing
  const uint32_t row_idx = live ? group_idx : 0;
  uint32_t oh, od;
  const uint32_t volume_idx = grid.by_od.divide(grid.by_oh.divide(row_idx, oh), od);
  Channel channel;
  if constexpr (kAddend) channel = channel_of<T>(p, grid, row_idx);
  const T* volume = static_cast<const T*>(p.input) + (grid.first_volume + volume_idx) * p.volume_size + first_w;
  bool holds[kVecs];
#pragma unroll
  for (int v = 0; v < kVecs; ++v) holds[v] = kExact || v * vec_stride + first_w < p.w.input;

  float sum[kVecs][kVec] = {};
  float num_summed = 0.f;
  const int window_rows = p.window_rows();
  WindowRows<T> at(p, volume, od, oh);
  for (int r = 0; r < window_rows; r += kRows) {
    Vec<T, kVec> raw[kRows][kVecs];
    float y[kRows][kVecs][kVec], mean[kRows], square[kRows];
    bool inside[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      inside[u] = (u == 0 || r + u < window_rows) && (kPairs || at.inside(p));
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        raw[u][v].zero();
        if (inside[u] && holds[v]) raw[u][v].load_streaming(at.row + v * vec_stride);
#pragma unroll
        for (int j = 0; kAddend && j < kVec; ++j) {
          y[u][v][j] = 0.f;
          if (inside[u] && holds[v]) y[u][v][j] = channel.constant + element_addend<T>(p, channel.n, channel.c, at.d, at.h, v * vec_stride + first_w + j);
        }
      }
      at.next(p);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          if constexpr (kAddend) y[u][v][j] += raw[u][v][j];
          else y[u][v][j] = raw[u][v][j];
        }
      }
      if constexpr (std::is_same_v<T, float>) {
        // The row less its first element: the mean of what is left is small, and so is its rounding error (1e-3 at mean 1e4).
        const float pivot = __shfl_sync(0xffffffffu, y[u][0][0], 0, grid.lanes);
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
#pragma unroll
          for (int j = 0; j < kVec; ++j) y[u][v][j] = holds[v] ? y[u][v][j] - pivot : 0.f;
        }
      }
      mean[u] = 0.f;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) mean[u] = fmaf(y[u][v][j], p.inverse_group_size, mean[u]);
      }
    }
    sum_over_lanes(mean, grid.lanes);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      square[u] = 0.f;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        float partial = 0.f;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          y[u][v][j] -= mean[u];
          partial = fmaf(y[u][v][j], y[u][v][j], partial);
        }
        square[u] += holds[v] ? partial : 0.f;
      }
    }
    sum_over_lanes(square, grid.lanes);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (!inside[u]) continue;
      const float rstd = rsqrtf(fmaf(square[u], p.inverse_group_size, p.eps));
      num_summed += 1.f;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[v][j] = fmaf(y[u][v][j], rstd, sum[v][j]);
      }
    }
  }

  // Not before the loop: these loads would go out before the input's, and a thread would wait for them first.
  stage_norm_params<T>(p, kPairs, norm_weight, norm_bias);
  const bool suspect = !kAddend && may_be_infinite<T>(p);
  if (__syncthreads_or(suspect)) {
    const float constant = channel_of<T>(p, grid, row_idx).constant, poison = constant - constant;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum[v][j] += num_summed > 0.f ? poison : 0.f;
    }
  }
  float* summed_row = shared + (2 + group) * p.w.input;
  const int64_t out_row = (grid.first_out_row + row_idx) * p.w.output;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    if (!holds[v]) continue;
    const int w = v * vec_stride + first_w;
    float weight[kVec];
    load_staged(norm_weight + w, weight);
    if constexpr (kPairs) {
      float out[kVec / 2];
      load_staged(norm_bias + w / 2, out);
#pragma unroll
      for (int o = 0; o < kVec / 2; ++o) {
        out[o] = fmaf(sum[v][2 * o], weight[2 * o], fmaf(sum[v][2 * o + 1], weight[2 * o + 1], out[o]));
      }
      apply_gelu<T>(p, out);
      if (live) store_output<T>(p, p.output, out_row + w / 2, out);
    } else {
      float bias[kVec];
      load_staged(norm_bias + w, bias);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum[v][j] = fmaf(sum[v][j], weight[j], num_summed * bias[j]);
      store_as(summed_row + w, sum[v]);
    }
  }
  if constexpr (kPairs) return;
  __syncwarp();
  if (!live) return;
  const float divisor_of_rows = rows_divisor(p, od, oh);
  for (int ow = first_w / kVec; ow < p.w.output; ow += grid.lanes) {
    store_gelu<T>(p, out_row + ow, pool_row(p, summed_row, divisor_of_rows, ow));
  }
}

}  // namespace fxfuse::norm_pool_gelu
