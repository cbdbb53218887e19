// conv_norm_pool_gelu on Hopper: norm, pool and gelu of the rows that a consumer warpgroup holds.
//
// A lane (g, q) of warp w holds channels 16 w + g and 16 w + g + 8 and, of each row of 32 pixels, pixels 8 b + 2 q + e (b < 4, e < 2): in
// `even` their output columns 2 w, in `odd` 2 w + 1. Value [4 (4 row + b) + 2 half + e] is that of channel 16 w + g + 8 half.
#pragma once

#include "common/gelu.cuh"
#include "common/gelu_gradient.cuh"
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

// Of row r / 2, half r % 2.
__device__ __forceinline__ constexpr int value_index(int r, int b, int e) { return 4 * (4 * (r / 2) + b) + 2 * (r % 2) + e; }

// Takes each row's mean off its values; 1 / standard deviation.
template <int kRows>
__device__ __forceinline__ void center_rows(float (&even)[16 * kRows], float (&odd)[16 * kRows], float (&rstd)[2 * kRows],
                                            const float (&poison)[2], float eps) {
  constexpr float kInverseWidth = 1.f / (2 * kHopperWidth);
  float mean[2 * kRows];
#pragma unroll
  for (int r = 0; r < 2 * kRows; ++r) {
    float sum_even = 0.f, sum_odd = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum_even += even[value_index(r, i / 2, i % 2)], sum_odd += odd[value_index(r, i / 2, i % 2)];
    mean[r] = fmaf(warp_sum(sum_even + sum_odd, 4), kInverseWidth, poison[r % 2]);
  }
#pragma unroll
  for (int r = 0; r < 2 * kRows; ++r) {
    float squares_even = 0.f, squares_odd = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float &x = even[value_index(r, i / 2, i % 2)], &y = odd[value_index(r, i / 2, i % 2)];
      x -= mean[r], y -= mean[r];
      squares_even = fmaf(x, x, squares_even), squares_odd = fmaf(y, y, squares_odd);
    }
    rstd[r] = rsqrtf(fmaf(warp_sum(squares_even + squares_odd, 4), kInverseWidth, eps));
  }
}

// pooled[8 r + 2 b + e] += the normalised columns 2 w and 2 w + 1 of row r / 2, half r % 2.
template <int kRows>
__device__ __forceinline__ void add_normalised_rows(float (&even)[16 * kRows], float (&odd)[16 * kRows], float (&pooled)[16 * kRows],
                                                    const float (&poison)[2], const float* norm_weight, float eps) {
  const int q = threadIdx.x % 4;
  float rstd[2 * kRows];
  center_rows<kRows>(even, odd, rstd, poison, eps);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const float4 weight = *reinterpret_cast<const float4*>(norm_weight + (8 * b + 2 * q) * 2);
#pragma unroll
    for (int r = 0; r < 2 * kRows; ++r) {
      const int i = value_index(r, b, 0);
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

constexpr float kInverseWindow = 1.f / 8;

// Sums of the windows to their mean + bias.
template <int kValues>
__device__ __forceinline__ void average_windows(float (&pooled)[kValues], const float* pooled_bias) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const float2 bias = *reinterpret_cast<const float2*>(pooled_bias + 8 * b + 2 * q);
#pragma unroll
    for (int i = 2 * b; i < kValues; i += 8) {
      pooled[i] = fmaf(pooled[i], kInverseWindow, bias.x);
      pooled[i + 1] = fmaf(pooled[i + 1], kInverseWindow, bias.y);
    }
  }
}

template <Operand operand, int kValues>
__device__ __forceinline__ void apply_gelu(float (&pooled)[kValues], bool is_tanh) {
  if (is_tanh) {
#pragma unroll
    for (float& x : pooled) x = gelu<Gelu::Tanh>(x);
  } else {
#pragma unroll
    for (float& x : pooled) x = gelu<kExactGelu<operand>>(x);
  }
}

