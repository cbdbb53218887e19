// fxfuse::conv_norm_pool_gelu on a CPU: torch's convolution, then the tail op norm_pool_gelu. Here the convolution's output does
// reach memory: it is the convolution that takes the time, and the graph, its export and its tests stay the same on every device.

#include <string>
#include <vector>

#include "common/args.h"
#include "common/call.h"
#include "cpu_ops.h"

namespace fxfuse {
namespace {

using torch::stable::detail::from;

Tensor conv_norm_pool_gelu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                           const std::optional<Tensor>& addend, const std::optional<Tensor>& norm_weight,
                           const std::optional<Tensor>& norm_bias, bool transposed, const std::vector<int64_t>& stride,
                           const std::vector<int64_t>& padding, const std::vector<int64_t>& output_padding, double addend_scale,
                           double addend_value, double eps, const std::vector<int64_t>& pool_size, const std::string& approximate,
                           const std::string& precision, std::optional<ScalarType> out_dtype) {
  check_input_dtype(input);
  const Ints own = sizes_of(input);
  require(own.size() == 4 || own.size() == 5, "input has shape ", text_of(own), ", but [N, C, D, H, W] or [C, D, H, W] is needed.");
  require(precision == "tf32" || precision == "ieee", "precision is '", precision, "', but 'tf32' or 'ieee' is needed.");

  const bool batched = own.size() == 5;
  const std::vector<int64_t> dilation{1, 1, 1}, no_padding{0, 0, 0};
  constexpr int64_t kGroups = 1, kNormNdim = 1;
  const Tensor batch = batched ? input : torch::stable::unsqueeze(input, 0);
  const Tensor output = call<9>("aten::convolution", {from(batch), from(weight), from(std::nullopt), from(stride), from(padding),
                                                      from(dilation), from(transposed), from(output_padding), from(kGroups)});
  return norm_pool_gelu(batched ? output : torch::stable::squeeze(output, 0), bias, addend, norm_weight, norm_bias, addend_scale,
                        addend_value, kNormNdim, eps, pool_size, pool_size, no_padding, false, true, std::nullopt, approximate, out_dtype);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CPU, m) { m.impl("conv_norm_pool_gelu", TORCH_BOX(&conv_norm_pool_gelu)); }

}  // namespace fxfuse
