// conv_norm_pool_gelu, the gradient kernel: the norm's gradient, of rows in registers as the forward's epilogue has them.
#pragma once

#include "conv_norm_pool_gelu_gradient_plan.cuh"
#include "conv_norm_pool_gelu_hopper_epilogue.cuh"

namespace fxfuse::conv_norm_pool_gelu {

// From y, even and odd columns, and the gradients of its normalised values, which two columns share, to the gradient of y. With z = y - mean,
// s = rstd * grad, u = norm_weight * s: of_y = u - mean(u) - z * rstd^2 * mean(u * z).
//
// inside: whether the input has a row of the tile. add_sum(i, sum) takes this thread's sums over the tile's rows: kSumsOutput:
// i < kWeightSums, of s * z, for norm_weight; else kWeightSums <= i < kNormSums, of the windows' gradients, for norm_bias.
template <int kRows, bool kSumsOutput, typename G, typename F>
__device__ __forceinline__ void differentiate_rows(float (&even)[16 * kRows], float (&odd)[16 * kRows], const GradientRows<G, kRows>& of_windows,
                                                   const bool (&inside)[kRows], const float* norm_weight, const float (&poison)[2], float eps,
                                                   const F& add_sum) {
  constexpr int kOfRow = 2 * kRows;
  constexpr float kInverseWidth = 1.f / (2 * kHopperWidth);
  const int q = threadIdx.x % 4;
  float scaled[16 * kRows], rstd[kOfRow], mean_u[kOfRow] = {}, mean_uz[kOfRow] = {};
  center_rows<kRows>(even, odd, rstd, poison, eps);
#pragma unroll
  for (int r = 0; r < kOfRow; ++r) rstd[r] = inside[r / 2] ? rstd[r] : 0.f;  // it may be inf, and their gradients are 0
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const float4 weight = *reinterpret_cast<const float4*>(norm_weight + (8 * b + 2 * q) * 2);
    float sums[4] = {};
#pragma unroll
    for (int r = 0; r < kOfRow; ++r) {
      const int i = value_index(r, b, 0);
      float &first = scaled[8 * r + 2 * b], &second = scaled[8 * r + 2 * b + 1];
      first = of_windows[8 * r + 2 * b], second = of_windows[8 * r + 2 * b + 1];
      if constexpr (!kSumsOutput) sums[0] += first, sums[1] += second;
      first *= rstd[r], second *= rstd[r];
      mean_u[r] = fmaf(weight.z + weight.w, second, fmaf(weight.x + weight.y, first, mean_u[r]));
      mean_uz[r] = fmaf(first, fmaf(weight.x, even[i], weight.y * odd[i]), mean_uz[r]);
      mean_uz[r] = fmaf(second, fmaf(weight.z, even[i + 1], weight.w * odd[i + 1]), mean_uz[r]);
      if constexpr (kSumsOutput) {
        sums[0] = fmaf(first, even[i], sums[0]), sums[1] = fmaf(first, odd[i], sums[1]);
        sums[2] = fmaf(second, even[i + 1], sums[2]), sums[3] = fmaf(second, odd[i + 1], sums[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < (kSumsOutput ? 4 : 2); ++j) add_sum(kSumsOutput ? 4 * b + j : kWeightSums + 2 * b + j, sums[j]);
  }
#pragma unroll
  for (int r = 0; r < kOfRow; ++r) {
    mean_u[r] = warp_sum(mean_u[r], 4) * kInverseWidth;
    mean_uz[r] = warp_sum(mean_uz[r], 4) * kInverseWidth * rstd[r] * rstd[r];
  }
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const float4 weight = *reinterpret_cast<const float4*>(norm_weight + (8 * b + 2 * q) * 2);
#pragma unroll
    for (int r = 0; r < kOfRow; ++r) {
      const auto of_y = [&](float& z, float weight, float scaled) { z = fmaf(-z, mean_uz[r], fmaf(weight, scaled, -mean_u[r])); };
      const int i = value_index(r, b, 0);
      const float first = scaled[8 * r + 2 * b], second = scaled[8 * r + 2 * b + 1];
      of_y(even[i], weight.x, first), of_y(odd[i], weight.y, first);
      of_y(even[i + 1], weight.z, second), of_y(odd[i + 1], weight.w, second);
    }
  }
}

}  // namespace fxfuse::conv_norm_pool_gelu
