// fxfuse::conv_gelu_pool_weight_gradient: gradients of conv_gelu_pool with respect to weight and bias; false, and nothing done, for what
// the kernel does not take: the convolution is then computed again by its library (fxfuse/recompute.py).

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "conv_gelu_pool_arguments.cuh"
#include "conv_gelu_pool_gradient_sums.cuh"

namespace fxfuse::conv_gelu_pool {
namespace {

Product gradient_product(ScalarType dtype, std::string_view precision) {
  const Product product = product_of(dtype, precision);
  return product == Product::Fp32 ? Product::Bf16Triple : product == Product::Tf32 ? Product::Bf16Pair : product;
}

std::optional<HopperTiling> gradient_tiling(const ConvShape& shape, bool has_pairs, Product product, int device_index) {
  constexpr int kMostGroups = 3;  // beyond, computing x again for each costs more than it saves
  const int capability = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, device_index) +
                         device_attribute(cudaDevAttrComputeCapabilityMinor, device_index);
  if (capability != 90 || GradientLines(shape, ceil_div(shape.channels_in, chunk_len(product))).groups > kMostGroups) return std::nullopt;
  return make_hopper_tiling(shape, has_pairs, hopper_needs(product, gradient_blocks_per_sm(product), kGradientBytes, device_index));
}

// Once per shape and thread, as the forward's.
const std::optional<HopperTiling>& cached_tiling(const ConvShape& shape, bool has_pairs, Product product, int device_index) {
  constexpr size_t kMostPlans = 1024;
  static thread_local std::map<std::tuple<ConvShape, bool, Product, int>, std::optional<HopperTiling>> tilings;
  if (tilings.size() > kMostPlans) tilings.clear();
  const auto [found, is_new] = tilings.try_emplace({shape, has_pairs, product, device_index});
  if (is_new) found->second = gradient_tiling(shape, has_pairs, product, device_index);
  return found->second;
}

template <typename F>
void dispatch_gradient(Product product, F&& f) {
  if (product == Product::Bf16) f.template operator()<Product::Bf16>();
  else if (product == Product::Fp16) f.template operator()<Product::Fp16>();
  else if (product == Product::Bf16Pair) f.template operator()<Product::Bf16Pair>();
  else f.template operator()<Product::Bf16Triple>();
}

// Calls f.operator()<is_tanh, bias_in_k, wide>().
template <Product product, typename F>
void dispatch_variant(bool is_tanh, bool bias_in_k, int wide, F&& f) {
  const auto by_width = [&]<bool kTanh, bool kBiasInK>() {
    if (wide == 3) f.template operator()<kTanh, kBiasInK, 3>();
    else f.template operator()<kTanh, kBiasInK, 1>();
  };
  const auto by_bias = [&]<bool kTanh>() {
    if constexpr (Operand<product>::kSplits == 1) {
      if (bias_in_k) return by_width.template operator()<kTanh, true>();
    }
    by_width.template operator()<kTanh, false>();
  };
  if (is_tanh) by_bias.template operator()<true>();
  else by_bias.template operator()<false>();
}

void run(const Tensor& grad, const Tensor& input, const View& weight, const std::optional<Tensor>& bias, GradientJob& job, Product product,
         bool is_tanh, GradientSums& sums) {
  const HopperTiling& tiling = job.walk.tiling;
  const int row_tiles = ceil_div(job.walk.shape.channels_out, kHopperRows), places = row_tiles * job.lines.groups;
  const int64_t packed = packed_weights(job.walk.shape, tiling, num_splits(product));
  const int64_t steps = job.walk.shape.batch * tiling.steps(), blocks = std::clamp<int64_t>(tiling.blocks / job.lines.groups, 1, steps);
  const Tensor workspace = empty(input, {packed * 4 + blocks * places * kGradientEntries * kHopperThreads}, {1}, ScalarType::Float);
  uint4* const weights = static_cast<uint4*>(workspace.data_ptr());
  job.walk.data.weights = weights, job.walk.data.partials = reinterpret_cast<float*>(weights + packed);
  job.walk.data.bias = make_param(bias, input, "bias");
  job.walk.shares = {static_cast<int>(job.walk.shape.batch), tiling.steps(), static_cast<int>(blocks)};
  job.walk.row_tiles = FastDiv(places), job.walk.steps = FastDiv(tiling.steps());
  job.walk.width = FastDiv(tiling.box[1]), job.walk.depth = FastDiv(tiling.box[0]);
  job.grad = make_param(grad, input, "grad");
  sums.partials = job.walk.data.partials, sums.shares = static_cast<int>(blocks), sums.row_tiles = row_tiles;
  dispatch_gradient(product, [&]<Product p>() {
    constexpr int kThreads = 256;
    const int64_t chunks = packed / num_splits(product);
    launch(input, {ceil_div(chunks, kThreads), kThreads}, pack_hopper<p>, weight, job.walk.data.bias, job.walk.shape, tiling.chunks,
           tiling.k_steps, chunks, weights);
    dispatch_variant<p>(is_tanh, tiling.has_spare_chunk, job.lines.wide, [&]<bool kTanh, bool kBiasInK, int kWide>() {
      launch(input, {blocks * places, kHopperThreads, tiling.shared_bytes, true}, conv_hopper_gradient<p, kTanh, kBiasInK, kWide>, job);
    });
    launch(input, {int64_t{places} * kGradientEntries, kSumSlices * kHopperThreads, 0, true},
           sum_of_shares<typename Operand<p>::Element>, sums);
  });
}

bool conv_gelu_pool_weight_gradient(const Tensor& grad, const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                                    const std::vector<int64_t>& dilation, const std::string& approximate, const std::string& precision,
                                    const Tensor& of_weight, const std::optional<Tensor>& of_bias) {
  const ConvPoolGeometry g = check_conv_gelu_pool(input, weight, bias, stride, padding, dilation, true, precision);
  require(grad.is_contiguous() && grad.numel() == g.batch * g.channels_out, "grad has shape ", text_of(sizes_of(grad)),
          ", but a contiguous value for each image and output channel is needed.");
  const Product product = gradient_product(input.scalar_type(), precision);
  if (grad.numel() == 0 || !conv_gelu_pool_takes(g.channels_in, g.channels_out, g.kernel[0] * g.kernel[1] * g.kernel[2])) return false;
  const ConvShape given = shape_of(g), shape = is_turned(given) ? turned(given) : given;
  const auto turned_view = [&](View view) {
    if (is_turned(given)) std::swap(view.pixel[1], view.pixel[2]);
    return view;
  };
  const View view = view_of(input, g.dims, g.is_batched);
  check_image(input, view, given);
  const bool pairs = has_pairs(view, given, input.element_size()) && !is_turned(given);
  const std::optional<HopperTiling>& tiling = cached_tiling(shape, pairs, product, input.get_device_index());
  if (!tiling || shape.batch * tiling->steps() > INT32_MAX) return false;
  const std::optional<Tensor> dense_bias = bias ? std::optional(torch::stable::contiguous(*bias)) : std::nullopt;
  const GradientLines lines(shape, tiling->chunks);
  GradientJob job{.walk = {.shape = shape, .tiling = *tiling, .data = {.input = turned_view(view)}, .first_image = 0, .shares = {1, 1, 1}},
                  .lines = lines, .grad = {}, .scale = static_cast<float>(1.0 / static_cast<double>(shape.out_pixels()))};
  GradientSums sums{.shape = shape, .lines = lines, .partials = nullptr, .shares = 0, .row_tiles = 0,
                    .of_weight = turned_view(view_of(of_weight, g.dims, true)), .of_bias = of_bias ? of_bias->data_ptr() : nullptr,
                    .bias_is_float = of_bias && of_bias->scalar_type() == ScalarType::Float};
  run(grad, input, turned_view(view_of(weight, g.dims, true)), dense_bias, job, product, is_tanh_form(approximate), sums);
  return true;
}

}  // namespace
}  // namespace fxfuse::conv_gelu_pool

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CUDA, m) {
  m.impl("conv_gelu_pool_weight_gradient", TORCH_BOX(&fxfuse::conv_gelu_pool::conv_gelu_pool_weight_gradient));
}
