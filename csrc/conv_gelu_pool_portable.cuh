// conv_gelu_pool, portable path (mma.sync, sm_80 and newer): any kernel size, stride, padding, dilation, channels.
//
// Output channels are the rows of the tensor cores' product, output pixels its columns, so that a thread's accumulators belong to 4
// channels and the sum over pixels stays in 4 registers. K runs over (channel chunk, tap) pairs of the staged box; the two 16-byte
// halves of a K step may be any two of them, because each lane of ldmatrix gives its own address. So K is padded by at most one chunk,
// which then reads a block of zeros (inf in a spare column would make nan of its zero weight).
// Weights come packed in fragment order: a warp's 32 rows x one K step are two 512-byte loads, shared by all blocks, from L1 or L2.
#pragma once

#include "conv_gelu_pool_load.cuh"
#include "conv_gelu_pool_portable_pack.cuh"
#include "conv_gelu_pool_sum.cuh"

namespace fxfuse::conv_gelu_pool {

// The shared memory of a block, in this order; `where` holds, for each half of each K step, the byte offset of its (chunk, tap) in
// the box and a mask that drops the pixel's own offset for the block of zeros.
struct SharedLayout {
  uint4 *box, *zeros;
  uint2* where;
  float* rows;

  __device__ SharedLayout(uint4* shared, const Tiling& t, int splits)
      : box(shared), zeros(shared + t.plane * t.chunks * splits), where(reinterpret_cast<uint2*>(zeros + 1)),
        rows(reinterpret_cast<float*>(where + 2 * t.k_steps)) {}
};

__device__ __forceinline__ void fill_where(const SharedLayout& shared, const Tiling& t, const ConvShape& shape) {
  if (threadIdx.x == 0) *shared.zeros = uint4{};
  for (int pair = threadIdx.x; pair < 2 * t.k_steps; pair += kPortableThreads) {
    const int chunk = pair / t.stage_taps(), tap = pair % t.stage_taps();
    const int w = tap % t.taps[2] * shape.dilation[2] / t.step[2], h = tap / t.taps[2] % t.taps[1] * shape.dilation[1] / t.step[1];
    const int d = tap / t.taps[2] / t.taps[1] * shape.dilation[0] / t.step[0];
    const int sample = chunk * t.plane + (d * t.box[1] + h) * t.box[2] + w;
    shared.where[pair] = chunk < t.chunks ? uint2{shared_address(shared.box + sample), ~0u} : uint2{shared_address(shared.zeros), 0u};
  }
}

constexpr int kPortableLoads = 8;  // the accumulators of a tile with several stages leave no registers for more

// What a launch precomputes for its blocks.
struct PortableJob {
  ConvShape shape;
  Tiling tiling;
  ConvData data;
  BoxMap map;
  FastDiv tile_width, tile_height;
  int64_t first_image;
  int parts, row_tiles;
};

template <Product product, Gelu form, int kWarpsM>
struct PortableBlock {
  using T = typename Operand<product>::Element;
  using Mma = typename Operand<product>::Mma;
  static constexpr int kSplits = Operand<product>::kSplits, kWarpsN = kPortableWarps / kWarpsM;
  static constexpr int kWarpPixels = warp_pixels(kSplits), kColumns = kWarpPixels / 8;
  // The tensor cores add towards zero: 2^-24 of the sum is lost a step, always in one direction. That is nothing beside TF32, but in
  // Fp32 the sums move to a second set, added in fp32, every few steps.
  static constexpr bool kPromotes = kSplits == 2;
  static constexpr int kPromoteSteps = 6;

  const PortableJob& job;
  const SharedLayout shared;
  const int lane, warp_m, warp_n;
  uint32_t pixel[kColumns / 2];  // byte offset in the box of the pixel that this lane addresses, for each ldmatrix
  float bias[4];                 // of the lane's rows g, g + 8, g + 16, g + 24
  float sum[4] = {};
  float d[2][kColumns][4];       // accumulators
  float total[2][kColumns][4];   // of kPromotes

  __device__ PortableBlock(const PortableJob& job, uint4* memory, int first_row)
      : job(job), shared(memory, job.tiling, kSplits), lane(threadIdx.x % kWarpSize), warp_m(threadIdx.x / kWarpSize % kWarpsM),
        warp_n(threadIdx.x / kWarpSize / kWarpsM) {
    const Tiling& t = job.tiling;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      uint32_t x, y;
      const uint32_t z = job.tile_height.divide(job.tile_width.divide(warp_n * kWarpPixels + i * 16 + lane / 16 * 8 + lane % 8, x), y);
      const bool is_real = z < t.tile[0];  // the others repeat pixel 0, and are masked
      const int hop[3] = {job.shape.stride[0] / t.step[0], job.shape.stride[1] / t.step[1], job.shape.stride[2] / t.step[2]};
      pixel[i] = is_real ? ((z * hop[0] * t.box[1] + y * hop[1]) * t.box[2] + x * hop[2]) * kChunkBytes : 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + warp_m * kWarpRows + i * 8 + lane / 4;
      bias[i] = job.data.bias && row < job.shape.channels_out ? job.data.bias.template at<T>(row) : 0.f;
    }
  }

