// conv_gelu_pool, gradients of weight and bias on the Hopper path, without the convolution's output or its gradient in memory.
//
// With x = conv(input) + bias, the output's gradient g[n, c] over the pixels and a tap's samples s(p):
//   of_weight[c, k, tap] = sum over n of g[n, c] * sum over p of gelu'(x[n, c, p]) * input[n, k, s(p)]
// The inner sum is a product whose K runs over pixels. x comes from the forward's products; gelu' of the accumulators is, without a move, a
// register operand A, and B is the ring: 8 channels of a sample are 16 bytes, so that a line of neighbouring taps is one operand of N = 24
// whose column groups overlap, one sample apart. g joins when the sums leave the accumulators: gelu' alone lies between -0.13 and 1.13,
// where 16 bits have their digits, whatever the gradient's size.
//
// Accumulators hold 9 pairs of a tap and 8 channels. Where a weight has more, `groups` of blocks share them, and each computes x again.
// Columns that are no output pixels are zeros of A; what they meet in the ring must be a number, so all of it starts as zeros.
#pragma once

#include "common/gelu_gradient.cuh"
#include "conv_gelu_pool_hopper.cuh"

namespace fxfuse::conv_gelu_pool {

// As many as registers allow.
constexpr int gradient_blocks_per_sm(Product product) { return num_splits(product) > 1 ? 2 : 3; }
constexpr int kAccumulators = 36, kGradientEntries = kAccumulators + 2;  // of a thread; and its two rows' gradients of the bias
constexpr int kGradientBytes = kGradientEntries * kHopperThreads * static_cast<int>(sizeof(float));

// Runs in the accumulators, which add towards zero. Products that are to be as good as fp32's leave them after each run, and small ones have
// accumulators of their own.
template <Product product>
constexpr int kMostRuns = product == Product::Bf16Triple ? 1 : 8;

// Lines of `wide` neighbouring taps along the width and 8 channels, in the order chunk, depth, height, width.
struct GradientLines {
  int wide, lines, groups;

  GradientLines(const ConvShape& shape, int chunks)
      : wide(shape.kernel[2] == 3 ? 3 : 1), lines(static_cast<int>(chunks * shape.taps()) / wide), groups(ceil_div(lines, per_group())) {}

  __host__ __device__ int per_group() const { return kAccumulators / 4 / wide; }
};

struct Line {
  int chunk, d, h, w;

  __device__ Line(const ConvShape& shape, int wide, int line) {
    const int width = shape.kernel[2] / wide;
    w = line % width, h = line / width % shape.kernel[1], d = line / width / shape.kernel[1] % shape.kernel[0];
    chunk = line / width / shape.kernel[1] / shape.kernel[0];
  }
};

struct GradientJob {
  HopperJob walk;  // its partials: [share][row tile][group][entry][thread]
  GradientLines lines;
  Param grad;  // [images, channels_out]
  float scale;  // 1 / pixels
};

#if defined(FXFUSE_HAS_WGMMA)

template <Product product, bool kTanh, int kWide>
struct WeightSink {
  using T = typename Operand<product>::Element;
  using Mma = typename Operand<product>::Mma;
  static constexpr bool kStoresLate = false;
  static constexpr int kSplits = Operand<product>::kSplits, kOfLine = 4 * kWide, kLines = kAccumulators / kOfLine;
  static constexpr int kSets = product == Product::Bf16Triple ? 2 : 1;
  static constexpr int kPieces = kSets, kWords = kRunLen / 4 / kPieces;  // of a run, whose operands registers hold at a time; a part's of a piece
  static constexpr Gelu kForm = kTanh ? Gelu::Tanh : product == Product::Bf16Triple ? Gelu::Accurate : Gelu::Fast;
  using Accumulators = float[kLines][kOfLine];

  const GradientJob& job;
  const HopperMemory& memory;
  const int first_line, first_row;
  uint32_t at[kLines];  // lower words of descriptors: the lines' first samples at a step
  Accumulators acc[kSets];  // of the largest products, and of all others if there is a second set
  float scale[2], sum[2] = {};
  int runs = 0;

  __device__ WeightSink(const GradientJob& job, const HopperMemory& memory, int group, int first_row)
      : job(job), memory(memory), first_line(group * kLines), first_row(first_row) {
    const int samples = job.walk.tiling.ring_samples(kSplits);
    for (int i = threadIdx.x; i < samples; i += kHopperThreads) memory.ring[i] = {};
#pragma unroll
    for (int i = 0; i < kGradientEntries; ++i) memory.sums[i * kHopperThreads + threadIdx.x] = 0.f;
  }

  static __device__ __forceinline__ int row_of(int i) {
    return threadIdx.x / kWarpSize * 16 + i * 8 + threadIdx.x % kWarpSize / 4;
  }

