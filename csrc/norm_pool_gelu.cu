// fxfuse::norm_pool_gelu: gelu(avg_pool3d(layer_norm(input + bias[c] + addend))); the tail of conv -> add -> layer_norm -> pool -> gelu.
//
// Why one kernel: apart, the add, the norm and the pool each read and write the convolution's output. Here it is read once and only the
// pooled result is written: 1.07 GB + 0.13 GB in fp32 at [32, 64, 32, 64, 64] pooled by 2. That bounds the time, as long as the
// arithmetic stays inside the issue slots that the loads leave over: some 40 instructions an element in fp32, half of that in 16 bits.
//
//   norm_pool_gelu_plan.cuh           which path, which tiles: pure functions
//   norm_pool_gelu_problem.cuh        what is computed; the arithmetic that the kernels share
//   norm_pool_gelu_rows.cuh           contiguous, norm over W, rows in registers
//   norm_pool_gelu_channels_last.cuh  channels_last_3d, norm over W, rows in shared memory
//   norm_pool_gelu_block.cuh          contiguous, norm over one to three dimensions, in a block's registers
//   norm_pool_gelu_statistics.cuh     everything else: statistics first
//   norm_pool_gelu_launch.cuh         a plan to its kernel
//   this file                         op, registration

#include <string>
#include <vector>

#include "common/args.h"
#include "common/cuda.cuh"
#include "common/params.cuh"
#include "norm_pool_gelu_launch.cuh"
#include "norm_pool_gelu_plan.cuh"

namespace fxfuse::norm_pool_gelu {
namespace {

Axis axis(const NormPoolGeometry& geometry, int i, Ints kernel, Ints stride, Ints padding) {
  return {checked_int(geometry.size[2 + i], "a dimension of the input"), static_cast<int>(geometry.out[i]),
          checked_int(kernel[i], "a kernel size"), checked_int(stride[i], "a stride"), checked_int(padding[i], "a padding")};
}

Tensor norm_pool_gelu(const Tensor& input, const std::optional<Tensor>& bias, const std::optional<Tensor>& addend,
                      const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias, double addend_scale,
                      double addend_value, int64_t norm_ndim, double eps, const std::vector<int64_t>& kernel_size,
                      const std::vector<int64_t>& stride, const std::vector<int64_t>& padding, bool ceil_mode, bool count_include_pad,
                      std::optional<int64_t> divisor_override, const std::string& approximate, std::optional<ScalarType> out_dtype) {
  const NormPoolGeometry geometry = check_norm_pool(input, norm_ndim, kernel_size, stride, padding, ceil_mode, divisor_override);
  const Dims5& size = geometry.size;
  const Ints normalised = sizes_of(input).last(norm_ndim);
  check_parameter(bias, input, "bias", Ints(&size[1], 1));
  check_parameter(norm_weight, input, "norm_weight", normalised);
  check_parameter(norm_bias, input, "norm_bias", normalised);
  const bool addend_on_cpu = addend && is_cpu_scalar(*addend);
  if (addend && !addend_on_cpu) check_joins(*addend, input, "addend");
  const Dims5 addend_strides = addend ? broadcast_strides(*addend, input) : Dims5{};
  const ScalarType dtype = output_dtype(input, out_dtype);
  const bool is_tanh = gelu_is_tanh(approximate);
  Tensor output = torch::stable::new_empty(input, geometry.output_size, dtype);
  if (output.numel() == 0) return output;

  const MemoryOrder order = memory_order(size, as_5d(strides_of(input), 3, 0));
  const Tensor dense = order == MemoryOrder::kOther ? torch::stable::contiguous(input) : input;
  const std::optional<Tensor> dense_bias = dense_parameter(bias), dense_norm_weight = dense_parameter(norm_weight),
                              dense_norm_bias = dense_parameter(norm_bias);

  Problem p;
  p.input = dense.data_ptr();
  p.output = output.data_ptr();
  p.num_n = size[0];
  p.num_channels = checked_int(size[1], "the number of channels");
  p.d = axis(geometry, 0, kernel_size, stride, padding);
  p.h = axis(geometry, 1, kernel_size, stride, padding);
  p.w = axis(geometry, 2, kernel_size, stride, padding);
  p.bias = make_param(dense_bias, input, "bias");
  p.norm_weight = make_param(dense_norm_weight, input, "norm_weight");
  p.norm_bias = make_param(dense_norm_bias, input, "norm_bias");
  p.addend_scale = static_cast<float>(addend_scale);
  p.addend_value = static_cast<float>(addend_on_cpu ? addend_value + addend_scale * cpu_scalar(*addend, input) : addend_value);
  if (!addend_on_cpu) p.addend = make_param(addend, input, "addend");
  checked_int(kernel_size[0] * kernel_size[1], "the number of rows in a window");
  p.addend_strides = {addend_strides[0], addend_strides[1], addend_strides[2], addend_strides[3], addend_strides[4]};
  p.addend_is_per_channel = addend_strides[2] == 0 && addend_strides[3] == 0 && addend_strides[4] == 0;
  p.has_constant = p.bias || (p.addend && p.addend_is_per_channel);
  p.eps = static_cast<float>(eps);
  p.norm_ndim = static_cast<int>(norm_ndim);
  p.channels_last = order == MemoryOrder::kChannelInnermost;
  p.channels_are_aligned = rows_are_aligned(p.input, size[1], kVecBytes / static_cast<int>(input.element_size()), static_cast<int>(input.element_size()));
  p.volume_size = size[2] * size[3] * size[4];
  p.inverse_group_size = static_cast<float>(1. / p.group_size());
  p.whole_windows = p.d.every_window_is_whole() && p.h.every_window_is_whole() && p.w.every_window_is_whole();
  p.count_include_pad = count_include_pad;
  p.divisor_override = static_cast<float>(divisor_override.value_or(0));
  p.inverse_divisor = 1.f / (divisor_override ? p.divisor_override : static_cast<float>(p.window_rows()) * p.w.kernel);
  p.next_row = p.channels_last ? size[4] * size[1] : size[4];
  p.next_plane = (size[3] - p.h.kernel + 1) * p.next_row;
  p.gelu_is_tanh = is_tanh;
  p.output_is_float = dtype == ScalarType::Float;

  const int max_shared_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, input.get_device_index());
  const Plan plan = make_plan(p, static_cast<int>(input.element_size()), max_shared_bytes);
  try {
    dispatch_dtype(input.scalar_type(), [&]<typename T>() {
      std::visit([&](const auto& chosen) { launch_plan<T>(dense, p, chosen); }, plan);
    });
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(error.what()) + " (norm_pool_gelu, " + describe(plan) + ")");
  }
  return output;
}

}  // namespace
}  // namespace fxfuse::norm_pool_gelu

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CUDA, m) { m.impl("norm_pool_gelu", TORCH_BOX(&fxfuse::norm_pool_gelu::norm_pool_gelu)); }
