// conv_gelu_pool, Hopper path (wgmma): stride 1, all weights of 64 output channels resident in shared memory.
//
// One warpgroup a block, several blocks an SM: while one waits for its products, the others' GELUs fill the SM. A product has 64 output
// channels as rows and 128 samples of the ring as columns, read in place through descriptors (see HopperTiling). The rows of a block's
// next step are on their way to registers while the products run, and go into the ring before or behind its GELUs: one barrier a step.
// Blocks take equal shares of all images' steps (see Shares), so that a share may be the end of one image and the start of the next.
// Where K has an odd number of chunks, the spare one holds the bias, against a row of ones: that saves an addition per output.
//
// Tensor cores and fp32 instructions hardly overlap on an SM, whatever runs beside what: what counts is how few instructions there are.
#pragma once

#include "common/hopper.cuh"
#include "conv_gelu_pool_hopper_load.cuh"
#include "conv_gelu_pool_hopper_pack.cuh"
#include "conv_gelu_pool_sum.cuh"

namespace fxfuse::conv_gelu_pool {

constexpr int kHopperBlocksPerSm = 4;

#if defined(FXFUSE_HAS_WGMMA)

// The products: x = conv(input) + bias of 64 output channels and the samples of a run, in registers.
template <Product product, bool kBiasInK, int kSteps>
struct HopperBlock {
  using T = typename Operand<product>::Element;
  using Mma = typename Operand<product>::Mma;
  static constexpr int kSplits = Operand<product>::kSplits, kWords = kRunLen / kWarpSize;
  static constexpr uint32_t kStepAt = kStepBytes / kChunkBytes;
  // Upper words of all descriptors, and what is added to the lower ones for A's halves of a K step.
  static constexpr uint32_t kRowPitch = 8, kHalfPitch = kHopperRows << 16;

  const HopperJob& job;
  const HopperMemory memory;
  const int lane;
  const uint32_t a, b;  // lower words of descriptors: the first K step's weights, the ring's start
  float bias[2];
  float d[kRunLen / 2];

  __device__ HopperBlock(const HopperJob& job, const HopperMemory& memory, int first_row)
      : job(job), memory(memory), lane(threadIdx.x % kWarpSize), a(shared_address(memory.weights) / kChunkBytes + kHalfPitch),
        b(shared_address(memory.ring) / kChunkBytes) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + threadIdx.x / kWarpSize * 16 + i * 8 + lane / 4;
      bias[i] = job.data.bias && row < job.shape.channels_out ? job.data.bias.template at<T>(row) : 0.f;
    }
  }

  // Weights and the row of ones.
  __device__ __forceinline__ void prepare(const uint4* packed) {
    wait_for_previous_kernel();  // which packs the weights, or reads the partial sums that this one writes
    const int chunks = job.tiling.k_steps * kSplits * kStepAt;
    for (int i = threadIdx.x; i < chunks; i += kHopperThreads) cp_async_16(shared_address(memory.weights + i), packed + i);
    cp_async_commit();
    float scale[kChunkLen<product>];
#pragma unroll
    for (int slot = 0; slot < kChunkLen<product>; ++slot) scale[slot] = bias_scale<product>(slot);
    if (job.tiling.ones_bytes() > 0) memory.ones[threadIdx.x] = pack_chunk<product>(scale);
    cp_async_wait<0>();
  }

  static __device__ __forceinline__ uint64_t descriptor(uint32_t lower) { return uint64_t{kRowPitch} << 32 | lower; }

  // All products of a run. where: of this window's phase; first: the run's first sample in the window.
  __device__ __forceinline__ void start_products(const uint32_t* where, int first) {
    const HopperTiling& t = job.tiling;
    uint32_t weights = a;
    asm volatile("" : "+r"(weights));  // else the compiler keeps a descriptor of each step alive, and spills others
    const int k_steps = kSteps > 0 ? kSteps : t.k_steps, part_pitch = t.chunks * t.plane;
    const auto start = [&](auto type, bool is_first, int of_weights, int of_samples) {
      const int shift = first + of_samples * part_pitch;
      start_products_of<decltype(type)>(where, weights + of_weights * k_steps * kStepAt, b + shift, shift, is_first);
    };
    if constexpr (product == Product::Fp32) {
      start(__nv_bfloat16{}, true, 1, 1);
      start(Mma{}, false, 0, 0);
    } else {
      for_each_product<kSplits>([&](int of_weights, int of_samples) {
        start(Mma{}, of_weights == 0 && of_samples == kSplits - 1, of_weights, of_samples);
      });
    }
  }

  // All K steps of a run, some to a group: the compiler follows a group no further than one iteration. What comes from constant memory
  // is asked for a group ahead: it takes as long as a product. A known number of steps saves a few instructions for each.
  // from: lower word of a descriptor, `shift` samples behind the ring's start, to which `where` is added.
  template <typename Type>
  __device__ __forceinline__ void start_products_of(const uint32_t* where, uint32_t weights, uint32_t from, uint32_t shift, bool is_first) {
    constexpr int kGroup = kSteps > 0 ? kSteps - 1 : kStepGroup;
    const int k_steps = kSteps > 0 ? kSteps : job.tiling.k_steps;
    const auto multiply = [&](int step, uint32_t samples) {
      wgmma(d, descriptor(weights + step * kStepAt), descriptor(samples), !is_first || step > 0, Type{});
    };
    // The row of ones is the same for all runs, so that its pitch from the run falls.
    const bool has_ones = kSteps > 0 ? kBiasInK : job.tiling.has_spare_chunk;
    const uint32_t last = where[k_steps - 1] - (has_ones ? shift << 16 : 0);
    uint32_t next[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) next[i] = where[i];
    int step = 0;
    for (; step + kGroup < k_steps; step += kGroup) {
      uint32_t now[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) now[i] = next[i], next[i] = where[step + kGroup + i];
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kGroup; ++i) multiply(step + i, from + now[i]);
      wgmma_commit();
    }