  __device__ __forceinline__ void begin_image(int image) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + row_of(i), channels = job.walk.shape.channels_out;
      scale[i] = row < channels ? job.grad.template at<T>(int64_t{image} * channels + row) * job.scale : 0.f;
    }
  }

  __device__ __forceinline__ void begin_step(int slot) {
    constexpr uint32_t kPitchOfK = 8;
    const HopperTiling& t = job.walk.tiling;
    const ConvShape& shape = job.walk.shape;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const Line line(shape, kWide, min(first_line + i, job.lines.lines - 1));  // what is too many is the last one again
      const int h = line.h * shape.dilation[1], row = t.phases > 1 ? (slot + h) % t.slots : h;
      const int sample = line.chunk * t.plane + row * t.row + line.d * shape.dilation[0] * t.box[1] + t.shift + line.w * shape.dilation[2];
      at[i] = shared_address(memory.ring) / kChunkBytes + sample + (kPitchOfK << 16);
    }
  }

  template <class Block>
  __device__ __forceinline__ void take(Block& block, const uint4& columns, int first) {
    block.add_bias();
#pragma unroll
    for (int i = 0; i < kRunLen / 2; ++i) block.d[i] = gelu_derivative<kForm>(block.d[i]);
    block.drop_masked(columns);
#pragma unroll
    for (int i = 0; i < kRunLen / 2; ++i) sum[i / 2 % 2] += block.d[i];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) multiply(block.d + piece * 2 * kWords, first + piece * (kRunLen / kPieces), piece + runs > 0);
    ++runs;
    if (kMostRuns<product> == 1) flush();
  }

  // accumulate: whether the accumulators hold sums.
  __device__ __forceinline__ void multiply(const float* d, int first, bool accumulate) {
    uint32_t parts[kSplits][kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t of_pair[kSplits];
      split(d[2 * i], d[2 * i + 1], of_pair);
#pragma unroll
      for (int part = 0; part < kSplits; ++part) parts[part][i] = of_pair[part];
    }
    const int part_pitch = job.walk.tiling.chunks * job.walk.tiling.plane;
    wgmma_fence();
    for_each_product<kSplits>([&](int of_gelu, int of_samples) {
      const bool is_largest = of_gelu + of_samples == 0, starts = of_samples == kSplits - 1 || (kSets > 1 && is_largest);
      multiply_lines(acc[is_largest ? 0 : kSets - 1], parts[of_gelu], first + of_samples * part_pitch, !starts || accumulate);
    });
    wgmma_commit();
    wgmma_wait<0>();
  }

  __device__ __forceinline__ void multiply_lines(Accumulators& sums, const uint32_t (&a)[kWords], int first, bool accumulate) {
    constexpr int kStepSamples = 16;
    const uint64_t pitch_of_n = static_cast<uint64_t>(job.walk.shape.dilation[2]) << 32;
#pragma unroll
    for (int step = 0; step < kWords / 4; ++step) {
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        wgmma(sums[i], a + 4 * step, pitch_of_n | (at[i] + first + kStepSamples * step), accumulate || step > 0, Mma{});
      }
    }
  }

  static __device__ __forceinline__ void split(float first, float second, uint32_t (&parts)[kSplits]) {
    if constexpr (product == Product::Fp16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(parts[0]) : "f"(second), "f"(first));
    else split_bf16(first, second, parts);
  }

  __device__ __forceinline__ void end_step() {
    if (runs >= kMostRuns<product>) flush();
  }
  __device__ __forceinline__ void end_image(int) { flush(); }

  // Every thread has its own sums.
  __device__ __forceinline__ void flush() {
    if (runs == 0) return;
    runs = 0;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
#pragma unroll
      for (int j = 0; j < kOfLine; ++j) {
        float& total = memory.sums[(i * kOfLine + j) * kHopperThreads + threadIdx.x];
        total = fmaf(scale[j / 2 % 2], kSets > 1 ? acc[0][i][j] + acc[kSets - 1][i][j] : acc[0][i][j], total);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& total = memory.sums[(kAccumulators + i) * kHopperThreads + threadIdx.x];
      total = fmaf(scale[i], sum[i], total), sum[i] = 0.f;
    }
  }

  __device__ __forceinline__ void store(float* partials) {
#pragma unroll
    for (int i = 0; i < kGradientEntries; ++i) {
      const float sum = memory.sums[i * kHopperThreads + threadIdx.x];
      partials[i * kHopperThreads + threadIdx.x] = i < kAccumulators ? sum : warp_sum(sum, 4);
    }
  }
};

#endif

template <Product product, bool kTanh, bool kBiasInK, int kWide>
__global__ void __launch_bounds__(kHopperThreads, gradient_blocks_per_sm(product))
    conv_hopper_gradient(const __grid_constant__ GradientJob job) {
#if defined(FXFUSE_HAS_WGMMA)
  extern __shared__ __align__(128) uint4 gradient_memory[];
  uint32_t place;  // row tile and group
  const int index = job.walk.row_tiles.divide(blockIdx.x, place), row_tile = place / job.lines.groups, group = place % job.lines.groups;
  const HopperMemory memory(gradient_memory, job.walk.tiling, Operand<product>::kSplits);
  HopperBlock<product, kBiasInK, 0> block(job.walk, memory, row_tile * kHopperRows);
  WeightSink<product, kTanh, kWide> sink(job, memory, group, row_tile * kHopperRows);
  block.prepare(packed_row_tile(job.walk, row_tile, Operand<product>::kSplits));
  walk<product>(job.walk, memory, index, block, sink);
  sink.store(job.walk.data.partials + int64_t{blockIdx.x} * kGradientEntries * kHopperThreads);
#else
  __trap();  // a library without sm_90a code: better no result than one that nothing computed
#endif
}

}  // namespace fxfuse::conv_gelu_pool
