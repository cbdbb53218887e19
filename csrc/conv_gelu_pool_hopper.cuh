// conv_gelu_pool, Hopper path (wgmma): stride 1, all weights of 64 output channels resident in shared memory.
//
// One warpgroup a block, several blocks an SM: while one waits for its box or its products, the others' GELUs fill the SM. A product
// has 64 output channels as rows and 128 samples of the box as columns, read in place through descriptors (see HopperTiling).
// Where K has an odd number of chunks, the spare one holds the bias, against a row of ones: that saves an addition per output.
#pragma once

#include "common/hopper.cuh"
#include "conv_gelu_pool_hopper_pack.cuh"
#include "conv_gelu_pool_load.cuh"
#include "conv_gelu_pool_sum.cuh"

namespace fxfuse::conv_gelu_pool {

// In flight a thread; with 16 the fp32 kernels spill registers.
template <Product product>
constexpr int kHopperLoads = kChunkLen<product> == 4 ? 12 : 16;

struct HopperJob {
  ConvShape shape;
  HopperTiling tiling;
  ConvData data;
  BoxMap map;
  int64_t first_image;
  int parts, row_tiles;
};

#if defined(FXFUSE_HAS_WGMMA)

template <Product product, Gelu form, bool kBiasInK>
struct HopperBlock {
  using T = typename Operand<product>::Element;
  using Mma = typename Operand<product>::Mma;
  static constexpr int kSplits = Operand<product>::kSplits, kWords = kRunLen / kWarpSize;

  const HopperJob& job;
  uint4 *const weights, *const box, *const ones, *const masks;
  const int lane;
  uint64_t a, b;  // descriptors of the first K step, b without its pitch
  float bias[2], sum[2] = {};
  float d[kRunLen / 2];

  __device__ HopperBlock(const HopperJob& job, uint4* memory, int first_row)
      : job(job), weights(memory), box(memory + job.tiling.k_steps * kSplits * (kStepBytes / kChunkBytes)),
        ones(box + job.tiling.plane * job.tiling.chunks * kSplits), masks(ones + kOnesBytes / kChunkBytes),
        lane(threadIdx.x % kWarpSize),
        a(matrix_descriptor(shared_address(weights), kHopperRows * kChunkBytes, 8 * kChunkBytes)),
        b(matrix_descriptor(shared_address(box), 0, 8 * kChunkBytes)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + threadIdx.x / kWarpSize * 16 + i * 8 + lane / 4;
      bias[i] = job.data.bias && row < job.shape.channels_out ? job.data.bias.template at<T>(row) : 0.f;
    }
  }

  // Weights, the row of ones, and zeros behind the box, which the last run reads and nothing else writes.
  __device__ __forceinline__ void prepare(const uint4* packed) {
    const HopperTiling& t = job.tiling;
    const int chunks = t.k_steps * kSplits * (kStepBytes / kChunkBytes);
    for (int i = threadIdx.x; i < chunks; i += kHopperThreads) cp_async_16(shared_address(weights + i), packed + i);
    cp_async_commit();
    float scale[kChunkLen<product>];
#pragma unroll
    for (int slot = 0; slot < kChunkLen<product>; ++slot) scale[slot] = bias_scale<product>(slot);
    ones[threadIdx.x] = pack_chunk<product>(scale);
    const int tail = t.plane - t.samples;
    for (int i = threadIdx.x; i < tail * t.chunks * kSplits; i += kHopperThreads) {
      box[i / tail * t.plane + t.samples + i % tail] = uint4{};
    }
    cp_async_wait<0>();
  }

  __device__ __forceinline__ void multiply(int step, int first, bool has_special) {
    const HopperTiling& t = job.tiling;
    const uint64_t a_step = a + step * (kStepBytes / kChunkBytes);
    // The row of ones is the same for all runs, so that its pitch from the run falls.
    const bool has_ones = t.has_spare_chunk && step == t.k_steps - 1;
    const uint64_t b_step = b + (static_cast<uint64_t>(t.pitch[step] - (has_ones ? first : 0)) << 16) + (t.at[step] + first);
    wgmma(d, a_step, b_step, step > 0, Mma{});
    if constexpr (kSplits == 2) {
      // A box with inf or nan takes zeros for both: its result is inf or nan anyway, and inf times a low part that is 0 would make nan
      // of inf. (A branch around the products would make the compiler wait after each.)
      const int low = t.chunks * t.plane, a_low = t.k_steps * (kStepBytes / kChunkBytes);
      const uint64_t b_low = b_step + low - (has_ones ? static_cast<uint64_t>(low) << 16 : 0);  // the row has no low part
      const uint64_t zeros = b + (ones - box);
      wgmma(d, a_step, has_special ? zeros : b_low, 1, Mma{});
      wgmma(d, a_step + a_low, has_special ? zeros : b_step, 1, Mma{});
    }
  }

