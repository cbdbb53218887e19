// fxfuse::conv_gelu_pool: out[n, c] = mean over all pixels of gelu(conv(input, weight) + bias)[n, c].
//
// Why one kernel: the convolution's output is what every other way writes and reads back, 2.11 GB in fp32 at [128, 8, 256, 256] -> 64
// channels, where the input is 268 MB and the result 32 KB. Here it lives in accumulators. What bounds the time then is the 528 million
// GELUs (9 instructions each) and, behind them, the tensor cores.
//
//   conv_gelu_pool.h             arguments and geometry, for every device
//   conv_gelu_pool_problem.cuh   shapes, operand types
//   conv_gelu_pool_load.cuh      input boxes in shared memory
//   conv_gelu_pool_shares.cuh    how blocks share the images
//   conv_gelu_pool_sum.cuh       block sums, and the mean of the pieces
//   portable path, mma.sync:     _plan.cuh tiles, _portable_pack.cuh weights, _portable.cuh kernel, _portable.cu launch
//   Hopper path, wgmma:          _hopper_plan.cuh tiles, _hopper_pack.cuh weights, _hopper_load.cuh input, _hopper.cuh kernel,
//                                _hopper.cu launch
//   this file                    choice of the path, workspace, op, registration

#include "conv_gelu_pool.h"

#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <vector>

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

Tensor empty(const Tensor& input, const std::vector<int64_t>& size, const std::vector<int64_t>& stride, ScalarType dtype) {
  AtenTensorHandle handle = nullptr;
  const auto dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(size.size()), size.data(), stride.data(), dtype_code,
                                                  aoti_torch_device_type_cuda(), input.get_device_index(), &handle));
  return Tensor(handle);
}

ConvShape shape_of(const ConvPoolGeometry& g) {
  ConvShape shape{.batch = g.batch, .channels_in = static_cast<int>(g.channels_in), .channels_out = static_cast<int>(g.channels_out)};
  for (int i = 0; i < 3; ++i) {
    const int64_t largest = std::max({g.in[i] + 2 * g.padding[i], g.kernel[i] * g.dilation[i], g.stride[i]});
    require(largest < (1 << 30), "one dimension of the convolution reaches ", largest, ", but the fused convolution ",
            "takes less than 2^30: use fxfuse::gelu_pool behind the convolution.");
    shape.in[i] = static_cast<int>(g.in[i]), shape.out[i] = static_cast<int>(g.out[i]);
    shape.kernel[i] = static_cast<int>(g.kernel[i]), shape.stride[i] = static_cast<int>(g.stride[i]);
    shape.padding[i] = static_cast<int>(g.padding[i]), shape.dilation[i] = static_cast<int>(g.dilation[i]);
  }
  return shape;
}

// Offsets within one image are 32 bits; those of the image itself are 64.
void check_image(const Tensor& input, const View& view, const ConvShape& shape) {
  int64_t last = (shape.channels_in - 1) * view.channel;
  for (int i = 0; i < 3; ++i) last += (shape.in[i] - 1) * view.pixel[i];
  require(last < INT32_MAX, "input has shape ", text_of(sizes_of(input)), " and strides ", text_of(strides_of(input)),
          ", but one image of the fused convolution spans 2^31 elements at most: use fxfuse::gelu_pool behind the convolution.");
}

View view_of(const Tensor& tensor, int64_t dims, bool has_outer) {
  const int64_t rank = tensor.dim(), vec_len = kChunkBytes / tensor.element_size();
  View view{.data = tensor.data_ptr(), .outer = has_outer ? tensor.stride(0) : 0, .channel = tensor.stride(rank - dims - 1), .pixel = {}};
  bool is_wide = (view.channel == 1 || tensor.size(rank - dims - 1) == 1) && tensor.size(rank - dims - 1) % vec_len == 0 &&
                 view.outer % vec_len == 0 && reinterpret_cast<uintptr_t>(view.data) % kChunkBytes == 0;
  for (int64_t i = 0; i < dims; ++i) {
    view.pixel[3 - dims + i] = tensor.stride(rank - dims + i);
    is_wide &= tensor.stride(rank - dims + i) % vec_len == 0;
  }
  view.is_wide = is_wide;
  return view;
}

// Whether memory lets a load bring two neighbours along the width: they lie side by side, and all pairs are aligned.
bool has_pairs(const View& input, const ConvShape& shape, int64_t element_size) {
  const auto is_even = [](int64_t stride, int64_t size) { return size == 1 || stride % 2 == 0; };
  return input.pixel[2] == 1 && shape.in[2] % 2 == 0 && is_even(input.outer, shape.batch) && is_even(input.channel, shape.channels_in) &&
         is_even(input.pixel[0], shape.in[0]) && is_even(input.pixel[1], shape.in[1]) &&
         reinterpret_cast<uintptr_t>(input.data) % (2 * element_size) == 0 && input.channel * element_size <= UINT32_MAX;
}

Product product_of(ScalarType dtype, std::string_view precision) {
  if (dtype == ScalarType::BFloat16) return Product::Bf16;
  if (dtype == ScalarType::Half) return Product::Fp16;
  return precision == "tf32" ? Product::Tf32 : Product::Fp32;
}

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
