// conv_norm_pool_gelu: the small tensors (bias, addend, norm_weight, norm_bias) as the epilogues use them.
#pragma once

#include "common/gelu.cuh"
#include "conv_norm_pool_gelu_operand.cuh"
#include "conv_norm_pool_gelu_problem.cuh"

namespace fxfuse::conv_norm_pool_gelu {

// Of the exact gelu: Fast is off by 2e-7 where TF32 or 16-bit operands cost 1e-4 and more.
template <Operand operand>
constexpr Gelu kExactGelu = operand == Operand::Fp32 ? Gelu::Accurate : Gelu::Fast;

// norm_weight along W, and norm_bias averaged over each window; 1 and 0 where absent.
template <typename T>
__device__ __forceinline__ void stage_norm_params(const Problem& p, float* norm_weight, float* pooled_bias, int columns) {
  for (int w = threadIdx.x; w < columns; w += blockDim.x) norm_weight[w] = p.norm_weight && w < p.w.output ? p.norm_weight.at<T>(w) : 1.f;
  for (int w = threadIdx.x; w < p.w.pooled; w += blockDim.x) {
    float sum = 0.f;
    for (int i = 0; p.norm_bias && i < p.w.pool; ++i) sum += p.norm_bias.at<T>(w * p.w.pool + i);
    pooled_bias[w] = sum / p.w.pool;
  }
}

// 0, or nan where bias + addend is not finite: added to the mean it makes the row nan, as the sum itself would.
template <typename T>
__device__ __forceinline__ float poison_of(const Problem& p, int channel) {
  if (channel >= p.out_channels) return 0.f;
  float x = p.bias ? p.bias.at<T>(channel) : 0.f;
  if (p.addend) x = fmaf(p.addend_scale, p.addend.at<T>(channel * p.addend_stride), x);
  x += p.addend_value;
  return x - x;
}

}  // namespace fxfuse::conv_norm_pool_gelu
