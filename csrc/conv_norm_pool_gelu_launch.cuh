// conv_norm_pool_gelu: launches. One .cu a kind of operand instantiates them, so that a build compiles them side by side.
#pragma once

#include "conv_norm_pool_gelu_hopper_plan.cuh"
#include "conv_norm_pool_gelu_pack.cuh"
#include "conv_norm_pool_gelu_portable.cuh"

namespace fxfuse::conv_norm_pool_gelu {

// Makes the packed weights and the output, on the input's device and stream.
template <Operand operand>
void run_portable(const Tensor& input, const Problem& p, const PortablePlan& plan, const Weight& weight);

template <Operand operand>
void run_hopper(const Tensor& input, const Problem& p, const HopperPlan& plan, const Weight& weight);

#ifdef FXFUSE_OPERAND

template <Operand operand, int kPhases, int kColumns, int kTiles>
void launch_tile(const Tensor& input, const Problem& p, const PortablePlan& plan, const char* packed) {
  launch(input, {plan.blocks, plan.threads(), plan.shared_bytes}, portable_kernel<operand, kPhases, kColumns, kTiles>, p, plan,
         make_portable_grid(p, plan), packed);
}

template <Operand operand, int kPhases>
void launch_phases(const Tensor& input, const Problem& p, const PortablePlan& plan, const char* packed) {
  switch (plan.columns * kPhases) {
    case 4: return launch_tile<operand, kPhases, 4 / kPhases, 2>(input, p, plan, packed);
    case 8: return launch_tile<operand, kPhases, 8 / kPhases, 2>(input, p, plan, packed);
    case 16: return launch_tile<operand, kPhases, 16 / kPhases, 1>(input, p, plan, packed);
    case 32: return launch_tile<operand, kPhases, 32 / kPhases, 1>(input, p, plan, packed);
    default: throw std::runtime_error("no kernel has this tile");
  }
}

template <>
void run_portable<FXFUSE_OPERAND>(const Tensor& input, const Problem& p, const PortablePlan& plan, const Weight& weight) {
  const Tensor workspace = torch::stable::empty(std::vector<int64_t>{plan.packed_bytes / 4}, ScalarType::Int, std::nullopt, input.device());
  constexpr int64_t kMostBlocks = 1024;
  launch(input, {std::min(ceil_div(weight.num_words(), kPackThreads), kMostBlocks), kPackThreads}, pack_weight_kernel<FXFUSE_OPERAND>,
         weight, static_cast<uint32_t*>(workspace.data_ptr()));
  const char* packed = static_cast<const char*>(workspace.data_ptr());
  if (plan.phases == 1) launch_phases<FXFUSE_OPERAND, 1>(input, p, plan, packed);
  else launch_phases<FXFUSE_OPERAND, 2>(input, p, plan, packed);
}

#endif

}  // namespace fxfuse::conv_norm_pool_gelu
