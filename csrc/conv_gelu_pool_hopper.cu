// conv_gelu_pool, Hopper path: plan and launch.

#include "conv_gelu_pool_hopper.cuh"
#include "conv_gelu_pool_paths.cuh"

namespace fxfuse::conv_gelu_pool {
namespace {

struct HopperPlan final : Plan {
  ConvShape shape;
  bool is_turned;
  Product product;
  HopperTiling tiling;

  Shares share(int images) const override {
    const int64_t blocks = int64_t{tiling.blocks} * images / shape.batch;
    return {images, steps, static_cast<int>(std::clamp<int64_t>(blocks, 1, int64_t{images} * steps))};
  }

  void pack(const Tensor& on, const View& weight, const Param& bias, uint4* to) const override {
    constexpr int kThreads = 256;
    const int64_t chunks = packed / num_splits(product);
    dispatch_product(product, [&]<Product p>() {
      launch(on, {ceil_div(chunks, kThreads), kThreads}, pack_hopper<p>, turned_view(weight), bias, shape, tiling.chunks, tiling.k_steps,
             chunks, to);
    });
  }

  void run(const Tensor& on, const ConvData& data, int64_t first_image, const Shares& shares, bool is_tanh) const override {
    const int row_tiles = ceil_div(shape.channels_out, kHopperRows);
    HopperJob job{.shape = shape, .tiling = tiling, .data = data, .width = FastDiv(tiling.box[1]), .depth = FastDiv(tiling.box[0]),
                  .first_image = first_image, .shares = shares,
                  .row_tiles = FastDiv(row_tiles), .steps = FastDiv(steps)};
    job.data.input = turned_view(data.input);
    const LaunchConfig config{int64_t{shares.blocks} * row_tiles, kHopperThreads, tiling.shared_bytes, true};
    dispatch_product(product, [&]<Product p>() {
      const auto run_kernel = [&]<bool kBiasInK, int kSteps>() {
        launch(on, config, is_tanh ? conv_hopper<p, Gelu::Tanh, kBiasInK, kSteps> : conv_hopper<p, kExactForm<p>, kBiasInK, kSteps>, job);
      };
      if constexpr (p == Product::Fp32) {
        if (tiling.k_steps == 9) run_kernel.template operator()<false, 9>();
        else run_kernel.template operator()<false, 0>();
      } else if (tiling.has_spare_chunk && tiling.k_steps == 5) run_kernel.template operator()<true, 5>();  // a chunk of channels, 3x3 taps
      else if (tiling.has_spare_chunk) run_kernel.template operator()<true, 0>();
      else if (tiling.k_steps == 9) run_kernel.template operator()<false, 9>();  // two
      else run_kernel.template operator()<false, 0>();
    });
  }

 private:
  View turned_view(View view) const {
    if (is_turned) std::swap(view.pixel[1], view.pixel[2]);
    return view;
  }
};

}  // namespace

std::shared_ptr<const Plan> plan_hopper(const ConvShape& given, bool has_pairs, Product product, int device_index) {
  auto plan = std::make_shared<HopperPlan>();
  plan->is_turned = is_turned(given);
  plan->shape = plan->is_turned ? turned(given) : given;
  plan->product = product;
  const auto tiling = make_hopper_tiling(plan->shape, has_pairs && !plan->is_turned, hopper_needs(product, kHopperBlocksPerSm, 0, device_index));
  if (!tiling) return nullptr;
  plan->tiling = *tiling;
  plan->packed = packed_weights(plan->shape, *tiling, num_splits(product));
  plan->steps = tiling->steps();
  plan->description = tiling->describe();
  return plan;
}

}  // namespace fxfuse::conv_gelu_pool
