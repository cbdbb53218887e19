// conv_gelu_pool: from accumulators to the mean. Sums of GELU over a thread's pixels, over a block, and over the pieces of an image in a
// second small kernel, each in a fixed order: the result is the same bit for bit in every run.
#pragma once

#include "conv_gelu_pool_problem.cuh"
#include "conv_gelu_pool_shares.cuh"

namespace fxfuse::conv_gelu_pool {

// total[row] += the sum of gelu(x(row, i)) for i < kCount: of relu(x) less |x| Phi(-|x|), in the cheap forms that are made for sums.
// relu(x) comes as (x + |x|) / 2, exact as well: a maximum runs at half the rate of an addition. Two
// kinds of sums are done again in the accurate form. Those of values that are all far below 0 (first and middle one stand for all,
// where no relu is left): their GELUs are so small that the cheap form's error would show. And those that came out inf or nan, as they
// do for x = +inf (inf * 0), where eager's result is nan only if some x is nan or -inf, and for x above half of the largest fp32.
template <Gelu form, int kRows, int kCount, typename F>
__device__ __forceinline__ void add_sums_of_gelu(float (&total)[kRows], F&& x) {
  if constexpr (form == Gelu::Tanh) {
#pragma unroll
    for (int i = 0; i < kCount * kRows; ++i) total[i % kRows] += gelu_unguarded<form>(x(i % kRows, i / kRows));
  } else {
    constexpr float kFarBelow = -1.5f, kSmall = 0.1f;
    float twice_relu[kRows] = {}, tail[kRows] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float a = fabsf(x(row, i));
        twice_relu[row] += x(row, i) + a;
        tail[row] = fmaf(a, gelu_tail<form>(a), tail[row]);
      }
    }
    bool is_doubtful = false;
    float sum[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      sum[row] = fmaf(0.5f, twice_relu[row], -tail[row]);
      const bool is_small = (twice_relu[row] == 0.f) & (tail[row] < kSmall * kCount) & (fminf(x(row, 0), x(row, kCount / 2)) < kFarBelow);
      is_doubtful |= is_small | !is_finite(sum[row]);
    }
    if (is_doubtful) [[unlikely]] {
      // In local memory, so that a short loop does it: unrolled over registers it is longer than the kernel, which it makes spill.
      float kept[kCount];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) kept[i] = x(row, i);
        sum[row] = 0.f;
#pragma unroll 1
        for (int i = 0; i < kCount; ++i) sum[row] += gelu<Gelu::Accurate>(kept[i]);
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) total[row] += sum[row];
  }
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

// out[n, c] = scale * the sum of partials[n, piece, c] over the pieces; a block makes 32 channels of one image, its warps share the pieces.
template <typename Out>
__global__ void __launch_bounds__(kMeanThreads)
mean_of_pieces(const float* partials, Out* out, const __grid_constant__ Shares shares, int channels, float scale) {
  __shared__ float sums[kMeanThreads / kWarpSize][kMeanChannels];
  const int lane = threadIdx.x % kWarpSize, warp_idx = threadIdx.x / kWarpSize, num_warps = blockDim.x / kWarpSize;
  const int tiles = (channels + kMeanChannels - 1) / kMeanChannels;
  const int64_t image = blockIdx.x / tiles;
  const int channel = blockIdx.x % tiles * kMeanChannels + lane;
  const int pieces = shares.pieces(image);
  const float* const from = partials + image * shares.most_pieces() * channels + channel;
  wait_for_previous_kernel();
  float sum = 0.f;
  if (channel < channels) {
#pragma unroll 4
    for (int piece = warp_idx; piece < pieces; piece += num_warps) sum += from[int64_t{piece} * channels];
  }
  sums[warp_idx][lane] = sum;
  __syncthreads();
  if (warp_idx != 0 || channel >= channels) return;
  for (int i = 1; i < num_warps; ++i) sum += sums[i][lane];
  out[image * channels + channel] = from_float<Out>(sum * scale);
}

}  // namespace fxfuse::conv_gelu_pool
