// conv_gelu_pool, gradients of weight and bias: the sums of all shares' partial sums, in a fixed order.
#pragma once

#include "conv_gelu_pool_gradient.cuh"

namespace fxfuse::conv_gelu_pool {

struct GradientSums {
  ConvShape shape;
  GradientLines lines;
  const float* partials;
  int shares, row_tiles;
  View of_weight;
  void* of_bias;  // or null
  bool bias_is_float;
};

constexpr int kSumSlices = 8;

// A block sums one entry of a row tile and group, slice by slice, in a fixed order.
template <typename T>
__global__ void __launch_bounds__(kSumSlices* kHopperThreads) sum_of_shares(const __grid_constant__ GradientSums sums) {
  __shared__ float slices[kSumSlices][kHopperThreads];
  const int thread = threadIdx.x % kHopperThreads, slice = threadIdx.x / kHopperThreads;
  const int entry = blockIdx.x % kGradientEntries, place = blockIdx.x / kGradientEntries;
  const int64_t places = int64_t{sums.row_tiles} * sums.lines.groups, pitch = places * kGradientEntries * kHopperThreads;
  const float* const from = sums.partials + (int64_t{place} * kGradientEntries + entry) * kHopperThreads + thread;
  wait_for_previous_kernel();
  float sum = 0.f;
#pragma unroll 4
  for (int share = slice; share < sums.shares; share += kSumSlices) sum += from[share * pitch];
  slices[slice][thread] = sum;
  __syncthreads();
  if (slice != 0) return;
#pragma unroll
  for (int i = 1; i < kSumSlices; ++i) sum += slices[i][thread];

  const int row_tile = place / sums.lines.groups, group = place % sums.lines.groups, lane = thread % kWarpSize;
  const bool is_bias = entry >= kAccumulators;
  const int half = is_bias ? entry - kAccumulators : entry / 2 % 2;
  const int channel_out = row_tile * kHopperRows + thread / kWarpSize * 16 + half * 8 + lane / 4;
  if (channel_out >= sums.shape.channels_out) return;
  if (is_bias) {
    if (!sums.of_bias || group != 0 || lane % 4 != 0) return;
    if (sums.bias_is_float) static_cast<float*>(sums.of_bias)[channel_out] = sum;
    else static_cast<T*>(sums.of_bias)[channel_out] = from_float<T>(sum);
    return;
  }
  const int of_line = 4 * sums.lines.wide, line_idx = group * sums.lines.per_group() + entry / of_line;
  const Line line(sums.shape, sums.lines.wide, line_idx);
  const int channel_in = line.chunk * 8 + lane % 4 * 2 + entry % 2, w = line.w + entry % of_line / 4;
  if (line_idx >= sums.lines.lines || channel_in >= sums.shape.channels_in) return;
  const View& to = sums.of_weight;
  static_cast<T*>(const_cast<void*>(to.data))[channel_out * to.outer + channel_in * to.channel + line.d * to.pixel[0] + line.h * to.pixel[1] +
                                              w * to.pixel[2]] = from_float<T>(sum);
}

}  // namespace fxfuse::conv_gelu_pool