  // All K steps of a run, three to a group: the compiler follows a group no further than one iteration.
  __device__ __forceinline__ void start_products(int run, bool has_special) {
    constexpr int kGroup = 3;
    const int k_steps = job.tiling.k_steps, first = run * kRunLen;
    int step = 0;
    for (; step + kGroup <= k_steps; step += kGroup) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kGroup; ++i) multiply(step + i, first, has_special);
      wgmma_commit();
    }
    for (; step < k_steps; ++step) {
      wgmma_fence();
      multiply(step, first, has_special);
      wgmma_commit();
    }
  }

  // masks[run]: a bit for each column, set where it is an output pixel of the tile. The four warps make a word each.
  __device__ __forceinline__ void fill_masks(int runs, const int (&room)[3]) {
    for (int run = 0; run < runs; ++run) {
      uint32_t x, y;
      const uint32_t z = job.map.height.divide(job.map.width.divide(run * kRunLen + threadIdx.x, x), y);
      const bool is_valid = static_cast<int>(x) < room[2] && static_cast<int>(y) < room[1] && static_cast<int>(z) < room[0];
      const uint32_t word = __ballot_sync(0xffffffffu, is_valid);
      if (lane == 0) reinterpret_cast<uint32_t*>(masks + run)[threadIdx.x / kWarpSize] = word;
    }
  }

  // Adds GELU of the accumulators to the lane's two sums; columns that are no output pixels become x = 0, whose GELU is 0.
  __device__ __forceinline__ void add_gelu(int run) {
    const uint4 mask = masks[run];
    const uint32_t valid[kWords] = {mask.x, mask.y, mask.z, mask.w};
    if constexpr (!kBiasInK) {
#pragma unroll
      for (int i = 0; i < kRunLen / 2; ++i) d[i] += bias[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (valid[i] == 0xffffffffu) continue;
      const uint32_t mine = valid[i] >> (lane % 4 * 2);
#pragma unroll
      for (int j = 0; j < kRunLen / 2 / kWords; ++j) {
        if (!(mine >> (j / 4 * 8 + j % 2) & 1)) d[i * (kRunLen / 2 / kWords) + j] = 0.f;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] += sum_of_gelu<form, kRunLen / 4>([&](int j) { return d[j / 2 * 4 + i * 2 + j % 2]; });
  }

  __device__ __forceinline__ void store(float* partials, int channels_left) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = threadIdx.x / kWarpSize * 16 + i * 8 + lane / 4;
      const float row_sum = warp_sum(sum[i], 4);
      if (lane % 4 == 0 && row < channels_left) partials[row] = row_sum;
    }
  }
};

#endif

template <Product product, Gelu form, bool kBiasInK>
__global__ void __launch_bounds__(kHopperThreads, 4) conv_hopper(const __grid_constant__ HopperJob job) {
#if defined(FXFUSE_HAS_WGMMA)
  using T = typename Operand<product>::Element;
  extern __shared__ __align__(128) uint4 hopper_memory[];
  const HopperTiling& t = job.tiling;
  const ConvShape& shape = job.shape;
  const int row_tile = blockIdx.x % job.row_tiles, part = blockIdx.x / job.row_tiles % job.parts;
  const int64_t image = job.first_image + blockIdx.x / job.row_tiles / job.parts;
  const int first_row = row_tile * kHopperRows;
  const T* const input = static_cast<const T*>(job.data.input.data) + image * job.data.input.outer;

  HopperBlock<product, form, kBiasInK> block(job, hopper_memory, first_row);
  block.prepare(job.data.weights + int64_t{row_tile} * t.k_steps * Operand<product>::kSplits * (kStepBytes / kChunkBytes));
  const int tiles = t.num_tiles(), last = static_cast<int>(int64_t{tiles} * (part + 1) / job.parts);
  for (int tile = static_cast<int>(int64_t{tiles} * part / job.parts); tile < last; ++tile) {
    const int index[3] = {tile / t.tiles[2] / t.tiles[1], tile / t.tiles[2] % t.tiles[1], tile % t.tiles[2]};
    int origin[3], room[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      origin[i] = index[i] * t.tile[i] - shape.padding[i];
      room[i] = min(t.tile[i], shape.out[i] - index[i] * t.tile[i]);
    }
    __syncthreads();
    const bool is_special = stage_box<product, kHopperThreads, kHopperLoads<product>>(block.box, job.map, job.data.input, shape.in, input,
                                                                                      origin, shape.channels_in);
    const int runs = (((room[0] - 1) * t.box[1] + room[1] - 1) * t.box[2] + room[2] + kRunLen - 1) / kRunLen;
    block.fill_masks(runs, room);
    fence_async_proxy();
    bool has_special = false;
    if constexpr (product == Product::Tf32x3) has_special = __syncthreads_or(is_special);
    else __syncthreads();
#pragma unroll 1
    for (int run = 0; run < runs; ++run) {
      block.start_products(run, has_special);
      wgmma_wait<0>();
      block.add_gelu(run);
    }
  }
  float* const partials = job.data.partials + ((image - job.first_image) * job.parts + part) * shape.channels_out + first_row;
  block.store(partials, shape.channels_out - first_row);
#else
  __trap();  // a library without sm_90a code: better no result than one that nothing computed
#endif
}

}  // namespace fxfuse::conv_gelu_pool
