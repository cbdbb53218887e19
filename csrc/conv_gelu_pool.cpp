// fxfuse::conv_gelu_pool on a CPU: the dispatcher's convolution, then gelu_pool, which adds the bias. What the fused kernel is for,
// not moving the convolution's output through memory, matters on a GPU; here this makes the op whole on every device.

#include "conv_gelu_pool.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace fxfuse {
namespace {

using Sizes = std::vector<int64_t>;

Tensor convolution(const Tensor& input, const Tensor& weight, const Sizes& stride, const Sizes& padding, const Sizes& dilation) {
  using torch::stable::detail::from;
  std::array<StableIValue, 9> stack{from(input), from(weight), from(std::optional<Tensor>()), from(stride), from(padding), from(dilation),
                                    from(false), from(Sizes(stride.size(), 0)), from(int64_t{1})};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::convolution", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor gelu_pool(const Tensor& input, const std::optional<Tensor>& bias, const Sizes& output_size, bool keepdim,
                 const std::string& approximate, std::optional<ScalarType> out_dtype) {
  using torch::stable::detail::from;
  std::array<StableIValue, 6> stack{from(input), from(bias), from(output_size), from(keepdim), from(approximate), from(out_dtype)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("fxfuse::gelu_pool", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// One value for all dimensions as one for each.
Sizes for_each_dim(const Sizes& values, int64_t dims) { return values.size() == 1 ? Sizes(dims, values[0]) : values; }

Tensor conv_gelu_pool(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const Sizes& stride,
                      const Sizes& padding, const Sizes& dilation, bool keepdim, const std::string& approximate,
                      const std::string& precision, std::optional<ScalarType> out_dtype) {
  const ConvPoolGeometry g = check_conv_gelu_pool(input, weight, bias, stride, padding, dilation, keepdim, precision);
  // aten::convolution takes batches only.
  const Tensor batch = g.is_batched ? input : torch::stable::unsqueeze(input, 0);
  const Tensor y = convolution(batch, weight, for_each_dim(stride, g.dims), for_each_dim(padding, g.dims),
                               for_each_dim(dilation, g.dims));
  return gelu_pool(g.is_batched ? y : torch::stable::squeeze(y, 0), bias, Sizes(g.dims, 1), keepdim, approximate, out_dtype);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CPU, m) { m.impl("conv_gelu_pool", TORCH_BOX(&conv_gelu_pool)); }

}  // namespace fxfuse
