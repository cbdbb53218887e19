// norm_pool_gelu_input_gradient on channels_last_3d input: the rows of some windows in shared memory, 32 to 64 bytes of channels wide.
//
// A warp holds kColumns columns of kVec channels at 32 / kColumns neighbouring positions, so that all its accesses are runs of whole sectors
// in global memory and free of bank conflicts in shared memory. It copies whole rows and takes their statistics; then threads take the
// windows' gradients, which need the rows of other warps; then the warp turns its rows into their gradients, straight to memory. In place
// is safe: nobody else reads these rows.
#pragma once

#include "norm_pool_gelu_input_gradient_column.cuh"
#include "norm_pool_gelu_input_gradient_problem.cuh"

namespace fxfuse::norm_pool_gelu {

constexpr int kGradientThreads = 128, kGradientWarps = kGradientThreads / kWarpSize;

// Byte offsets into a block's shared memory.
struct GradientShared {
  int64_t values, statistics, grads, norm_params, norm_sums, total;
};

struct GradientChannelsGrid {
  int windows;              // output rows of a block at a time, all of one sample
  int steps;                // times a block takes so many
  int windows_per_sample;
  GradientShared shared;
  FastDiv by_channel_tile, by_chunk, by_oh, by_window_rows, by_out_w, by_kernel_h;
};

// From a window's rows in shared memory to its gradients g, and their part of of_norm. `rows` and `statistics` are those of its first row,
// `grads` holds grad and gets g. Lanes without a window take part in the shuffles.
template <typename T, int kVec, int kColumns, bool kPairs>
__device__ __forceinline__ void gradient_of_window(const GradientProblem& gradient, const ColumnOfTile<T, kVec, kColumns>& own, const T* rows,
                                                   const float2* statistics, int ow, bool is_window, const float* weight, const float* bias,
                                                   float* grads, float* norm_sums) {
  constexpr int kChannels = kVec * kColumns;
  const Problem& p = gradient.forward;
  const int kernel_w = kPairs ? 2 : p.w.kernel, window_rows = p.window_rows(), row_size = p.w.input * kChannels;
  const auto sum_rows = [&](int w, float(&sum)[kVec]) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum[j] = 0.f;
    if (!is_window) return;
#pragma unroll 2
    for (int r = 0; r < window_rows; ++r) {
      Vec<T, kVec> held;
      held.load(rows + r * row_size + w * kChannels + own.column);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float2 moments = statistics[r * kChannels + own.column + j];
        sum[j] = fmaf(held[j] - moments.x, moments.y, sum[j]);
      }
    }
  };
  const int first_w = ow * kernel_w;
  float pooled[kVec] = {}, sums[kPairs ? 2 : 1][kVec];
#pragma unroll(kPairs ? 2 : 1)
  for (int i = 0; i < kernel_w; ++i) {
    float(&sum)[kVec] = sums[kPairs ? i : 0];
    sum_rows(first_w + i, sum);
    const float at_w = is_window ? weight[first_w + i] : 0.f, shift = is_window ? window_rows * bias[first_w + i] : 0.f;
#pragma unroll
    for (int j = 0; j < kVec; ++j) pooled[j] += fmaf(at_w, sum[j], shift);
  }
  float g[kVec] = {}, g_of_channels = 0.f;
  if (is_window) load_staged(grads + own.column, g);
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    g[j] *= gradient.gelu_derivative(pooled[j] * p.inverse_divisor) * p.inverse_divisor;
    g_of_channels += own.is_channel && is_window ? g[j] : 0.f;
  }
  if (is_window) store_as(grads + own.column, g);
  if (!gradient.norm_parts) return;
#pragma unroll(kPairs ? 2 : 1)
  for (int i = 0; i < kernel_w; ++i) {
    float(&sum)[kVec] = sums[kPairs ? i : 0];
    if constexpr (!kPairs) sum_rows(first_w + i, sum);
    float of_norm[2] = {0.f, g_of_channels * window_rows};
#pragma unroll
    for (int j = 0; j < kVec; ++j) of_norm[0] += own.is_channel && is_window ? g[j] * sum[j] : 0.f;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int offset = 1; offset < kColumns; offset *= 2) of_norm[k] += __shfl_xor_sync(0xffffffffu, of_norm[k], offset);
      if (is_window && own.column == 0) norm_sums[k * p.w.input + first_w + i] += of_norm[k];
    }
  }
}

