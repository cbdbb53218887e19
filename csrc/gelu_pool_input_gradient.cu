// fxfuse::gelu_pool_input_gradient: from gelu_pool's output gradient to its input's, for any adaptive size in one to three dims.
//
// Why one kernel: apart, the bias, GELU's gradient and the pool's pass over the convolution's output some six times in fp32. Here it is read
// once and its gradient written once, in its own dtype: 4.2 GB in fp32 at [128, 64, 254, 254]. The sums over pixels that the bias's gradient
// needs come out of the same pass: partial sums a block, then a small kernel that adds them in order.
//
//   gelu_pool_input_gradient_problem.cuh  the kernels' arguments; windows and their shares of the gradient
//   gelu_pool_input_gradient_plan.cuh     tiles: pure functions
//   gelu_pool_input_gradient_kernels.cuh  contiguous and channels_last
//   this file                             launch, op, registration

#include <string>
#include <vector>

#include "common/args.h"
#include "common/cuda.cuh"
#include "common/params.cuh"
#include "common/partial_sums.cuh"
#include "gelu_pool_input_gradient_kernels.cuh"

namespace fxfuse::gelu_pool {
namespace {

template <typename T, bool kTanh, bool kGlobal, int kVec>
void launch_gradient(const Tensor& input, const PoolGradient& pool, const GradientPlan& plan) {
  const auto kernel = pool.channels_last ? gradient_columns_kernel<T, kTanh, kGlobal, kVec> : gradient_rows_kernel<T, kTanh, kGlobal, kVec>;
  const size_t scratch = sizeof(float) * (pool.channels_last ? kThreads * kVec : kWarpSize);
  launch(input, {plan.blocks, kThreads, scratch}, kernel, pool, plan);
}

template <typename T, bool kTanh>
void launch_gradient(const Tensor& input, const PoolGradient& pool, const GradientPlan& plan) {
  const bool is_global = pool.outputs == 1;
  if (plan.vec_len > 1 && is_global) launch_gradient<T, kTanh, true, kVecLen<T>>(input, pool, plan);
  else if (plan.vec_len > 1) launch_gradient<T, kTanh, false, kVecLen<T>>(input, pool, plan);
  else if (is_global) launch_gradient<T, kTanh, true, 1>(input, pool, plan);
  else launch_gradient<T, kTanh, false, 1>(input, pool, plan);
}

void run(const Tensor& input, PoolGradient& pool, bool is_tanh, const std::optional<Tensor>& of_channels) {
  const auto workspace = [&](int64_t size) {
    return torch::stable::empty(std::vector<int64_t>{size}, ScalarType::Float, std::nullopt, input.device());
  };
  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount, input.get_device_index());
  const GradientPlan plan = plan_gradient(pool, static_cast<int>(input.element_size()), num_sms);
  const int64_t rows = pool.batch * pool.channels, num_shares = rows * pool.outputs;
  const Tensor shares = workspace(num_shares), parts = workspace(of_channels ? rows * plan.chunks : 0);
  pool.shares = static_cast<float*>(shares.data_ptr());
  pool.parts = of_channels ? static_cast<float*>(parts.data_ptr()) : nullptr;
  try {
    dispatch_dtype(input.scalar_type(), [&]<typename T>() {
      launch(input, {ceil_div(num_shares, kThreads), kThreads}, share_kernel<T>, pool);
      if (is_tanh) launch_gradient<T, true>(input, pool, plan);
      else launch_gradient<T, false>(input, pool, plan);
    });
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(error.what()) + " (gelu_pool_input_gradient, " + plan.describe() + ")");
  }
  if (!of_channels) return;
  float* sums = static_cast<float*>(of_channels->data_ptr());
  if (pool.channels_last) sum_parts(input, pool.parts, sums, pool.batch, plan.chunks, pool.channels);
  else sum_parts(input, pool.parts, sums, rows, plan.chunks, 1);
}

// ---- op ----------------------------------------------------------------------------------------------------------

bool has_shape(const Tensor& tensor, const std::vector<int64_t>& shape) {
  const Ints given = sizes_of(tensor);
  return std::equal(given.begin(), given.end(), shape.begin(), shape.end());
}