#pragma unroll
    for (int i = 0; i < kGroup - 1; ++i) {
      if (step + 1 >= k_steps) break;
      wgmma_fence();
      multiply(step++, from + next[i]);
      wgmma_commit();
    }
    wgmma_fence();
    multiply(step, from + last);
    wgmma_commit();
  }

  // A bit for each column of each run, set where it is an output pixel, when the step has `rows` rows of depth and width `room`.
  // The four warps make a word each.
  __device__ __forceinline__ void fill_masks(int rows, int depth, int width) {
    const HopperTiling& t = job.tiling;
    for (int line = 0, i = 0; line < t.lines; ++line) {
      for (int run = 0; run < t.line_runs; ++run, ++i) {
        uint32_t x, z;
        const int y = job.depth.divide(job.width.divide(run * kRunLen + threadIdx.x, x), z);
        const bool is_valid = static_cast<int>(x) < width && static_cast<int>(z) < depth && y < t.line_rows() && line + y < rows;
        const uint32_t word = __ballot_sync(0xffffffffu, is_valid);
        if (lane == 0) reinterpret_cast<uint32_t*>(memory.masks + i)[threadIdx.x / kWarpSize] = word;
      }
    }
  }

  __device__ __forceinline__ void add_bias() {
    if constexpr (!kBiasInK) {
#pragma unroll
      for (int i = 0; i < kRunLen / 2; ++i) d[i] += bias[i / 2 % 2];
    }
  }

  // Columns that are no output pixels become 0.
  __device__ __forceinline__ void drop_masked(const uint4& mask) {
    if ((mask.x & mask.y & mask.z & mask.w) == 0xffffffffu) return;
    const uint32_t valid[kWords] = {mask.x, mask.y, mask.z, mask.w};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (valid[i] == 0xffffffffu) continue;
      const uint32_t mine = valid[i] >> (lane % 4 * 2);
#pragma unroll
      for (int j = 0; j < kRunLen / 2 / kWords; ++j) {
        if (!(mine >> (j / 4 * 8 + j % 2) & 1)) d[i * (kRunLen / 2 / kWords) + j] = 0.f;
      }
    }
  }

};

