// conv_gelu_pool: from accumulators to the mean. Sums of GELU over a thread's pixels, over a block, and over the parts of an image in a
// second small kernel, each in a fixed order: the result is the same bit for bit in every run.
#pragma once

#include "conv_gelu_pool_problem.cuh"

namespace fxfuse::conv_gelu_pool {

// The sum of gelu(x(i)) for i < kCount. gelu_unguarded makes nan of +inf, where eager's result is nan only if some x is nan or -inf. So a
// sum that came out nan looks at its x again: without such a one it is inf. (It cannot be inf - inf: no GELU is -inf.)
template <Gelu form, int kCount, typename F>
__device__ __forceinline__ float sum_of_gelu(F&& x) {
  const float kInf = __int_as_float(0x7f800000);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += gelu_unguarded<form>(x(i));
  if constexpr (form != Gelu::Erf && form != Gelu::Tanh) {
    if (sum != sum) {
      bool all_defined = true;
#pragma unroll
      for (int i = 0; i < kCount; ++i) all_defined &= x(i) > -kInf;
      if (all_defined) sum = kInf;
    }
  }
  return sum;
}

// Sums over the 4 quad lanes that hold a row, then over the block's warps along the pixels, into partials[row]. `rows` of shared memory
// holds kRows * kWarpsN floats, free again when the call returns.
template <int kRows, int kWarpsN>
__device__ __forceinline__ void store_row_sums(float* rows, float* partials, int channels_left) {
  __syncthreads();
  for (int row = threadIdx.x; row < kRows && row < channels_left; row += blockDim.x) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kWarpsN; ++i) sum += rows[i * kRows + row];
    partials[row] = sum;
  }
}

constexpr int kMeanChannels = 32, kMeanThreads = 1024;

// out[n, c] = scale * the sum of partials[n, part, c] over the parts; a block makes 32 channels of one image, its warps share the parts.
template <typename Out>
__global__ void __launch_bounds__(kMeanThreads) mean_of_parts(const float* partials, Out* out, int parts, int channels, float scale) {
  __shared__ float sums[kMeanThreads / kWarpSize][kMeanChannels];
  const int lane = threadIdx.x % kWarpSize, warp_idx = threadIdx.x / kWarpSize, num_warps = blockDim.x / kWarpSize;
  const int tiles = (channels + kMeanChannels - 1) / kMeanChannels;
  const int64_t image = blockIdx.x / tiles;
  const int channel = blockIdx.x % tiles * kMeanChannels + lane;
  float sum = 0.f;
  if (channel < channels) {
#pragma unroll 4
    for (int part = warp_idx; part < parts; part += num_warps) sum += partials[(image * parts + part) * channels + channel];
  }
  sums[warp_idx][lane] = sum;
  __syncthreads();
  if (warp_idx != 0 || channel >= channels) return;
  for (int i = 1; i < num_warps; ++i) sum += sums[i][lane];
  out[image * channels + channel] = from_float<Out>(sum * scale);
}

}  // namespace fxfuse::conv_gelu_pool
