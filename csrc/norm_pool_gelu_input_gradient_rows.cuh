// norm_pool_gelu_input_gradient on contiguous input, W up to 1024: 2^k lanes hold a window's rows in registers.
//
// A group of `lanes` lanes takes an output row: it reads the window's d * h input rows, takes their statistics by shuffles, sums the normalised
// rows for the pool, and has all that their gradients need: y is read once and its gradient written once. Windows with more rows than a
// thread has registers for are read twice, the second time from L2. Pairs along w are pooled in registers where lanes are full; other
// windows cross lanes through shared memory.
//
// In place is safe: a thread writes what it alone has read, behind the statistics that need it.
#pragma once

#include "norm_pool_gelu_input_gradient_lanes.cuh"
#include "norm_pool_gelu_input_gradient_problem.cuh"

namespace fxfuse::norm_pool_gelu {

struct GradientRowsGrid {
  uint32_t lanes, log2_lanes;
  uint32_t num_rows;  // output rows
  int steps;          // output rows of a group
  FastDiv by_oh, by_od, by_c;
};

// The gradients of the pairs that a lane holds where kExact.
template <int kVec, int kVecs>
using PairGrads = float[kVecs][kVec > 1 ? kVec / 2 : 1];

// Every window's g, for the elements of a lane: from the sum of the window's normalised rows. z, g: a group's rows of shared memory.
template <typename T, int kVec, int kVecs, bool kExact>
__device__ __forceinline__ void gradient_of_pool(const GradientProblem& gradient, const LaneOfRow<kVec, kVecs, kExact>& lane, uint32_t lanes,
                                                 int64_t out_row, const float* weight, const float* bias, const PairGrads<kVec, kVecs>& grads,
                                                 const float (&sum)[kVecs][kVec], float* z, float* g, float (&of_pool)[kVecs][kVec]) {
  const Problem& p = gradient.forward;
  const float window_rows = p.window_rows();
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    if (!lane.holds(v)) continue;
    float own_weight[kVec], affine[kVec];
    load_staged(weight + lane.w(v), own_weight);
    load_staged(bias + lane.w(v), affine);
#pragma unroll
    for (int j = 0; j < kVec; ++j) affine[j] = fmaf(sum[v][j], own_weight[j], window_rows * affine[j]);
    if constexpr (kExact) {
#pragma unroll
      for (int j = 0; j < kVec; j += 2) {
        const float pooled = (affine[j] + affine[j + 1]) * p.inverse_divisor;
        of_pool[v][j] = of_pool[v][j + 1] = gradient.gelu_derivative(pooled) * p.inverse_divisor * grads[v][j / 2];
      }
    } else {
      store_as(z + lane.w(v), affine);
    }
  }
  if constexpr (kExact) return;
  __syncwarp();
  for (int ow = lane.first_w / kVec; ow < p.w.output; ow += lanes) {
    float pooled = 0.f;
#pragma unroll 1
    for (int i = 0; i < p.w.kernel; ++i) pooled += z[ow * p.w.kernel + i];
    g[ow] = gradient.gelu_derivative(pooled * p.inverse_divisor) * p.inverse_divisor * gradient.grad.at<T>(out_row + ow);
  }
  __syncwarp();
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const int ow = gradient.window_of(lane.w(v) + j);
      of_pool[v][j] = ow < p.w.output ? g[ow] : 0.f;
    }
  }
}

// A block's sums for of_norm, over its groups in their order. mine: [2][W] of this thread's group in shared memory; the first group's is `rows`.
template <int kVec, int kVecs, bool kExact>
__device__ __forceinline__ void store_norm_parts(const LaneOfRow<kVec, kVecs, kExact>& lane, const float (&of_weight)[kVecs][kVec],
                                                 const float (&of_bias)[kVecs][kVec], const float* rows, float* mine, int groups, float* parts) {
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    if (!lane.holds(v)) continue;
    store_as(mine + lane.w(v), of_weight[v]);
    store_as(mine + lane.width + lane.w(v), of_bias[v]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * lane.width; i += kRowsThreads) {
    float total = 0.f;
#pragma unroll 4
    for (int group = 0; group < groups; ++group) total += rows[group * 2 * lane.width + i];
    parts[static_cast<int64_t>(blockIdx.x) * 2 * lane.width + i] = total;
  }
}

