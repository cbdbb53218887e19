// conv_norm_pool_gelu, gradients of weight and norm_weight: the sums of all warpgroups' partial sums, in a fixed order.
#pragma once

#include "conv_norm_pool_gelu_gradient.cuh"

namespace fxfuse::conv_norm_pool_gelu {

constexpr int kSumSlices = 8;

// The sum over warpgroups [first, first + count) of one value, by the 8 slices of a block in a fixed order; slice 0 gets it.
__device__ __forceinline__ float sum_of_walkers(const float* value, int first, int count) {
  __shared__ float slices[kSumSlices][128];
  const int thread = threadIdx.x % 128, slice = threadIdx.x / 128;
  float sum = 0.f;
#pragma unroll 4
  for (int i = slice; i < count; i += kSumSlices) sum += value[int64_t{first + i} * kWalkerPartials];
  __syncthreads();
  slices[slice][thread] = sum;
  __syncthreads();
  for (int i = 1; slice == 0 && i < kSumSlices; ++i) sum += slices[i][thread];
  return sum;
}

// A block for each of a thread's sums in a job; a thread of its first slice has one (output channel, input channel) of a tap.
template <typename T>
__global__ void __launch_bounds__(kSumSlices * 128)
sum_weight_gradient(const __grid_constant__ GradientPlan plan, const float* partials, const __grid_constant__ Weight to) {
  const int sum_idx = blockIdx.x % kJobSums, pair = sum_idx / (3 * kOfTap), i = sum_idx % (3 * kOfTap);
  const int thread = threadIdx.x % 128, lane = thread % kWarpSize;
  const GradientJob& job = plan.jobs[blockIdx.x / kJobSums];
  if (pair >= job.pairs) return;
  wait_for_previous_kernel();
  const float sum = sum_of_walkers(partials + sum_idx * 128 + thread, job.first_block * kGradientGroups, job.blocks * kGradientGroups);
  const bool is_odd = i >= kOfTap;
  const int group = is_odd ? (i - kOfTap) / 4 : i / 4;  // of 8 columns of N: a chunk's, for odd taps one of its two copies
  const int tap_w = is_odd ? 1 + group % 2 : 0, chunk = is_odd ? group / 2 : group;
  const int channel_out = thread / kWarpSize * 16 + i / 2 % 2 * 8 + lane / 4, channel_in = chunk * 8 + lane % 4 * 2 + i % 2;
  if (threadIdx.x >= 128 || channel_out >= to.out_channels || channel_in >= to.in_channels) return;
  const HopperTap tap(job.first_tap() + 3 * (job.first_pair + pair) + tap_w);
  static_cast<T*>(const_cast<void*>(to.data))[channel_out * to.stride[0] + channel_in * to.stride[1] + tap.kernel_d * to.stride[2] +
                                              tap.kernel_h * to.stride[3] + tap.kernel_w * to.stride[4]] = from_float<T>(sum);
}

// A block for each of a thread's sums of columns of the norm.
template <typename T>
__global__ void __launch_bounds__(kSumSlices * 128)
sum_norm_gradient(const __grid_constant__ GradientPlan plan, const float* partials, void* of_norm_weight, bool is_float) {
  __shared__ float sums[128];
  const int i = blockIdx.x, thread = threadIdx.x % 128;
  wait_for_previous_kernel();
  float sum = 0.f;
  for (const GradientJob& job : plan.jobs) {
    if (!job.sums_norm()) continue;
    sum += sum_of_walkers(partials + (kJobSums + i) * 128 + thread, job.first_block * kGradientGroups, job.blocks * kGradientGroups);
  }
  if (threadIdx.x < 128) sums[thread] = sum;
  __syncthreads();
  if (threadIdx.x >= 8) return;
  const int q = threadIdx.x % 4, half = threadIdx.x / 4;  // of a warp: each has a pixel of a quad lane's two, and all its lanes other rows
  sum = 0.f;
  for (int other = 0; other < 128 / 8; ++other) sum += sums[other / 4 * kWarpSize + half * 16 + other % 4 * 4 + q];
  const int column = 2 * (i / 2 * 8 + 2 * q + half) + i % 2;
  if (is_float) static_cast<float*>(of_norm_weight)[column] = sum;
  else static_cast<T*>(of_norm_weight)[column] = from_float<T>(sum);
}

}  // namespace fxfuse::conv_norm_pool_gelu
