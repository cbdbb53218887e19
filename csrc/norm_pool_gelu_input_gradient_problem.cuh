// norm_pool_gelu_input_gradient: what is computed, as one struct that both kernels take.
//
// In a row of W, with xhat the normalised row: a window's g = grad * gelu'(mean of xhat * weight + bias) / (elements of the window) goes to each of
// its elements, u = weight * g, and the row's gradient is rstd * (u - mean(u) - xhat * mean(u * xhat)). The rows of a window have one g, so one u.
#pragma once

#include "common/cuda.cuh"
#include "common/gelu_gradient.cuh"
#include "norm_pool_gelu_problem.cuh"

namespace fxfuse::norm_pool_gelu {

// forward: windows side by side, no padding, norm over W.
struct GradientProblem {
  Problem forward;
  Param grad;             // [N, C, D', H', W'], contiguous
  void* of_input;         // as the input in dtype and strides; may be the input
  float* channel_parts;   // partial sums for of_channels, or null
  float* norm_parts;      // [blocks, 2, W]: partial sums for of_norm, or null
  FastDiv by_kernel_w;

  // The window of position w; at least w.output behind the last one.
  __device__ __forceinline__ int window_of(int w) const {
    uint32_t rest;
    return by_kernel_w.divide(w, rest);
  }
  __device__ __forceinline__ float gelu_derivative(float x) const {
    return forward.gelu_is_tanh ? fxfuse::gelu_derivative<Gelu::Tanh>(x) : fxfuse::gelu_derivative<Gelu::Accurate>(x);
  }
};

template <typename T>
__device__ __forceinline__ void stage_raw_norm_params(const Problem& p, float* weight, float* bias) {
  for (int w = threadIdx.x; w < p.w.input; w += blockDim.x) {
    weight[w] = p.norm_weight ? p.norm_weight.at<T>(w) : 1.f;
    bias[w] = p.norm_bias ? p.norm_bias.at<T>(w) : 0.f;
  }
}

// ---- rows that no window covers ----------------------------------------------------------------------------------

constexpr int kZeroThreads = 256;

// In each plane (n, c, d), or (n, d) in channels_last, the run of rows from the first that no window covers.
struct UncoveredRows {
  int planes, covered_planes, rows, covered_rows;  // of D and H
  int64_t row_size;                                // W, or W * C
};

template <typename T>
__global__ void __launch_bounds__(kZeroThreads) zero_uncovered_rows_kernel(T* of_input, const UncoveredRows uncovered) {
  const int64_t plane_size = uncovered.rows * uncovered.row_size;
  const bool is_covered = static_cast<int>(blockIdx.x % uncovered.planes) < uncovered.covered_planes;
  T* plane = of_input + blockIdx.x * plane_size;
  for (int64_t i = (is_covered ? uncovered.covered_rows * uncovered.row_size : 0) + threadIdx.x; i < plane_size; i += kZeroThreads) {
    plane[i] = from_float<T>(0.f);
  }
}

}  // namespace fxfuse::norm_pool_gelu
