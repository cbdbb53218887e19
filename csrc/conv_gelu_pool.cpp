// fxfuse::conv_gelu_pool on a CPU: torch's convolution, then gelu_pool, which adds the bias. What the fused kernel is for,
// not moving the convolution's output through memory, matters on a GPU; here this makes the op whole on every device.

#include "conv_gelu_pool.h"

#include "common/call.h"
#include "cpu_ops.h"

namespace fxfuse {
namespace {

using Sizes = std::vector<int64_t>;

Tensor convolution(const Tensor& input, const Tensor& weight, const Sizes& stride, const Sizes& padding, const Sizes& dilation) {
  using torch::stable::detail::from;
  return call<9>("aten::convolution", {from(input), from(weight), from(std::optional<Tensor>()), from(stride), from(padding),
                                       from(dilation), from(false), from(Sizes(stride.size(), 0)), from(int64_t{1})});
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
