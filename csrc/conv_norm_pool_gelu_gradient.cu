// fxfuse::conv_norm_pool_gelu_weight_gradient: gradients of conv_norm_pool_gelu with respect to its parameters; false, and nothing done, for
// what the kernels do not take: the convolution is then computed again by its library.

#include <string>
#include <vector>

#include "conv_norm_pool_gelu_arguments.cuh"
#include "conv_norm_pool_gelu_gradient_sums.cuh"

namespace fxfuse::conv_norm_pool_gelu {
namespace {

// G: the type of grad.
template <Operand operand, typename G>
void run(const Tensor& input, const Problem& forward, const Weight& weight, const Tensor& grad, const Weight& of_weight,
         const NormGradient& of_norm_weight, const NormGradient& of_norm_bias, void* of_constants) {
  using T = DataOf<operand>;
  const int num_processors = device_attribute(cudaDevAttrMultiProcessorCount, input.get_device_index());
  const HopperPlan forward_plan = make_hopper_plan<operand>(forward, num_processors);
  const GradientPlan plan = make_gradient_plan<operand>(forward, num_processors);
  constexpr int64_t kPackedBytes = int64_t{kHopperTaps} * GradientTile<operand>::kTerms * GradientTile<operand>::kWeightBytes;
  const int64_t partial_bytes = int64_t{plan.warpgroups()} * kWalkerPartials * sizeof(float), windows_bytes = grad.numel() * sizeof(G);
  const int64_t bytes = forward_plan.packed_bytes + kPackedBytes + partial_bytes + windows_bytes;
  const Tensor workspace = torch::stable::empty(std::vector<int64_t>{bytes}, ScalarType::Byte, std::nullopt, input.device());
  char* const packed_forward = static_cast<char*>(workspace.data_ptr());
  char* const packed = packed_forward + forward_plan.packed_bytes;
  float* const partials = reinterpret_cast<float*>(packed + kPackedBytes);
  void* const windows = packed + kPackedBytes + partial_bytes;  // of each output the gradient of every normalised value in its window
  Problem p = forward;
  p.grad = grad.data_ptr(), p.output = windows;
  launch(input, {ceil_div(forward_plan.packed_bytes / 4, kPackThreads), kPackThreads}, pack_hopper_weight_kernel<operand>, weight,
         reinterpret_cast<uint32_t*>(packed_forward));
  launch(input, {forward_plan.blocks, kHopperThreads, static_cast<size_t>(forward_plan.shared_bytes), true}, hopper_kernel<operand, G>, p,
         forward_plan, static_cast<const char*>(packed_forward));
  p.grad = windows;
  launch(input, {ceil_div(kPackedBytes / kChunkBytes, kPackThreads), kPackThreads}, pack_gradient_weight<operand>, weight,
         reinterpret_cast<uint4*>(packed));
  launch(input, {plan.blocks, kGradientThreads, GradientTile<operand>::kSharedBytes, true}, gradient_kernel<operand, G>, p, plan,
         static_cast<const char*>(packed), partials);
  launch(input, {kJobs * kJobSums, kSumSlices * 128, 0, true}, sum_weight_gradient<T>, plan, partials, of_weight,
         static_cast<T*>(of_constants));
  if (!of_norm_weight.data && !of_norm_bias.data) return;
  launch(input, {kNormSums, kSumSlices * 128}, sum_norm_gradients<T>, plan, partials, of_norm_weight, of_norm_bias);
}

NormGradient norm_gradient(const std::optional<Tensor>& of, const char* name) {
  require(!of || of->is_contiguous(), name, " is not contiguous, but it must be.");
  return {of ? of->data_ptr() : nullptr, of && of->scalar_type() == ScalarType::Float};
}

bool conv_norm_pool_gelu_weight_gradient(const Tensor& grad, const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                         const std::optional<Tensor>& addend, const std::optional<Tensor>& norm_weight,
                                         const std::optional<Tensor>& norm_bias, bool transposed, const std::vector<int64_t>& stride,
                                         const std::vector<int64_t>& padding, const std::vector<int64_t>& output_padding,
                                         double addend_scale, double addend_value, double eps, const std::vector<int64_t>& pool_size,
                                         const std::string& approximate, const std::string& precision, const Tensor& of_weight,
                                         const std::optional<Tensor>& of_norm_weight, const std::optional<Tensor>& of_norm_bias,
                                         const std::optional<Tensor>& of_constants) {
  Arguments call = check_arguments(input, weight, bias, addend, norm_weight, norm_bias, transposed, stride, padding, output_padding,
                                   addend_scale, addend_value, eps, pool_size, approximate, precision, grad.scalar_type());
  require(grad.is_contiguous() && sizes_of(grad).size() == call.output_size.size() &&
              std::equal(call.output_size.begin(), call.output_size.end(), sizes_of(grad).begin()), "grad has shape ", text_of(sizes_of(grad)),
          ", but a contiguous one of the output's shape ", text_of(call.output_size), " is needed.");
  const bool starts_at_a_pair = reinterpret_cast<uintptr_t>(grad.data_ptr()) % (2 * grad.element_size()) == 0;
  require(starts_at_a_pair, "grad starts between two elements of a pair; a copy does not.");
  const NormGradient of_scale = norm_gradient(of_norm_weight, "of_norm_weight"), of_shift = norm_gradient(of_norm_bias, "of_norm_bias");
  const Problem& p = call.problem;
  require(!of_constants || (of_constants->is_contiguous() && of_constants->numel() == p.out_channels &&
                            of_constants->scalar_type() == weight.scalar_type()),
          "of_constants is not a contiguous tensor of the weight's dtype with a value for each output channel, but it must be.");
  const auto attribute = [&](cudaDeviceAttr a) { return device_attribute(a, input.get_device_index()); };
  if (grad.numel() == 0 || !hopper_takes(p, attribute(cudaDevAttrComputeCapabilityMajor), attribute(cudaDevAttrMultiProcessorCount))) return false;
  const Weight from = make_weight(weight, p), to = make_weight(of_weight, p);
  const auto run_as = [&]<Operand operand>() {
    const auto run_of = p.output_is_float ? run<operand, float> : run<operand, DataOf<operand>>;
    run_of(input, p, from, grad, to, of_scale, of_shift, of_constants ? of_constants->data_ptr() : nullptr);
  };
  switch (call.operand) {
    case Operand::Tf32: run_as.template operator()<Operand::Tf32>(); return true;
    case Operand::Bf16: run_as.template operator()<Operand::Bf16>(); return true;
    case Operand::Fp16: run_as.template operator()<Operand::Fp16>(); return true;
    case Operand::Fp32: run_as.template operator()<Operand::Fp32>(); return true;
  }
  return false;
}

}  // namespace
}  // namespace fxfuse::conv_norm_pool_gelu

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CUDA, m) {
  m.impl("conv_norm_pool_gelu_weight_gradient", TORCH_BOX(&fxfuse::conv_norm_pool_gelu::conv_norm_pool_gelu_weight_gradient));
}