// Calls f(r, element) for the output's rows `first_row` ... of plane d, those that exist; a lane's pairs lie 8 elements apart.
template <int kRows, typename F>
__device__ __forceinline__ void at_rows(const Problem& p, int n, int channel, int d, int first_row, F&& f) {
  if (d >= p.d.input) return;
  const int64_t first_line = ((int64_t{n} * p.out_channels + channel) * p.d.input + d) * p.h.input + first_row;
  const int64_t first = first_line * kHopperWidth + 2 * (threadIdx.x % 4), next_channels = int64_t{8 * kHopperWidth} * p.d.input * p.h.input;
#pragma unroll
  for (int r = 0; r < 2 * kRows; ++r) {
    const int row = r / 2, half = r % 2;
    if (first_row + row >= p.h.input || channel + 8 * half >= p.out_channels) continue;
    f(r, first + half * next_channels + row * kHopperWidth);
  }
}

template <typename T, int kRows>
__device__ __forceinline__ void store_rows(const Problem& p, const float (&values)[16 * kRows], int n, int channel, int d, int first_row) {
  at_rows<kRows>(p, n, channel, d, first_row, [&](int r, int64_t output) {
    if (p.output_is_float) {
      float* to = static_cast<float*>(p.output) + output;
#pragma unroll
      for (int b = 0; b < 4; ++b) store_pair(to + 8 * b, values[8 * r + 2 * b], values[8 * r + 2 * b + 1]);
    } else {
      T* to = static_cast<T*>(p.output) + output;
#pragma unroll
      for (int b = 0; b < 4; ++b) store_pair(to + 8 * b, values[8 * r + 2 * b], values[8 * r + 2 * b + 1]);
    }
  });
}

// The same rows of `p.grad`, whose elements are of type G; what does not exist is 0. As they lie in memory until they are used: nothing waits
// for them before.
template <typename G, int kRows>
struct GradientRows {
  static constexpr int kWords = sizeof(G) / 2;  // of a pair
  uint32_t words[8 * kRows * kWords];

  __device__ __forceinline__ void load(const Problem& p, int n, int channel, int d, int first_row) {
#pragma unroll
    for (uint32_t& word : words) word = 0;
    at_rows<kRows>(p, n, channel, d, first_row, [&](int r, int64_t element) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const G* const from = static_cast<const G*>(p.grad) + element + 8 * b;
        uint32_t* const to = words + (4 * r + b) * kWords;
        if constexpr (kWords == 1) {
          *to = *reinterpret_cast<const uint32_t*>(from);
        } else {
          const uint2 pair = *reinterpret_cast<const uint2*>(from);
          to[0] = pair.x, to[1] = pair.y;
        }
      }
    });
  }

  // Value i of the tile, in the order of `pooled`.
  __device__ __forceinline__ float operator[](int i) const {
    Vec<G, 2> pair;
    memcpy(&pair, words + i / 2 * kWords, sizeof pair);
    return pair[i % 2];
  }
};

// Brings the gradients of a warpgroup's tile to the L2 cache, half the rows of a channel by each thread.
template <typename G, int kRows>
__device__ __forceinline__ void prefetch_gradient(const Problem& p, int n, int d, int first_row) {
  const int channel = threadIdx.x % 128 / 2;
  if (channel >= p.out_channels || d >= p.d.input) return;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    const int row = first_row + threadIdx.x % 2 * (kRows / 2) + i;
    if (row >= p.h.input) return;
    const int64_t line = ((int64_t{n} * p.out_channels + channel) * p.d.input + d) * p.h.input + row;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const G*>(p.grad) + line * kHopperWidth));
  }
}

// x of a window to the gradient of each of its values: grad * gelu'(x) / size. A row at a time: registers hold no tile of gradients here.
template <typename G, int kRows, Gelu kind>
__device__ __forceinline__ void apply_gelu_gradient(const Problem& p, float (&pooled)[16 * kRows], int n, int channel, int d, int first_row) {
  at_rows<kRows>(p, n, channel, d, first_row, [&](int r, int64_t element) {
    Vec<G, 2> grad[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) grad[b].load(static_cast<const G*>(p.grad) + element + 8 * b);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = pooled[8 * r + i];
      x = grad[i / 2][i % 2] * (kInverseWindow * gelu_derivative<kind>(x));
    }
  });
}

}  // namespace fxfuse::conv_norm_pool_gelu
