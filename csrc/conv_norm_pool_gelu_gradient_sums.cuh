// conv_norm_pool_gelu, gradients of the parameters: the sums of all warpgroups' partial sums, in a fixed order.
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
// of_constants: null, or where the gradients go of what each output channel adds to all of its values. That drops out of the norm: they are 0, or
// nan where a row is.
template <typename T>
__global__ void __launch_bounds__(kSumSlices * 128) sum_weight_gradient(const __grid_constant__ GradientPlan plan, const float* partials,
                                                                        const __grid_constant__ Weight to, T* of_constants) {
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
  const int tap_idx = job.first_tap() + 3 * (job.first_pair + pair) + tap_w;
  if (of_constants && tap_idx == 0 && channel_in == 0) of_constants[channel_out] = from_float<T>(0.f * sum);
  const HopperTap tap(tap_idx);
  static_cast<T*>(const_cast<void*>(to.data))[channel_out * to.stride[0] + channel_in * to.stride[1] + tap.kernel_d * to.stride[2] +
                                              tap.kernel_h * to.stride[3] + tap.kernel_w * to.stride[4]] = from_float<T>(sum);
}

// norm_weight's or norm_bias's; data is null where nobody asks for it.
struct NormGradient {
  void* data;
  bool is_float;

  template <typename T>
  __device__ __forceinline__ void set(int column, float value) const {
    if (is_float) static_cast<float*>(data)[column] = value;
    else static_cast<T*>(data)[column] = from_float<T>(value);
  }
};

// A block for each of a thread's sums over columns.
template <typename T>
__global__ void __launch_bounds__(kSumSlices * 128)
sum_norm_gradients(const __grid_constant__ GradientPlan plan, const float* partials, NormGradient of_weight, NormGradient of_bias) {
  __shared__ float sums[128];
  const bool is_bias = blockIdx.x >= kWeightSums;
  const int thread = threadIdx.x % 128;
  if (!(is_bias ? of_bias : of_weight).data) return;
  wait_for_previous_kernel();
  float sum = 0.f;
  for (const GradientJob& job : plan.jobs) {
    if (job.sums_output() == is_bias) continue;
    const float* const value = partials + (kJobSums + blockIdx.x) * 128 + thread;
    sum += sum_of_walkers(value, job.first_block * kGradientGroups, job.blocks * kGradientGroups);
  }
  if (threadIdx.x < 128) sums[thread] = sum;
  __syncthreads();
  if (threadIdx.x >= 4) return;
  sum = 0.f;
  for (int other = threadIdx.x; other < 128; other += 4) sum += sums[other];  // quad lanes hold columns, all others rows
  const int i = is_bias ? blockIdx.x - kWeightSums : blockIdx.x;
  if (!is_bias) return of_weight.set<T>(2 * (i / 4 * 8 + 2 * threadIdx.x + i % 4 / 2) + i % 2, sum);
  const int window = i / 2 * 8 + 2 * threadIdx.x + i % 2;
  for (int column = 2 * window; column < 2 * window + 2; ++column) of_bias.set<T>(column, 4 * sum);  // of a window's 4 rows
}

}  // namespace fxfuse::conv_norm_pool_gelu