  // Columns of the accumulators that are output pixels: bit 8 j + e stands for d[.][j][e].. of this lane, e in {0, 1}.
  __device__ __forceinline__ uint64_t valid_columns(const int (&room)[3]) const {
    const int depth = min(room[0], job.tiling.tile[0]);  // behind the tile lie the columns that repeat pixel 0
    uint64_t valid = 0;
#pragma unroll
    for (int i = 0; i < kWarpPixels / kWarpSize; ++i) {
      uint32_t x, y;
      const uint32_t z = job.tile_height.divide(job.tile_width.divide(warp_n * kWarpPixels + i * kWarpSize + lane, x), y);
      const bool is_valid = static_cast<int>(x) < room[2] && static_cast<int>(y) < room[1] && static_cast<int>(z) < depth;
      valid |= static_cast<uint64_t>(__ballot_sync(0xffffffffu, is_valid)) << (i * kWarpSize);
    }
    return valid >> (lane % 4 * 2);
  }

  // One K step; the sums start from the bias at the first.
  __device__ __forceinline__ void multiply(const uint4 (&a)[kSplits][2], int k_step, uint32_t offset, bool starts) {
    const uint2 where = shared.where[2 * k_step + lane / 8 % 2];
    const uint32_t cross_offset = job.tiling.chunks * job.tiling.plane * kChunkBytes;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      uint32_t b[4];
      const uint32_t address = where.x + ((pixel[i] + offset) & where.y);
      ldmatrix_x4(b, address);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (starts) {
          const float from[4] = {bias[2 * m], bias[2 * m], bias[2 * m + 1], bias[2 * m + 1]};
          mma(d[m][2 * i], a[0][m], b[0], b[1], from, Mma{});
          mma(d[m][2 * i + 1], a[0][m], b[2], b[3], from, Mma{});
        } else {
          mma(d[m][2 * i], a[0][m], b[0], b[1], d[m][2 * i], Mma{});
          mma(d[m][2 * i + 1], a[0][m], b[2], b[3], d[m][2 * i + 1], Mma{});
        }
      }
      if constexpr (kSplits == 2) {
        uint32_t cross[4];
        ldmatrix_x4(cross, address + (cross_offset & where.y));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma(d[m][2 * i], a[1][m], cross[0], cross[1], d[m][2 * i], __nv_bfloat16{});
          mma(d[m][2 * i + 1], a[1][m], cross[2], cross[3], d[m][2 * i + 1], __nv_bfloat16{});
        }
      }
    }
  }

  __device__ __forceinline__ void load_weights(uint4 (&a)[kSplits][2], const uint4* from, int64_t next_rows) const {
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
#pragma unroll
      for (int m = 0; m < 2; ++m) a[split][m] = __ldg(from + m * next_rows + split * kWarpSize);
    }
  }

  // f(accumulator, its total, the bias of its row) for all of the lane's accumulators.
  template <typename F>
  __device__ __forceinline__ void for_each_sum(F&& f) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(d[m][j][e], total[m][j][e], bias[2 * m + e / 2]);
      }
    }
  }

  // All K steps of a stage for the tile at `offset` bytes in the box; the sums end in d.
  __device__ __forceinline__ void multiply_stage(const uint4* weights, int stage, uint32_t offset) {
    const int k_steps = job.tiling.k_steps;
    constexpr int kStep = kSplits * kWarpSize;
    const int64_t next_rows = int64_t{job.tiling.stages()} * k_steps * kStep;
    const uint4* from = weights + int64_t{stage} * k_steps * kStep + lane;
    uint4 a[kSplits][2], next[kSplits][2];
    load_weights(a, from, next_rows);
    const auto step = [&](int k_step, bool starts) {
      load_weights(next, from + min(k_step + 1, k_steps - 1) * kStep, next_rows);
      multiply(a, k_step, offset, starts);
      memcpy(a, next, sizeof a);
    };
    if constexpr (kPromotes) {
      if (stage == 0) for_each_sum([](float&, float& sum, float from) { sum = from; });
      for (int first = 0; first < k_steps; first += kPromoteSteps) {
        for_each_sum([](float& part, float&, float) { part = 0.f; });
        for (int k_step = first; k_step < min(first + kPromoteSteps, k_steps); ++k_step) step(k_step, false);
        for_each_sum([](float& part, float& sum, float) { sum += part; });
      }
      for_each_sum([](float& part, float& sum, float) { part = sum; });
    } else {
      if (stage == 0) step(0, true);
      for (int k_step = stage == 0; k_step < k_steps; ++k_step) step(k_step, false);
    }
  }

  // Adds GELU of the accumulators to the lane's four sums; masked columns become x = 0, whose GELU is 0 whatever the bias.
  __device__ __forceinline__ void add_gelu(const int (&room)[3]) {
    const Tiling& t = job.tiling;
    if (room[0] < t.tile[0] || room[1] < t.tile[1] || room[2] < t.tile[2] || t.tile[0] * t.tile[1] * t.tile[2] < t.pixels()) {
      const uint64_t valid = valid_columns(room);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!(valid >> (8 * j + e % 2) & 1)) d[0][j][e] = d[1][j][e] = 0.f;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float row_sum[1] = {sum[i]};
      add_sums_of_gelu<form, 1, 2 * kColumns>(row_sum, [&](int, int j) { return d[i / 2][j / 2][i % 2 * 2 + j % 2]; });
      sum[i] = row_sum[0];
    }
  }

  __device__ __forceinline__ void store(float* partials, int channels_left) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float row_sum = warp_sum(sum[i], 4);
      if (lane % 4 == 0) shared.rows[warp_n * kWarpsM * kWarpRows + warp_m * kWarpRows + i * 8 + lane / 4] = row_sum;
    }
    store_row_sums<kWarpsM * kWarpRows, kWarpsN>(shared.rows, partials, channels_left);
  }
};