// Turns a row in shared memory into its gradient at `to`, and adds it to `of_channel`. grads: g of the row's windows.
template <typename T, int kVec, int kColumns, bool kPairs>
__device__ __forceinline__ void store_gradient_of_row(const GradientProblem& gradient, const ColumnOfTile<T, kVec, kColumns>& own, const T* row,
                                                      const float2* statistics, const float* weight, const float* grads, T* to,
                                                      float (&of_channel)[kVec]) {
  constexpr int kChannels = kVec * kColumns;
  const Problem& p = gradient.forward;
  float2 moments[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) moments[j] = statistics[own.column + j];
  // u = weight * g and xhat at a position.
  const auto read = [&](int w, float(&u)[kVec], float(&xhat)[kVec]) {
    const int ow = kPairs ? w / 2 : gradient.window_of(w);
#pragma unroll
    for (int j = 0; j < kVec; ++j) u[j] = 0.f;
    if (ow < p.w.output) load_staged(grads + ow * kChannels + own.column, u);
    Vec<T, kVec> held;
    held.load(row + w * kChannels + own.column);
    const float at_w = weight[w];
#pragma unroll
    for (int j = 0; j < kVec; ++j) u[j] *= at_w, xhat[j] = (held[j] - moments[j].x) * moments[j].y;
  };
  float mean[kVec] = {}, along[kVec] = {};  // of u, and of u * xhat
#pragma unroll 2
  for (int w = own.position; w < p.w.input; w += own.kPositions) {
    float u[kVec], xhat[kVec];
    read(w, u, xhat);
#pragma unroll
    for (int j = 0; j < kVec; ++j) mean[j] += u[j], along[j] = fmaf(u[j], xhat[j], along[j]);
  }
  sum_over_positions<kColumns>(mean);
  sum_over_positions<kColumns>(along);
#pragma unroll
  for (int j = 0; j < kVec; ++j) mean[j] *= p.inverse_group_size, along[j] *= -p.inverse_group_size;
  if (!own.is_channel) return;
#pragma unroll 2
  for (int w = own.position; w < p.w.input; w += own.kPositions) {
    float u[kVec], xhat[kVec];
    read(w, u, xhat);
    Vec<T, kVec> out;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float value = moments[j].y * fmaf(xhat[j], along[j], u[j] - mean[j]);
      of_channel[j] += value;
      out.value[j] = from_float<T>(value);
    }
    out.store(to + static_cast<int64_t>(w) * p.num_channels + own.column);
  }
}

// A block's sums over its channels and rows. scratch: kGradientWarps rows of the tile's channels. Channel parts are [N, chunks, C].
template <typename T, int kVec, int kColumns>
__device__ __forceinline__ void store_parts(const GradientProblem& gradient, const ColumnOfTile<T, kVec, kColumns>& own, float (&of_channel)[kVec],
                                            float* scratch, int64_t first_channel_part, int first_channel, const float* norm_sums, int windows) {
  constexpr int kChannels = kVec * kColumns;
  const Problem& p = gradient.forward;
  sum_over_positions<kColumns>(of_channel);
  if (own.position == 0) store_as(scratch + own.warp * kChannels + own.column, of_channel);
  __syncthreads();
  const int channel = threadIdx.x;
  if (gradient.channel_parts && channel < kChannels && first_channel + channel < p.num_channels) {
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < kGradientWarps; ++warp) total += scratch[warp * kChannels + channel];
    gradient.channel_parts[first_channel_part + channel] = total;
  }
  for (int i = threadIdx.x; gradient.norm_parts && i < 2 * p.w.input; i += kGradientThreads) {
    float total = 0.f;
    for (int window = 0; window < windows; ++window) total += norm_sums[window * 2 * p.w.input + i];
    gradient.norm_parts[static_cast<int64_t>(blockIdx.x) * 2 * p.w.input + i] = total;
  }
}