// kExact: windows take pairs along w, and every lane holds kVecs vectors of a row. kResident: a window has at most kRows rows.
// kAddend: the addend varies within a channel.
template <typename T, int kVec, int kVecs, int kRows, bool kExact, bool kResident, bool kAddend>
__global__ void __launch_bounds__(kRowsThreads, 1)
    gradient_rows_kernel(const __grid_constant__ GradientProblem gradient, const __grid_constant__ GradientRowsGrid grid) {
  extern __shared__ __align__(16) float shared[];
  const Problem& p = gradient.forward;
  const int group = threadIdx.x >> grid.log2_lanes, groups = kRowsThreads >> grid.log2_lanes, window_rows = p.window_rows();
  float *norm_weight = shared, *norm_bias = shared + p.w.input, *group_rows = shared + 2 * p.w.input;
  float* mine = group_rows + group * 2 * p.w.input;
  const LaneOfRow<kVec, kVecs, kExact> lane{static_cast<int>(threadIdx.x & (grid.lanes - 1)) * kVec, static_cast<int>(grid.lanes) * kVec, p.w.input};
  stage_raw_norm_params<T>(p, norm_weight, norm_bias);
  __syncthreads();

  float of_weight[kVecs][kVec] = {}, of_bias[kVecs][kVec] = {};
#pragma unroll 1
  for (int step = 0; step < grid.steps; ++step) {
    const uint32_t first_row = (blockIdx.x * grid.steps + step) * groups;
    if (first_row >= grid.num_rows) break;
    const bool live = first_row + group < grid.num_rows;  // spare groups redo row 0 and keep nothing
    const uint32_t row_idx = live ? first_row + group : 0;
    uint32_t oh, od, c;
    const uint32_t volume_idx = grid.by_od.divide(grid.by_oh.divide(row_idx, oh), od);
    const int64_t n = grid.by_c.divide(volume_idx, c);
    Channel channel{n, c, 0.f};
    if constexpr (kAddend) channel.constant = channel_constant<T>(p, n, c);
    const T* volume = static_cast<const T*>(p.input) + volume_idx * p.volume_size + lane.first_w;

    NormalisedRows<T, kVec, kVecs, kRows, kExact, kAddend> rows;
    const int64_t out_row = static_cast<int64_t>(row_idx) * p.w.output;
    PairGrads<kVec, kVecs> grads;
    float sum[kVecs][kVec] = {}, poison = 0.f;
    WindowRows<T> at(p, volume, od, oh);
    for (int r = 0; r < window_rows; r += kRows) {
      rows.template load<!kResident>(p, lane, at, window_rows - r, channel, [&] {
        if constexpr (kExact) {
#pragma unroll
          for (int v = 0; v < kVecs; ++v) gradient.grad.load<T>(out_row + lane.w(v) / 2, grads[v]);
        }
        if constexpr (!kAddend) {
          const float constant = channel_constant<T>(p, n, c);
          poison = constant - constant;
        }
      });
      rows.normalise(p, lane, grid.lanes, poison);
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
#pragma unroll
          for (int j = 0; j < kVec; ++j) sum[v][j] += rows.xhat[u][v][j];
        }
      }
      if constexpr (kResident) break;
    }

    float u_row[kVecs][kVec] = {}, mean[1] = {};
    gradient_of_pool<T>(gradient, lane, grid.lanes, out_row, norm_weight, norm_bias, grads, sum, mine, mine + p.w.input, u_row);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      if (!lane.holds(v)) continue;
      float weight[kVec];
      load_staged(norm_weight + lane.w(v), weight);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        of_weight[v][j] += live ? u_row[v][j] * sum[v][j] : 0.f;
        of_bias[v][j] += live ? u_row[v][j] * window_rows : 0.f;
        u_row[v][j] *= weight[j];
        mean[0] = fmaf(u_row[v][j], p.inverse_group_size, mean[0]);
      }
    }
    sum_over_lanes(mean, grid.lanes);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) u_row[v][j] -= mean[0];
    }

    float of_channel[1] = {};
    WindowRows<T> again(p, volume, od, oh);
    for (int r = 0; r < window_rows; r += kRows) {
      if constexpr (!kResident) {
        rows.template load<true>(p, lane, again, window_rows - r, channel, [] {});
        rows.normalise(p, lane, grid.lanes, poison);
      }
      float along[kRows];  // mean(u * xhat)
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        along[u] = 0.f;
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
#pragma unroll
          for (int j = 0; j < kVec; ++j) along[u] = fmaf(u_row[v][j], rows.xhat[u][v][j], along[u]);
        }
      }
      sum_over_lanes(along, grid.lanes);
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        along[u] *= -p.inverse_group_size;
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
          if (!rows.from[u] || !lane.holds(v)) continue;
          Vec<T, kVec> of_row;
#pragma unroll
          for (int j = 0; j < kVec; ++j) {
            const float value = rows.rstd[u] * fmaf(rows.xhat[u][v][j], along[u], u_row[v][j]);
            of_channel[0] += value;
            of_row.value[j] = from_float<T>(value);
          }
          if (live) of_row.store(static_cast<T*>(gradient.of_input) + (rows.from[u] - static_cast<const T*>(p.input)) + v * lane.vec_stride);
        }
      }
      if constexpr (kResident) break;
    }
    if (!gradient.channel_parts) continue;
    sum_over_lanes(of_channel, grid.lanes);
    if (live && lane.first_w == 0) gradient.channel_parts[row_idx] = of_channel[0];
  }
  if (gradient.norm_parts) store_norm_parts(lane, of_weight, of_bias, group_rows, mine, groups, gradient.norm_parts);
}

}  // namespace fxfuse::norm_pool_gelu
