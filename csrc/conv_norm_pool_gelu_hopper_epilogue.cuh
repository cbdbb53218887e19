// conv_norm_pool_gelu on Hopper: norm, pool and gelu of the rows that a consumer warpgroup holds.
//
// A lane (g, q) of warp w holds channels 16 w + g and 16 w + g + 8 and, of each row of 32 pixels, pixels 8 b + 2 q + e (b < 4, e < 2): in
// `even` their output columns 2 w, in `odd` 2 w + 1. Value [4 (4 row + b) + 2 half + e] is that of channel 16 w + g + 8 half.
#pragma once

#include "common/gelu.cuh"
#include "conv_norm_pool_gelu_hopper_plan.cuh"
#include "conv_norm_pool_gelu_params.cuh"

namespace fxfuse::conv_norm_pool_gelu {

// Turns of two warpgroups at the tensor cores. A turn is given before it is waited for, once more at the start.
__device__ __forceinline__ void wait_for_turn(int warpgroup) { asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory"); }
__device__ __forceinline__ void give_turn(int warpgroup) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + (warpgroup ^ 1)) : "memory"); }

// norm_weight[64] and norm_bias averaged over each window[32].
template <typename T>
__device__ __forceinline__ void stage_hopper_norm_params(const Problem& p, float* norm_params) {
  stage_norm_params<T>(p, norm_params, norm_params + 2 * kHopperWidth, 2 * kHopperWidth);
}

// pooled[8 r + 2 b + e] += the normalised columns 2 w and 2 w + 1 of row r / 2, half r % 2.
template <int kRows>
__device__ __forceinline__ void add_normalised_rows(float (&even)[16 * kRows], float (&odd)[16 * kRows], float (&pooled)[16 * kRows],
                                                    const float (&poison)[2], const float* norm_weight, float eps) {
  constexpr float kInverseWidth = 1.f / (2 * kHopperWidth);
  const auto index = [](int r, int b, int e) { return 4 * (4 * (r / 2) + b) + 2 * (r % 2) + e; };
  const int q = threadIdx.x % 4;
  float mean[2 * kRows], rstd[2 * kRows];
#pragma unroll
  for (int r = 0; r < 2 * kRows; ++r) {
    float sum_even = 0.f, sum_odd = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum_even += even[index(r, i / 2, i % 2)], sum_odd += odd[index(r, i / 2, i % 2)];
    mean[r] = fmaf(warp_sum(sum_even + sum_odd, 4), kInverseWidth, poison[r % 2]);
  }
#pragma unroll
  for (int r = 0; r < 2 * kRows; ++r) {
    float squares_even = 0.f, squares_odd = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float &x = even[index(r, i / 2, i % 2)], &y = odd[index(r, i / 2, i % 2)];
      x -= mean[r], y -= mean[r];
      squares_even = fmaf(x, x, squares_even), squares_odd = fmaf(y, y, squares_odd);
    }
    rstd[r] = rsqrtf(fmaf(warp_sum(squares_even + squares_odd, 4), kInverseWidth, eps));
  }
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const float4 weight = *reinterpret_cast<const float4*>(norm_weight + (8 * b + 2 * q) * 2);
#pragma unroll
    for (int r = 0; r < 2 * kRows; ++r) {
      const int i = index(r, b, 0);
      pooled[8 * r + 2 * b] = fmaf(rstd[r], fmaf(weight.y, odd[i], weight.x * even[i]), pooled[8 * r + 2 * b]);
      pooled[8 * r + 2 * b + 1] = fmaf(rstd[r], fmaf(weight.w, odd[i + 1], weight.z * even[i + 1]), pooled[8 * r + 2 * b + 1]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_pair(T* to, float x, float y) {
  Vec<T, 2> pair;
  pair.value[0] = from_float<T>(x);
  pair.value[1] = from_float<T>(y);
  pair.store(to);
}

// Sums of the windows to their gelu(mean + bias).
template <Operand operand, int kValues>
__device__ __forceinline__ void finish_windows(float (&pooled)[kValues], const float* pooled_bias, bool is_tanh) {
  constexpr float kInverseSize = 1.f / 8;
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const float2 bias = *reinterpret_cast<const float2*>(pooled_bias + 8 * b + 2 * q);
#pragma unroll
    for (int i = 2 * b; i < kValues; i += 8) {
      pooled[i] = fmaf(pooled[i], kInverseSize, bias.x);
      pooled[i + 1] = fmaf(pooled[i + 1], kInverseSize, bias.y);
    }
  }
  if (is_tanh) {
#pragma unroll
    for (float& x : pooled) x = gelu<Gelu::Tanh>(x);
  } else {
#pragma unroll
    for (float& x : pooled) x = gelu<kExactGelu<operand>>(x);
  }
}

// The output's rows `first_row` ... of plane d, those that exist.
template <typename T, int kRows>
__device__ __forceinline__ void store_rows(const Problem& p, const float (&values)[16 * kRows], int64_t n, int channel, int d,
                                           int first_row) {
  if (d >= p.d.input) return;
  const int q = threadIdx.x % 4;
  constexpr int64_t kRowSize = kHopperWidth;
  const int64_t channel_size = kRowSize * p.d.input * p.h.input;
  const int64_t first = ((n * p.out_channels + channel) * p.d.input + d) * p.h.input * kRowSize + first_row * kRowSize + 2 * q;
#pragma unroll
  for (int r = 0; r < 2 * kRows; ++r) {
    const int row = r / 2, half = r % 2;
    if (first_row + row >= p.h.input || channel + 8 * half >= p.out_channels) continue;
    const int64_t output = first + half * 8 * channel_size + row * kRowSize;
    if (p.output_is_float) {
      float* to = static_cast<float*>(p.output) + output;
#pragma unroll
      for (int b = 0; b < 4; ++b) store_pair(to + 8 * b, values[8 * r + 2 * b], values[8 * r + 2 * b + 1]);
    } else {
      T* to = static_cast<T*>(p.output) + output;
#pragma unroll
      for (int b = 0; b < 4; ++b) store_pair(to + 8 * b, values[8 * r + 2 * b], values[8 * r + 2 * b + 1]);
    }
  }
}

}  // namespace fxfuse::conv_norm_pool_gelu
