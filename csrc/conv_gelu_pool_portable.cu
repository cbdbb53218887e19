// conv_gelu_pool, portable path: plan and launch.

#include "conv_gelu_pool_paths.cuh"
#include "conv_gelu_pool_portable.cuh"

namespace fxfuse::conv_gelu_pool {
namespace {

struct PortablePlan final : Plan {
  ConvShape shape;
  Product product;
  Tiling tiling;
  int row_tiles;

  void pack(const Tensor& on, const View& weight, const Param&, uint4* to) const override {
    constexpr int kThreads = 256;
    const int64_t lanes = packed / num_splits(product);
    dispatch_product(product, [&]<Product p>() {
      launch(on, {ceil_div(lanes, kThreads), kThreads}, pack_portable<p>, weight, tiling, shape.channels_in, shape.channels_out, lanes, to);
    });
  }

  void run(const Tensor& on, const ConvData& data, int64_t first_image, int64_t images, int parts, bool is_tanh) const override {
    const PortableJob job{.shape = shape, .tiling = tiling, .data = data,
                          .map = {.samples = tiling.plane, .plane = tiling.plane, .chunks = tiling.chunks,
                                  .step = {tiling.step[0], tiling.step[1], tiling.step[2]}, .width = FastDiv(tiling.box[2]),
                                  .height = FastDiv(tiling.box[1])},
                          .tile_width = FastDiv(tiling.tile[2]), .tile_height = FastDiv(tiling.tile[1]), .first_image = first_image,
                          .parts = parts, .row_tiles = row_tiles};
    dispatch_product(product, [&]<Product p>() {
      const auto run_kernel = [&](auto kernel) {
        launch(on, {images * parts * row_tiles, kPortableThreads, tiling.shared_bytes}, kernel, job);
      };
      if (tiling.warps_m == 2) run_kernel(is_tanh ? conv_portable<p, Gelu::Tanh, 2> : conv_portable<p, kExactForm<p>, 2>);
      else run_kernel(is_tanh ? conv_portable<p, Gelu::Tanh, 1> : conv_portable<p, kExactForm<p>, 1>);
    });
  }
};

}  // namespace

std::shared_ptr<const Plan> plan_portable(const ConvShape& shape, Product product, int device_index) {
  constexpr int kBlocksPerSm = 2;
  const int budget = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_index) / kBlocksPerSm -
                     device_attribute(cudaDevAttrReservedSharedMemoryPerBlock, device_index);
  auto plan = std::make_shared<PortablePlan>();
  plan->shape = shape;
  plan->product = product;
  plan->tiling = make_tiling(shape, chunk_len(product), num_splits(product), budget);
  plan->row_tiles = ceil_div(shape.channels_out, plan->tiling.rows());
  plan->packed = packed_weights(shape, plan->tiling, num_splits(product));
  plan->blocks = plan->row_tiles;
  plan->boxes = plan->tiling.num_tiles();
  plan->blocks_per_sm = kBlocksPerSm;
  plan->description = plan->tiling.describe();
  return plan;
}

}  // namespace fxfuse::conv_gelu_pool
