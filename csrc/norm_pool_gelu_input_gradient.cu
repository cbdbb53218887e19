// fxfuse::norm_pool_gelu_input_gradient: from norm_pool_gelu's output gradient to its input's, for norms over W and windows side by side.
//
// Why one kernel: apart, the norm, the pool, GELU and their gradients pass over the convolution's output some six times in fp32. Here it is
// read once and its gradient written once, in its own dtype: 2.15 GB in fp32 at [32, 64, 32, 64, 64]. Sums for the parameters come out of
// the same pass: over rows for weight and bias of the norm, over channels for what joins the input; partial sums a block, then a small
// kernel that adds them in order.
//
//   norm_pool_gelu_input_gradient_plan.cuh           which path, which tiles: pure functions
//   norm_pool_gelu_input_gradient_problem.cuh        what is computed
//   norm_pool_gelu_input_gradient_rows.cuh           contiguous, rows in registers: _lanes.cuh reads and normalises them
//   norm_pool_gelu_input_gradient_channels_last.cuh  channels_last_3d, rows in shared memory: _column.cuh has a thread's part of them
//   norm_pool_gelu_input_gradient_launch.cuh         a plan to its kernel; a .cu an input dtype
//   this file                                        workspaces, op, registration

#include <string>
#include <vector>

#include "common/args.h"
#include "common/cuda.cuh"
#include "common/params.cuh"
#include "common/partial_sums.cuh"
#include "norm_pool_gelu_input_gradient_launch.cuh"

