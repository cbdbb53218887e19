// conv_norm_pool_gelu: the Hopper kernels' launches.
#include "conv_norm_pool_gelu_hopper.cuh"
#include "conv_norm_pool_gelu_launch.cuh"

namespace fxfuse::conv_norm_pool_gelu {

template <Operand operand>
void run_hopper(const Tensor& input, const Problem& p, const HopperPlan& plan, const Weight& weight) {
  const Tensor workspace = torch::stable::empty(std::vector<int64_t>{plan.packed_bytes / 4}, ScalarType::Int, std::nullopt, input.device());
  launch(input, {ceil_div(plan.packed_bytes / 4, kPackThreads), kPackThreads}, pack_hopper_weight_kernel<operand>, weight,
         static_cast<uint32_t*>(workspace.data_ptr()));
  launch(input, {plan.blocks, kHopperThreads, static_cast<size_t>(plan.shared_bytes), true}, hopper_kernel<operand>, p, plan,
         static_cast<const char*>(workspace.data_ptr()));
}

template void run_hopper<Operand::Tf32>(const Tensor&, const Problem&, const HopperPlan&, const Weight&);
template void run_hopper<Operand::Fp32>(const Tensor&, const Problem&, const HopperPlan&, const Weight&);
template void run_hopper<Operand::Bf16>(const Tensor&, const Problem&, const HopperPlan&, const Weight&);
template void run_hopper<Operand::Fp16>(const Tensor&, const Problem&, const HopperPlan&, const Weight&);

}  // namespace fxfuse::conv_norm_pool_gelu
