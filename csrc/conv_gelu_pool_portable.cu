// conv_gelu_pool, portable path: plan and launch.

#include "conv_gelu_pool_paths.cuh"
#include "conv_gelu_pool_portable.cuh"

namespace fxfuse::conv_gelu_pool {
namespace {

constexpr int kBlocksPerSm = 2;

struct PortablePlan final : Plan {
  ConvShape shape;
  Product product;
  Tiling tiling;
  int row_tiles, num_sms;

  // Whole images or parts of one. Enough blocks for eight rounds on the card, so that the last, partly filled one costs little; no more,
  // because each starts with latency and leaves a piece.
  Shares share(int images) const override {
    const int64_t target = int64_t{8} * kBlocksPerSm * num_sms;
    const int parts = ceil_div(steps, std::max<int64_t>(1, int64_t{images} * row_tiles * steps / target));
    return {images, parts, images * parts};
  }

  void pack(const Tensor& on, const View& weight, const Param&, uint4* to) const override {
    constexpr int kThreads = 256;
    const int64_t lanes = packed / num_splits(product);
    dispatch_product(product, [&]<Product p>() {
      launch(on, {ceil_div(lanes, kThreads), kThreads}, pack_portable<p>, weight, tiling, shape.channels_in, shape.channels_out, lanes, to);
    });
  }

  void run(const Tensor& on, const ConvData& data, int64_t first_image, const Shares& shares, bool is_tanh) const override {
    const PortableJob job{.shape = shape, .tiling = tiling, .data = data,
                          .map = {.samples = tiling.plane, .plane = tiling.plane, .chunks = tiling.chunks,
                                  .step = {tiling.step[0], tiling.step[1], tiling.step[2]}, .width = FastDiv(tiling.box[2]),
                                  .height = FastDiv(tiling.box[1])},
                          .tile_width = FastDiv(tiling.tile[2]), .tile_height = FastDiv(tiling.tile[1]), .first_image = first_image,
                          .parts = shares.steps, .row_tiles = row_tiles};
    dispatch_product(product, [&]<Product p>() {
      const auto run_kernel = [&](auto kernel) {
        launch(on, {int64_t{shares.blocks} * row_tiles, kPortableThreads, tiling.shared_bytes}, kernel, job);
      };
      if (tiling.warps_m == 2) run_kernel(is_tanh ? conv_portable<p, Gelu::Tanh, 2> : conv_portable<p, kExactForm<p>, 2>);
      else run_kernel(is_tanh ? conv_portable<p, Gelu::Tanh, 1> : conv_portable<p, kExactForm<p>, 1>);
    });
  }
};

}  // namespace

std::shared_ptr<const Plan> plan_portable(const ConvShape& shape, Product product, int device_index) {
  const int budget = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_index) / kBlocksPerSm -
                     device_attribute(cudaDevAttrReservedSharedMemoryPerBlock, device_index);
  auto plan = std::make_shared<PortablePlan>();
  plan->shape = shape;
  plan->product = product;
  plan->tiling = make_tiling(shape, chunk_len(product), num_splits(product), budget);
  plan->row_tiles = ceil_div(shape.channels_out, plan->tiling.rows());
  plan->packed = packed_weights(shape, plan->tiling, num_splits(product));
  plan->num_sms = device_attribute(cudaDevAttrMultiProcessorCount, device_index);
  plan->steps = plan->tiling.num_tiles();
  plan->description = plan->tiling.describe();
  return plan;
}

}  // namespace fxfuse::conv_gelu_pool