// kPairs: windows take two positions along w.
template <typename T, int kVec, int kColumns, bool kPairs>
__global__ void __launch_bounds__(kGradientThreads)
    gradient_channels_last_kernel(const __grid_constant__ GradientProblem gradient, const __grid_constant__ GradientChannelsGrid grid) {
  using Own = ColumnOfTile<T, kVec, kColumns>;
  constexpr int kChannels = Own::kChannels;
  extern __shared__ __align__(16) float shared[];
  char* const bytes = reinterpret_cast<char*>(shared);
  const Problem& p = gradient.forward;
  T* values = reinterpret_cast<T*>(bytes + grid.shared.values);
  float2* statistics = reinterpret_cast<float2*>(bytes + grid.shared.statistics);
  float *grads = reinterpret_cast<float*>(bytes + grid.shared.grads), *weight = reinterpret_cast<float*>(bytes + grid.shared.norm_params);
  float *bias = weight + p.w.input, *norm_sums = reinterpret_cast<float*>(bytes + grid.shared.norm_sums);
  const int window_rows = p.window_rows(), row_size = p.w.input * kChannels;

  uint32_t channel_tile, chunk;
  const int64_t n = grid.by_chunk.divide(grid.by_channel_tile.divide(blockIdx.x, channel_tile), chunk);
  const int first_channel = channel_tile * kChannels;
  const Own own(first_channel, p.num_channels);
  const int64_t sample = n * p.volume_size * p.num_channels + first_channel;
  float poison[kVec], of_channel[kVec] = {};
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const float constant = channel_constant<T>(p, n, min(first_channel + own.column + j, p.num_channels - 1));
    poison[j] = constant - constant;
  }
  stage_raw_norm_params<T>(p, weight, bias);
  for (int i = threadIdx.x; i < grid.windows * 2 * p.w.input; i += kGradientThreads) norm_sums[i] = 0.f;

  const auto row_at = [&](int first_window, int row) -> int64_t {
    uint32_t r, oh, h;
    const uint32_t od = grid.by_oh.divide(first_window + grid.by_window_rows.divide(row, r), oh);
    const uint32_t d = grid.by_kernel_h.divide(r, h);
    return sample + (static_cast<int64_t>(od * p.d.kernel + d) * p.h.input + oh * p.h.kernel + h) * p.next_row;
  };
#pragma unroll 1
  for (int step = 0; step < grid.steps; ++step) {
    const int first_window = (chunk * grid.steps + step) * grid.windows, num_windows = min(grid.windows, grid.windows_per_sample - first_window);
    if (num_windows <= 0) break;
    const int num_rows = num_windows * window_rows, num_outputs = num_windows * p.w.output;
    for (int row = own.warp; row < num_rows; row += kGradientWarps) {
      own.copy_row(p, static_cast<const T*>(p.input) + row_at(first_window, row), values + row * row_size);
    }
    const int64_t channel_stride = static_cast<int64_t>(grid.windows_per_sample) * p.w.output;
    for (int i = own.warp * Own::kPositions + own.position; i < num_outputs; i += kGradientWarps * Own::kPositions) {
      const int64_t at = (n * p.num_channels + first_channel + own.column) * channel_stride + static_cast<int64_t>(first_window) * p.w.output + i;
      float loaded[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) loaded[j] = own.is_channel ? gradient.grad.at<T>(at + j * channel_stride) : 0.f;
      store_as(grads + i * kChannels + own.column, loaded);
    }
    wait_for_copies();
    for (int row = own.warp; row < num_rows; row += kGradientWarps) {
      own.take_statistics(p, values + row * row_size, poison, statistics + row * kChannels);
    }
    __syncthreads();
    for (int first = own.warp * Own::kPositions; first < num_outputs; first += kGradientWarps * Own::kPositions) {
      const int i = first + own.position;
      const bool is_window = i < num_outputs;
      uint32_t ow;
      const int window = grid.by_out_w.divide(is_window ? i : 0, ow), row = window * window_rows;
      gradient_of_window<T, kVec, kColumns, kPairs>(gradient, own, values + row * row_size, statistics + row * kChannels, ow, is_window, weight, bias,
                                                    grads + i * kChannels, norm_sums + window * 2 * p.w.input);
    }
    __syncthreads();
    for (int row = own.warp; row < num_rows; row += kGradientWarps) {
      uint32_t r;
      const int window = grid.by_window_rows.divide(row, r);
      store_gradient_of_row<T, kVec, kColumns, kPairs>(gradient, own, values + row * row_size, statistics + row * kChannels, weight,
                                                       grads + window * p.w.output * kChannels,
                                                       static_cast<T*>(gradient.of_input) + row_at(first_window, row), of_channel);
    }
    __syncthreads();
  }
  const int64_t part = (n * grid.by_chunk.divisor + chunk) * p.num_channels + first_channel;
  store_parts(gradient, own, of_channel, shared, part, first_channel, norm_sums, grid.windows);
}

}  // namespace fxfuse::norm_pool_gelu