MemoryOrder check_buffers(const Tensor& grad, const Tensor& input, const Tensor& of_input, const std::optional<Tensor>& of_channels,
                          const GeluPoolGeometry& geometry, int64_t num_spatial) {
  const Ints own = sizes_of(input), given = sizes_of(grad);
  const MemoryOrder order = memory_order(geometry.size, as_5d(strides_of(input), num_spatial, 0));
  require(order != MemoryOrder::kOther, "input is neither contiguous nor channels_last: make it one of them.");
  require(has_shape(of_input, {own.begin(), own.end()}) && of_input.scalar_type() == input.scalar_type() &&
              of_input.get_device_index() == input.get_device_index() &&
              memory_order(geometry.size, as_5d(strides_of(of_input), num_spatial, 0)) == order,
          "of_input must have the shape, dtype, memory order and device of the input.");
  require(has_shape(grad, geometry.output_size) && grad.is_contiguous(), "grad has shape ", text_of(given), ", but contiguous ",
          text_of(geometry.output_size), " is needed.");
  require(!of_channels || (has_shape(*of_channels, {geometry.size[0], geometry.size[1]}) && of_channels->scalar_type() == ScalarType::Float &&
                           of_channels->is_contiguous() && of_channels->get_device_index() == input.get_device_index()),
          "of_channels must be contiguous float32 [N, C] on the input's device.");
  return order;
}

void gelu_pool_input_gradient(const Tensor& grad, const Tensor& input, const std::optional<Tensor>& bias, const std::vector<int64_t>& output_size,
                              const std::string& approximate, Tensor of_input, std::optional<Tensor> of_channels) {
  const auto num_spatial = static_cast<int64_t>(output_size.size());
  const GeluPoolGeometry geometry = check_gelu_pool(input, output_size, true);
  require(input.dim() == num_spatial + 2, "input has shape ", text_of(sizes_of(input)), ", but [N, C, *spatial] is needed.");
  const Dims5& size = geometry.size;
  const MemoryOrder order = check_buffers(grad, input, of_input, of_channels, geometry, num_spatial);
  check_parameter(bias, input, "bias", Ints(&size[1], 1));
  const bool is_tanh = gelu_is_tanh(approximate);
  const int64_t pixels = size[2] * size[3] * size[4], outputs = geometry.out[0] * geometry.out[1] * geometry.out[2];
  require(outputs > 0, "output_size is ", text_of(output_size), ", but without windows there is no gradient.");
  for (int i = 0; i < 3; ++i) {
    require((size[2 + i] + 1) * (geometry.out[i] + 1) < INT32_MAX, "output_size is ", text_of(output_size), " for an input of shape ",
            text_of(sizes_of(input)), ", but their products must be less than 2^31 along each dimension.");
  }
  require(pixels < int64_t{1} << 30, "a channel has ", pixels, " pixels, but less than 2^30 are supported.");
  if (input.numel() == 0) {
    if (of_channels) torch::stable::zero_(*of_channels);
    return;
  }
  const std::optional<Tensor> dense_bias = dense_parameter(bias);
  PoolGradient pool{.input = input.data_ptr(), .of_input = of_input.data_ptr(), .grad = make_param(grad, input, "grad"),
                    .bias = make_param(dense_bias, input, "bias"), .shares = nullptr, .parts = nullptr, .batch = size[0],
                    .channels = checked_int(size[1], "the number of channels"), .pixels = static_cast<int>(pixels),
                    .outputs = static_cast<int>(outputs), .d = {size[2], geometry.out[0]}, .h = {size[3], geometry.out[1]},
                    .w = {size[4], geometry.out[2]}, .channels_last = order == MemoryOrder::kChannelInnermost};
  run(input, pool, is_tanh, of_channels);
}

}  // namespace
}  // namespace fxfuse::gelu_pool

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CUDA, m) {
  m.impl("gelu_pool_input_gradient", TORCH_BOX(&fxfuse::gelu_pool::gelu_pool_input_gradient));
}
