// fxfuse::conv_gelu_pool: out[n, c] = mean over all pixels of gelu(conv(input, weight) + bias)[n, c].
//
// Why one kernel: the convolution's output is what every other way writes and reads back, 2.11 GB in fp32 at [128, 8, 256, 256] -> 64
// channels, where the input is 268 MB and the result 32 KB. Here it lives in accumulators. What bounds the time then is the 528 million
// GELUs (9 instructions each) and, behind them, the tensor cores.
//
//   conv_gelu_pool.h             arguments and geometry, for every device
//   conv_gelu_pool_arguments.cuh the same as the kernels take them
//   conv_gelu_pool_problem.cuh   shapes, operand types
//   conv_gelu_pool_load.cuh      input boxes in shared memory
//   conv_gelu_pool_shares.cuh    how blocks share the images
//   conv_gelu_pool_sum.cuh       block sums, and the mean of the pieces
//   portable path, mma.sync:     _plan.cuh tiles, _portable_pack.cuh weights, _portable.cuh kernel, _portable.cu launch
//   Hopper path, wgmma:          _hopper_plan.cuh tiles, _hopper_pack.cuh weights, _hopper_load.cuh input, _hopper.cuh kernel,
//                                _hopper.cu launch
//   gradient, on wgmma's path:   _gradient.cuh kernel, _gradient_sums.cuh sums of its parts, _gradient.cu op
//   this file                    choice of the path, workspace, op, registration

#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "conv_gelu_pool_arguments.cuh"
#include "conv_gelu_pool_paths.cuh"
#include "conv_gelu_pool_sum.cuh"

namespace fxfuse::conv_gelu_pool {
namespace {

// ---- plan ------------------------------------------------------------------------------------------------------------

std::shared_ptr<const Plan> make_plan(const ConvShape& shape, bool has_pairs, Product product, int device_index, bool is_portable) {
  const int capability = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, device_index) +
                         device_attribute(cudaDevAttrComputeCapabilityMinor, device_index);
  require(capability >= 80, "the device is sm_", capability, ", but the fused convolution needs sm_80 or newer: use ",
          "fxfuse::gelu_pool behind the convolution.");
  if (capability == 90 && !is_portable) {
    if (auto plan = plan_hopper(shape, has_pairs, product, device_index)) return plan;
  }
  return plan_portable(shape, product, device_index);
}

// Searching the tiles takes longer than a small convolution: once per shape and thread.
std::shared_ptr<const Plan> cached_plan(const ConvShape& shape, bool has_pairs, Product product, int device_index) {
  constexpr size_t kMostPlans = 1024;
  static thread_local std::map<std::tuple<ConvShape, bool, Product, int, bool>, std::shared_ptr<const Plan>> plans;
  const char* const setting = std::getenv("FXFUSE_PORTABLE");
  const bool is_portable = setting && std::string_view(setting) == "1";
  if (plans.size() > kMostPlans) plans.clear();
  auto& plan = plans[{shape, has_pairs, product, device_index, is_portable}];
  if (!plan) plan = make_plan(shape, has_pairs, product, device_index, is_portable);
  return plan;
}

// ---- op --------------------------------------------------------------------------------------------------------------

void run(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const ConvPoolGeometry& g, Product product,
         bool is_tanh, Tensor& out) {
  constexpr int64_t kPartialFloats = 1 << 19;
  const ConvShape shape = shape_of(g);
  const View view = view_of(input, g.dims, g.is_batched);
  check_image(input, view, shape);
  const auto plan = cached_plan(shape, has_pairs(view, shape, input.element_size()), product, input.get_device_index());
  // Images whose partial sums fit into the workspace go together.
  const auto floats_of = [&](int images) { return int64_t{images} * plan->share(images).most_pieces() * shape.channels_out; };
  int images = static_cast<int>(std::min<int64_t>(shape.batch, INT32_MAX / plan->steps));
  while (images > 1 && floats_of(images) > kPartialFloats) images = ceil_div(images, 2);

  const int64_t floats = plan->packed * 4 + floats_of(images);
  const Tensor workspace = empty(input, {floats}, {1}, ScalarType::Float);
  uint4* const packed = static_cast<uint4*>(workspace.data_ptr());
  const ConvData data{.input = view, .weights = packed, .bias = make_param(bias, input, "bias"),
                      .partials = reinterpret_cast<float*>(packed + plan->packed)};
  plan->pack(input, view_of(weight, g.dims, true), data.bias, packed);
  const int64_t mean_blocks = ceil_div(shape.channels_out, kMeanChannels);
  const float scale = static_cast<float>(1.0 / static_cast<double>(shape.out_pixels()));
  for (int64_t first = 0; first < shape.batch; first += images) {
    const int count = static_cast<int>(std::min<int64_t>(images, shape.batch - first));
    const Shares shares = plan->share(count);
    const int mean_threads = std::clamp(ceil_div(shares.most_pieces(), 4) * kWarpSize, kWarpSize, kMeanThreads);
    plan->run(input, data, first, shares, is_tanh);
    dispatch_dtype(out.scalar_type(), [&]<typename Out>() {
      launch(input, {count * mean_blocks, mean_threads, 0, true}, mean_of_pieces<Out>, data.partials,
             static_cast<Out*>(out.data_ptr()) + first * shape.channels_out, shares, shape.channels_out, scale);
    });
  }
}

Tensor conv_gelu_pool(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const std::vector<int64_t>& stride,
                      const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation, bool keepdim,
                      const std::string& approximate, const std::string& precision, std::optional<ScalarType> out_dtype) {
  const ConvPoolGeometry g = check_conv_gelu_pool(input, weight, bias, stride, padding, dilation, keepdim, precision);
  const bool is_tanh = is_tanh_form(approximate);
  Tensor out = empty(input, g.output_size, g.output_stride, output_dtype(input, out_dtype));
  if (out.numel() == 0) return out;
  require(conv_gelu_pool_takes(g.channels_in, g.channels_out, g.kernel[0] * g.kernel[1] * g.kernel[2]), "weight has shape ",
          text_of(sizes_of(weight)), ", but the fused convolution takes 2^19 values: use fxfuse::gelu_pool behind the convolution.");
  const std::optional<Tensor> dense_bias = !bias || bias->is_contiguous() ? bias : torch::stable::contiguous(*bias);
  run(input, weight, dense_bias, g, product_of(input.scalar_type(), precision), is_tanh, out);
  return out;
}

}  // namespace
}  // namespace fxfuse::conv_gelu_pool

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CUDA, m) { m.impl("conv_gelu_pool", TORCH_BOX(&fxfuse::conv_gelu_pool::conv_gelu_pool)); }