template <Product product, Gelu form, int kWarpsM>
__global__ void __launch_bounds__(kPortableThreads, 2)
conv_portable(const __grid_constant__ PortableJob job) {
  using T = typename Operand<product>::Element;
  extern __shared__ __align__(128) uint4 memory[];
  const Tiling& t = job.tiling;
  const ConvShape& shape = job.shape;
  const int row_tile = blockIdx.x % job.row_tiles, part = blockIdx.x / job.row_tiles % job.parts;
  const int64_t image = job.first_image + blockIdx.x / job.row_tiles / job.parts;
  const int first_row = row_tile * kWarpsM * kWarpRows;

  PortableBlock<product, form, kWarpsM> block(job, memory, first_row);
  fill_where(block.shared, t, shape);
  const int stages = t.stages();
  const bool has_rows = first_row + block.warp_m * kWarpRows < shape.channels_out;
  const int64_t rows16 = first_row / 16 + block.warp_m * 2;
  const uint4* weights = job.data.weights + rows16 * stages * t.k_steps * Operand<product>::kSplits * kWarpSize;
  const T* const input = static_cast<const T*>(job.data.input.data) + image * job.data.input.outer;
  const int pitch[3] = {t.box[1] * t.box[2], t.box[2], 1};
  const uint32_t tile_offset = t.tile[t.axis] * (shape.stride[t.axis] / t.step[t.axis]) * pitch[t.axis] * kChunkBytes;

  const int tiles = t.num_tiles(), last = static_cast<int>(int64_t{tiles} * (part + 1) / job.parts);
  for (int tile = static_cast<int>(int64_t{tiles} * part / job.parts); tile < last; ++tile) {
    const int index[3] = {tile / t.tiles[2] / t.tiles[1], tile / t.tiles[2] % t.tiles[1], tile % t.tiles[2]};
    int first[3], room[3];  // the tile's first output pixel, and the output pixels from there on
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      first[i] = index[i] * t.tile[i] * (i == t.axis ? t.steps : 1);
      room[i] = shape.out[i] - first[i];
    }
    for (int step = 0; step < t.steps && room[t.axis] > 0; ++step) {
      for (int stage = 0; stage < stages; ++stage) {
        if (step == 0) {
          const int channel = stage % t.channel_stages * t.chunks * kChunkLen<product>, tap_stage = stage / t.channel_stages;
          const int tap[3] = {tap_stage / t.tap_stages[2] / t.tap_stages[1], tap_stage / t.tap_stages[2] % t.tap_stages[1],
                              tap_stage % t.tap_stages[2]};
          int origin[3];
#pragma unroll
          for (int i = 0; i < 3; ++i) origin[i] = first[i] * shape.stride[i] - shape.padding[i] + tap[i] * shape.dilation[i];
          __syncthreads();
          stage_box<product, kPortableThreads, kPortableLoads>(block.shared.box, job.map, job.data.input, shape.in,
                                                               input + channel * job.data.input.channel, origin,
                                                               shape.channels_in - channel);
          __syncthreads();
        }
        if (has_rows) block.multiply_stage(weights, stage, step * tile_offset);
      }
      if (has_rows) block.add_gelu(room);
      room[t.axis] -= t.tile[t.axis];
    }
  }
  float* const partials = job.data.partials + ((image - job.first_image) * job.parts + part) * shape.channels_out + first_row;
  block.store(partials, shape.channels_out - first_row);
}

}  // namespace fxfuse::conv_gelu_pool
