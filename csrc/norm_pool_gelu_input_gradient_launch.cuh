// norm_pool_gelu_input_gradient: launches. One .cu an input dtype instantiates them, so that a build compiles them side by side.
#pragma once

#include "norm_pool_gelu_input_gradient_plan.cuh"

namespace fxfuse::norm_pool_gelu {

// On the input's device and stream.
template <typename T>
void launch_gradient(const Tensor& input, const GradientProblem& gradient, const GradientRowsPlan& plan);

template <typename T>
void launch_gradient(const Tensor& input, const GradientProblem& gradient, const GradientChannelsPlan& plan);

#ifdef FXFUSE_TYPE

template <typename T, int kVec, int kVecs, int kRows>
void launch_gradient_rows(const Tensor& input, const GradientProblem& gradient, const GradientRowsPlan& plan) {
  const Problem& p = gradient.forward;
  GradientRowsGrid grid{static_cast<uint32_t>(plan.lanes), 0, static_cast<uint32_t>(p.num_n * p.num_channels * p.output_rows()), plan.steps,
                        FastDiv(p.h.output), FastDiv(p.d.output), FastDiv(p.num_channels)};
  while ((1 << grid.log2_lanes) < plan.lanes) ++grid.log2_lanes;
  const size_t shared_bytes = sizeof(float) * p.w.input * (2 + 2 * (kRowsThreads / plan.lanes));
  const LaunchConfig config{plan.blocks, kRowsThreads, shared_bytes};
  if constexpr (kVec == kVecLen<T> && kRows > 1) {
    if (plan.exact) return launch(input, config, gradient_rows_kernel<T, kVec, kVecs, kRows, true, true, false>, gradient, grid);
  }
  if constexpr (kVec == 1) {
    if (!p.addend_is_per_channel) return launch(input, config, gradient_rows_kernel<T, kVec, kVecs, kRows, false, false, true>, gradient, grid);
  }
  if (plan.resident) return launch(input, config, gradient_rows_kernel<T, kVec, kVecs, kRows, false, true, false>, gradient, grid);
  launch(input, config, gradient_rows_kernel<T, kVec, kVecs, kRows, false, false, false>, gradient, grid);
}

template <typename T, int kVec>
void launch_gradient_rows(const Tensor& input, const GradientProblem& gradient, const GradientRowsPlan& plan) {
  if (plan.values == 8) return launch_gradient_rows<T, kVec, 8 / kVec, 4>(input, gradient, plan);
  if (plan.values == 16) return launch_gradient_rows<T, kVec, 16 / kVec, 2>(input, gradient, plan);
  launch_gradient_rows<T, kVec, 32 / kVec, 1>(input, gradient, plan);
}

template <typename T, int kVec, int kColumns>
void launch_gradient_channels(const Tensor& input, const GradientProblem& gradient, const GradientChannelsPlan& plan) {
  const Problem& p = gradient.forward;
  const int64_t tiles = ceil_div(p.num_channels, kVec * kColumns);
  const GradientChannelsGrid grid{plan.windows, plan.steps, static_cast<int>(p.output_rows()), plan.shared, FastDiv(tiles), FastDiv(plan.chunks),
                                  FastDiv(p.h.output), FastDiv(p.window_rows()), FastDiv(p.w.output), FastDiv(p.h.kernel)};
  const auto kernel = plan.pairs ? gradient_channels_last_kernel<T, kVec, kColumns, true> : gradient_channels_last_kernel<T, kVec, kColumns, false>;
  launch(input, {plan.blocks, kGradientThreads, static_cast<size_t>(plan.shared.total)}, kernel, gradient, grid);
}

template <>
void launch_gradient<FXFUSE_TYPE>(const Tensor& input, const GradientProblem& gradient, const GradientRowsPlan& plan) {
  if (plan.vec_len == 1) launch_gradient_rows<FXFUSE_TYPE, 1>(input, gradient, plan);
  else if (plan.vec_len == 4) launch_gradient_rows<FXFUSE_TYPE, 4>(input, gradient, plan);
  else launch_gradient_rows<FXFUSE_TYPE, kVecLen<FXFUSE_TYPE>>(input, gradient, plan);
}

template <>
void launch_gradient<FXFUSE_TYPE>(const Tensor& input, const GradientProblem& gradient, const GradientChannelsPlan& plan) {
  constexpr int kWide = kVecLen<FXFUSE_TYPE>;
  if (plan.vec_len == 1) launch_gradient_channels<FXFUSE_TYPE, 1, 8>(input, gradient, plan);
  else if (plan.columns == 4) launch_gradient_channels<FXFUSE_TYPE, kWide, 4>(input, gradient, plan);
  else launch_gradient_channels<FXFUSE_TYPE, kWide, 2>(input, gradient, plan);
}

#endif

}  // namespace fxfuse::norm_pool_gelu