// Walks over share `index` of the images' steps. The sink takes x of a run from the block: begin_image, begin_step, take, end_step,
// end_image; of a part of an image if a share begins or ends within it.
template <Product product, class Block, class Sink>
__device__ __forceinline__ void walk(const HopperJob& job, const HopperMemory& memory, int index, Block& block, Sink& sink) {
  using T = typename Operand<product>::Element;
  const HopperTiling& t = job.tiling;
  const ConvShape& shape = job.shape;
  const int end = job.shares.first(index + 1);
  HopperLoader<product> loader(job, memory);
  for (int at = job.shares.first(index); at < end;) {
    uint32_t first_step;
    const int image = job.steps.divide(at, first_step), of_image = at - first_step, last = min(end - of_image, job.shares.steps);
    const T* const input = static_cast<const T*>(job.data.input.data) + (job.first_image + image) * job.data.input.outer;
    sink.begin_image(image);
    for (int step = first_step; step < last;) {
      const int column = step / t.tiles[1], depth = column / t.tiles[2] * t.tile[0], width = column % t.tiles[2] * t.tile[1];
      const int room[2] = {min(t.tile[0], shape.out[0] - depth), min(t.tile[1], shape.out[2] - width)};
      int y = step % t.tiles[1], slot = 0, masked_rows = 0;
      const int column_end = min(last, step - y + t.tiles[1]);
      loader.find_sources(input, depth - shape.padding[0], width - shape.padding[2]);
      __syncthreads();
      loader.load_ahead(y);
      loader.end_step();
      for (; step < column_end; ++step, ++y) {
        const int rows = min(t.rows, shape.out[1] - y * t.rows);
        if (rows != masked_rows) {
          block.fill_masks(rows, room[0], room[1]);
          masked_rows = rows;
          __syncthreads();
        }
        const int window = slot * t.window_pitch;
        const uint32_t* const where = t.where + slot * t.where_pitch;
        sink.begin_step(slot);
        slot = slot + 1 == t.slots ? 0 : slot + 1;
        loader.next_step(step + 1 < column_end);
        const uint4* mask = memory.masks;
        for (int line = 0; line < t.lines; ++line) {
#pragma unroll 1
          for (int run = 0; run < t.line_runs; ++run) {
            loader.load();
            const int first = window + line * t.row + run * kRunLen;
            block.start_products(where, first);
            const uint4 columns = *mask++;
            wgmma_wait<0>();
            if (!Sink::kStoresLate) loader.store();
            sink.take(block, columns, first);
            if (Sink::kStoresLate) loader.store();
          }
        }
        sink.end_step();
        loader.finish();
        loader.end_step();
      }
    }
    sink.end_image(image);
    at = of_image + last;
  }
}

// The forward: sums of GELU(x).
template <Product product, Gelu form>
struct MeanSink {
  // The products of 16 bits are too short for the loads to have come behind them; with fp32 the later store's registers cost more.
  static constexpr bool kStoresLate = sizeof(typename Operand<product>::Element) == 2;

  const HopperJob& job;
  const int index, first_row;
  float sum[2] = {};

  __device__ __forceinline__ void begin_image(int) {}
  __device__ __forceinline__ void begin_step(int) {}
  __device__ __forceinline__ void end_step() {}

  // Columns that are no output pixels become x = 0, whose GELU is 0.
  template <class Block>
  __device__ __forceinline__ void take(Block& block, const uint4& columns, int) {
    block.add_bias();
    block.drop_masked(columns);
    add_sums_of_gelu<form, 2, kRunLen / 4>(sum, [&](int row, int i) { return block.d[i / 2 * 4 + row * 2 + i % 2]; });
  }

  __device__ __forceinline__ void end_image(int image) {
    const int64_t piece = int64_t{image} * job.shares.most_pieces() + index - job.shares.first_block(image);
    float* const partials = job.data.partials + piece * job.shape.channels_out + first_row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int lane = threadIdx.x % kWarpSize, row = threadIdx.x / kWarpSize * 16 + i * 8 + lane / 4;
      const float row_sum = warp_sum(sum[i], 4);
      if (lane % 4 == 0 && row < job.shape.channels_out - first_row) partials[row] = row_sum;
      sum[i] = 0.f;
    }
  }
};

#endif

// kSteps: the number of K steps where it is a common one, else 0.
template <Product product, Gelu form, bool kBiasInK, int kSteps>
__global__ void __launch_bounds__(kHopperThreads, kHopperBlocksPerSm) conv_hopper(const __grid_constant__ HopperJob job) {
#if defined(FXFUSE_HAS_WGMMA)
  extern __shared__ __align__(128) uint4 hopper_memory[];
  uint32_t row_tile;
  const int index = job.row_tiles.divide(blockIdx.x, row_tile), first_row = row_tile * kHopperRows;
  const HopperMemory memory(hopper_memory, job.tiling, Operand<product>::kSplits);
  HopperBlock<product, kBiasInK, kSteps> block(job, memory, first_row);
  block.prepare(packed_row_tile(job, row_tile, Operand<product>::kSplits));
  MeanSink<product, form> sink{job, index, first_row};
  walk<product>(job, memory, index, block, sink);
#else
  __trap();  // a library without sm_90a code: better no result than one that nothing computed
#endif
}

}  // namespace fxfuse::conv_gelu_pool
