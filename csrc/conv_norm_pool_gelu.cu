// fxfuse::conv_norm_pool_gelu: gelu(avg_pool3d(layer_norm(conv(input, weight) + bias[c] + addend))); the convolution's output never
// reaches memory.
//
// Why one kernel: at [32, 32, 16, 32, 32] -> ConvTranspose3d(32 -> 64, k3, s2, p1, output_padding 1) -> pool 2 the convolution's output is
// 1.07 GB in fp32, which every other way writes and reads back. Here 67 MB come in and 134 MB go out, beside 58 GFLOP.
//
//   conv_norm_pool_gelu_arguments.cuh from an op's arguments to the problem
//   conv_norm_pool_gelu_problem.cuh   what is computed; taps of plain and transposed convolutions
//   conv_norm_pool_gelu_plan.cuh      which tiles: pure functions
//   conv_norm_pool_gelu_pack.cuh      weights in fragment order
//   conv_norm_pool_gelu_params.cuh    bias, addend, norm_weight and norm_bias
//   conv_norm_pool_gelu_operand.cuh   dtypes and precisions of matrix products
//   conv_norm_pool_gelu_portable.cuh  the kernel for sm_80 and newer; _stage, _weights, _epilogue: its parts
//   conv_norm_pool_gelu_hopper.cuh    the kernel for sm_90a and the headline's class; _plan, _load, _planes, _epilogue: its parts
//   conv_norm_pool_gelu_launch.cuh    launches, instantiated by conv_norm_pool_gelu_{tf32,fp32,bf16,fp16,hopper}.cu
//   conv_norm_pool_gelu_gradient.cuh  gradients of the weights, for that class too; _plan, _load, _sums: its parts; .cu: its op
//   this file                         choice of the kernel, op, registration

#include <cstdlib>
#include <string>
#include <vector>

#include "conv_norm_pool_gelu_arguments.cuh"
#include "conv_norm_pool_gelu_launch.cuh"

namespace fxfuse::conv_norm_pool_gelu {
namespace {

// ---- choice of the kernel ----------------------------------------------------------------------------------------

// FXFUSE_PORTABLE=1 takes the portable kernel on Hopper too, so that it is tested there.
bool portable_is_forced() {
  const char* value = std::getenv("FXFUSE_PORTABLE");
  return value != nullptr && std::string_view(value) == "1";
}

template <typename Plan, typename Run>
void run_plan(const Plan& plan, const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(error.what()) + " (conv_norm_pool_gelu, " + plan.describe() + ")");
  }
}

template <Operand operand>
void run(const Tensor& input, const Tensor& weight, const Problem& p) {
  const auto attribute = [&](cudaDeviceAttr a) { return device_attribute(a, input.get_device_index()); };
  Weight packing = make_weight(weight, p);
  const int num_processors = attribute(cudaDevAttrMultiProcessorCount);
  if (hopper_takes(p, attribute(cudaDevAttrComputeCapabilityMajor), num_processors) && !portable_is_forced()) {
    const HopperPlan plan = make_hopper_plan<operand>(p, num_processors);
    return run_plan(plan, [&] { run_hopper<operand>(input, p, plan, packing); });
  }
  const int max_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const std::string sentence = refusal(p, max_shared_bytes);
  require(sentence.empty(), sentence);
  const PortablePlan plan = make_portable_plan(p, kRecordChannels<operand>, max_shared_bytes);
  require(plan.packed_bytes <= kMaxWorkspaceBytes, "weight has shape ", text_of(sizes_of(weight)), " and needs ", plan.packed_bytes,
          " bytes of workspace, but at most ", kMaxWorkspaceBytes, " are used.");
  packing.num_chunks = plan.num_chunks;
  packing.tiles_per_block = plan.tiles_per_block();
  packing.num_blocks = static_cast<int>(plan.channel_blocks);
  run_plan(plan, [&] { run_portable<operand>(input, p, plan, packing); });
}

// ---- op ----------------------------------------------------------------------------------------------------------

Tensor conv_norm_pool_gelu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                           const std::optional<Tensor>& addend, const std::optional<Tensor>& norm_weight,
                           const std::optional<Tensor>& norm_bias, bool transposed, const std::vector<int64_t>& stride,
                           const std::vector<int64_t>& padding, const std::vector<int64_t>& output_padding, double addend_scale,
                           double addend_value, double eps, const std::vector<int64_t>& pool_size, const std::string& approximate,
                           const std::string& precision, std::optional<ScalarType> out_dtype) {
  Arguments call = check_arguments(input, weight, bias, addend, norm_weight, norm_bias, transposed, stride, padding, output_padding,
                                   addend_scale, addend_value, eps, pool_size, approximate, precision, out_dtype);
  Tensor output = torch::stable::new_empty(input, call.output_size, call.dtype);
  if (output.numel() == 0) return output;
  Problem& p = call.problem;
  p.output = output.data_ptr();
  switch (call.operand) {
    case Operand::Tf32: run<Operand::Tf32>(input, weight, p); break;
    case Operand::Fp32: run<Operand::Fp32>(input, weight, p); break;
    case Operand::Bf16: run<Operand::Bf16>(input, weight, p); break;
    case Operand::Fp16: run<Operand::Fp16>(input, weight, p); break;
  }
  return output;
}

}  // namespace
}  // namespace fxfuse::conv_norm_pool_gelu

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CUDA, m) { m.impl("conv_norm_pool_gelu", TORCH_BOX(&fxfuse::conv_norm_pool_gelu::conv_norm_pool_gelu)); }