namespace fxfuse::norm_pool_gelu {
namespace {

// ---- launch ------------------------------------------------------------------------------------------------------

void zero_uncovered_rows(const Tensor& input, const GradientProblem& gradient) {
  const Problem& p = gradient.forward;
  const UncoveredRows uncovered{p.d.input, p.d.output * p.d.kernel, p.h.input, p.h.output * p.h.kernel,
                                p.channels_last ? int64_t{p.num_channels} * p.w.input : p.w.input};
  if (uncovered.covered_planes == uncovered.planes && uncovered.covered_rows == uncovered.rows) return;
  const int64_t planes = p.num_n * (p.channels_last ? 1 : p.num_channels) * p.d.input;
  dispatch_dtype(input.scalar_type(), [&]<typename T>() {
    launch(input, {planes, kZeroThreads}, zero_uncovered_rows_kernel<T>, static_cast<T*>(gradient.of_input), uncovered);
  });
}

// channel_parts: partial sums for each sample and channel. One set of norm_parts a block.
template <typename Plan>
void run(const Tensor& input, GradientProblem gradient, const Plan& plan, int64_t channel_parts, const std::optional<Tensor>& of_channels,
         const std::optional<Tensor>& of_norm) {
  const Problem& p = gradient.forward;
  const auto workspace = [&](bool is_asked, int64_t size) {
    return torch::stable::empty(std::vector<int64_t>{is_asked ? size : 0}, ScalarType::Float, std::nullopt, input.device());
  };
  const int64_t channels = p.num_n * p.num_channels, width = p.w.input;
  const Tensor of_blocks = workspace(of_norm.has_value(), plan.blocks * 2 * width);
  const Tensor of_rows = workspace(of_channels.has_value(), channels * channel_parts);
  if (of_norm) gradient.norm_parts = static_cast<float*>(of_blocks.data_ptr());
  if (of_channels) gradient.channel_parts = static_cast<float*>(of_rows.data_ptr());
  try {
    dispatch_dtype(input.scalar_type(), [&]<typename T>() { launch_gradient<T>(input, gradient, plan); });
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(error.what()) + " (norm_pool_gelu_input_gradient, " + plan.describe() + ")");
  }
  if (of_norm) sum_parts(input, gradient.norm_parts, static_cast<float*>(of_norm->data_ptr()), 1, plan.blocks, 2 * width);
  if (!of_channels) return;
  float* sums = static_cast<float*>(of_channels->data_ptr());
  if (p.channels_last) sum_parts(input, gradient.channel_parts, sums, p.num_n, channel_parts, p.num_channels);
  else sum_parts(input, gradient.channel_parts, sums, channels, channel_parts, 1);
}

// ---- op ----------------------------------------------------------------------------------------------------------

void check_sums(const std::optional<Tensor>& sums, const Tensor& input, const char* name, std::vector<int64_t> shape) {
  if (!sums) return;
  require(sums->scalar_type() == ScalarType::Float && sums->is_contiguous() && sums->get_device_index() == input.get_device_index(), name,
          " must be contiguous float32 on the input's device.");
  const Ints given = sizes_of(*sums);
  require(std::equal(given.begin(), given.end(), shape.begin(), shape.end()), name, " has shape ", text_of(given), ", but ", text_of(shape),
          " is needed.");
}

MemoryOrder check_buffers(const Tensor& grad, const Tensor& input, const Tensor& of_input, const NormPoolGeometry& geometry) {
  const Ints own = sizes_of(input), given = sizes_of(grad), made = sizes_of(of_input);
  require(own.size() == 5, "input has shape ", text_of(own), ", but [N, C, D, H, W] is needed.");
  const MemoryOrder order = memory_order(geometry.size, as_5d(strides_of(input), 3, 0));
  require(order != MemoryOrder::kOther, "input is neither contiguous nor channels_last_3d: make it one of them.");
  require(std::equal(own.begin(), own.end(), made.begin(), made.end()) && of_input.scalar_type() == input.scalar_type() &&
              of_input.get_device_index() == input.get_device_index() && memory_order(geometry.size, as_5d(strides_of(of_input), 3, 0)) == order,
          "of_input must have the shape, dtype, memory order and device of the input.");
  require(std::equal(given.begin(), given.end(), geometry.output_size.begin(), geometry.output_size.end()) && grad.is_contiguous(), "grad has shape ",
          text_of(given), ", but contiguous ", text_of(geometry.output_size), " is needed.");
  return order;
}

void norm_pool_gelu_input_gradient(const Tensor& grad, const Tensor& input, const std::optional<Tensor>& bias, const std::optional<Tensor>& addend,
                                   const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias, double addend_scale,
                                   double addend_value, double eps, const std::vector<int64_t>& pool_size, const std::string& approximate,
                                   Tensor of_input, std::optional<Tensor> of_channels, std::optional<Tensor> of_norm) {
  const std::vector<int64_t> no_padding(3, 0);
  const NormPoolGeometry geometry = check_norm_pool(input, 1, pool_size, pool_size, no_padding, false, std::nullopt);
  const Dims5& size = geometry.size;
  const MemoryOrder order = check_buffers(grad, input, of_input, geometry);
  check_parameter(bias, input, "bias", Ints(&size[1], 1));
  check_parameter(norm_weight, input, "norm_weight", Ints(&size[4], 1));
  check_parameter(norm_bias, input, "norm_bias", Ints(&size[4], 1));
  check_sums(of_channels, input, "of_channels", {size[0], size[1]});
  check_sums(of_norm, input, "of_norm", {2, size[4]});
  const bool addend_on_cpu = addend && is_cpu_scalar(*addend);
  if (addend && !addend_on_cpu) check_joins(*addend, input, "addend");
  const Dims5 strides = addend ? broadcast_strides(*addend, input) : Dims5{};
  const bool is_tanh = gelu_is_tanh(approximate);
  if (input.numel() == 0) {
    if (of_norm) torch::stable::zero_(*of_norm);
    return;
  }
  const std::optional<Tensor> dense_bias = dense_parameter(bias), dense_weight = dense_parameter(norm_weight),
                              dense_shift = dense_parameter(norm_bias);

  GradientProblem gradient;
  gradient.grad = make_param(grad, input, "grad");
  gradient.of_input = of_input.data_ptr();
  gradient.channel_parts = gradient.norm_parts = nullptr;
  gradient.by_kernel_w = FastDiv(pool_size[2]);
  Problem& p = gradient.forward;
  const auto axis = [&](int i) {
    const int kernel = checked_int(pool_size[i], "a pool size");
    return Axis{checked_int(size[2 + i], "a dimension of the input"), static_cast<int>(geometry.out[i]), kernel, kernel, 0};
  };
  p.input = input.data_ptr();
  p.num_n = size[0];
  p.num_channels = checked_int(size[1], "the number of channels");
  p.d = axis(0), p.h = axis(1), p.w = axis(2);
  p.bias = make_param(dense_bias, input, "bias");
  p.norm_weight = make_param(dense_weight, input, "norm_weight");
  p.norm_bias = make_param(dense_shift, input, "norm_bias");
  p.addend_scale = static_cast<float>(addend_scale);
  p.addend_value = static_cast<float>(addend_on_cpu ? addend_value + addend_scale * cpu_scalar(*addend, input) : addend_value);
  if (!addend_on_cpu) p.addend = make_param(addend, input, "addend");
  p.addend_strides = {strides[0], strides[1], strides[2], strides[3], strides[4]};
  p.addend_is_per_channel = strides[2] == 0 && strides[3] == 0 && strides[4] == 0;
  p.has_constant = p.bias || (p.addend && p.addend_is_per_channel);
  p.eps = static_cast<float>(eps);
  p.channels_last = order == MemoryOrder::kChannelInnermost;
  p.volume_size = size[2] * size[3] * size[4];
  p.inverse_group_size = static_cast<float>(1. / size[4]);
  p.inverse_divisor = static_cast<float>(1. / (static_cast<double>(pool_size[0]) * pool_size[1] * pool_size[2]));
  p.next_row = p.channels_last ? size[4] * size[1] : size[4];
  p.next_plane = (size[3] - p.h.kernel + 1) * p.next_row;
  p.gelu_is_tanh = is_tanh;
  check(!p.channels_last || p.addend_is_per_channel, "addend varies within a channel, which needs contiguous input: make it contiguous");
  check(p.num_n * p.num_channels * p.output_rows() <= INT32_MAX, "the output has more than 2^31 - 1 rows: split the batch");

  const int element_size = static_cast<int>(input.element_size()), device = input.get_device_index();
  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount, device);
  zero_uncovered_rows(input, gradient);
  if (p.channels_last) {
    const auto plan = plan_gradient_channels(gradient, element_size, num_sms, device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return run(input, gradient, plan, plan.chunks, of_channels, of_norm);
  }
  run(input, gradient, plan_gradient_rows(gradient, element_size, num_sms), p.output_rows(), of_channels, of_norm);
}

}  // namespace
}  // namespace fxfuse::norm_pool_gelu

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CUDA, m) {
  m.impl("norm_pool_gelu_input_gradient", TORCH_BOX(&fxfuse::norm_pool_gelu::norm_pool_gelu_input_gradient));
}
