// conv_gelu_pool, Hopper path: plan and launch.

#include "conv_gelu_pool_hopper.cuh"
#include "conv_gelu_pool_paths.cuh"

namespace fxfuse::conv_gelu_pool {
namespace {

struct HopperPlan final : Plan {
  ConvShape shape;
  Product product;
  HopperTiling tiling;

  void pack(const Tensor& on, const View& weight, const Param& bias, uint4* to) const override {
    constexpr int kThreads = 256;
    const int64_t chunks = packed / num_splits(product);
    dispatch_product(product, [&]<Product p>() {
      launch(on, {ceil_div(chunks, kThreads), kThreads}, pack_hopper<p>, weight, bias, shape, tiling.chunks, tiling.k_steps, chunks, to);
    });
  }

  void run(const Tensor& on, const ConvData& data, int64_t first_image, int64_t images, int parts, bool is_tanh) const override {
    const int row_tiles = static_cast<int>(blocks);
    const HopperJob job{.shape = shape, .tiling = tiling, .data = data,
                        .map = {.samples = tiling.samples, .plane = tiling.plane, .chunks = tiling.chunks, .step = {1, 1, 1},
                                .width = FastDiv(tiling.box[2]), .height = FastDiv(tiling.box[1])},
                        .first_image = first_image, .parts = parts, .row_tiles = row_tiles};
    const LaunchConfig config{images * parts * row_tiles, kHopperThreads, tiling.shared_bytes};
    dispatch_product(product, [&]<Product p>() {
      constexpr Gelu exact = kExactForm<p>;
      if constexpr (p != Product::Tf32x3) {
        if (tiling.has_spare_chunk) {
          return launch(on, config, is_tanh ? conv_hopper<p, Gelu::Tanh, true> : conv_hopper<p, exact, true>, job);
        }
      }
      launch(on, config, is_tanh ? conv_hopper<p, Gelu::Tanh, false> : conv_hopper<p, exact, false>, job);
    });
  }
};

}  // namespace

std::shared_ptr<const Plan> plan_hopper(const ConvShape& shape, Product product, int device_index) {
  const auto tiling = make_hopper_tiling(shape, chunk_len(product), num_splits(product),
                                         device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_index),
                                         device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_index));
  if (!tiling) return nullptr;
  auto plan = std::make_shared<HopperPlan>();
  plan->shape = shape;
  plan->product = product;
  plan->tiling = *tiling;
  plan->packed = packed_weights(shape, *tiling, num_splits(product));
  plan->blocks = ceil_div(shape.channels_out, kHopperRows);
  plan->boxes = tiling->num_tiles();
  plan->blocks_per_sm = tiling->blocks_per_sm;
  plan->description = tiling->describe();
  return plan;
}

}  // namespace fxfuse::conv_gelu_pool
