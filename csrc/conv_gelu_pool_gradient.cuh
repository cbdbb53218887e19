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
constexpr int gradient_blocks_per_sm(Product product) { return num_splits(product) == 2 ? 2 : 3; }
constexpr int kAccumulators = 36, kGradientEntries = kAccumulators + 2;  // of a thread; and its two rows' gradients of the bias
constexpr int kGradientBytes = kGradientEntries * kHopperThreads * static_cast<int>(sizeof(float));
constexpr int kMostRuns = 8;  // in the accumulators, which add towards zero

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

  const GradientJob& job;
  const HopperMemory& memory;
  const int first_line, first_row;
  uint32_t at[kLines];  // lower words of descriptors: the lines' first samples at a step
  float acc[kLines][kOfLine];
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
    for (int i = 0; i < kRunLen / 2; ++i) block.d[i] = gelu_derivative<kTanh ? Gelu::Tanh : Gelu::Fast>(block.d[i]);
    block.drop_masked(columns);
#pragma unroll
    for (int i = 0; i < kRunLen / 2; ++i) sum[i / 2 % 2] += block.d[i];
    multiply(block.d, first);
    ++runs;
  }

  // Small products come first: the tensor cores add towards zero.
  __device__ __forceinline__ void multiply(const float (&d)[kRunLen / 2], int first) {
    uint32_t high[kRunLen / 4], low[kRunLen / 4];
#pragma unroll
    for (int i = 0; i < kRunLen / 4; ++i) {
      if constexpr (kSplits == 2) split_bf16(d[2 * i], d[2 * i + 1], high[i], low[i]);
      else high[i] = pair(d[2 * i], d[2 * i + 1]);
    }
    const int second = first + job.walk.tiling.chunks * job.walk.tiling.plane;
    wgmma_fence();
    if constexpr (kSplits == 2) {
      multiply_lines(high, second, runs > 0);
      multiply_lines(low, first, true);
    }
    multiply_lines(high, first, kSplits == 2 || runs > 0);
    wgmma_commit();
    wgmma_wait<0>();
  }

  __device__ __forceinline__ void multiply_lines(const uint32_t (&a)[kRunLen / 4], int first, bool accumulate) {
    constexpr int kStepSamples = 16;
    const uint64_t pitch_of_n = static_cast<uint64_t>(job.walk.shape.dilation[2]) << 32;
#pragma unroll
    for (int step = 0; step < kRunLen / kStepSamples; ++step) {
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        wgmma(acc[i], a + 4 * step, pitch_of_n | (at[i] + first + kStepSamples * step), accumulate || step > 0, Mma{});
      }
    }
  }

  static __device__ __forceinline__ uint32_t pair(float first, float second) {
    uint32_t bits;
    if constexpr (product == Product::Fp16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    else bits = bf16_low_parts(first, second);
    return bits;
  }

  __device__ __forceinline__ void end_step() {
    if (runs >= kMostRuns) flush();
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
        total = fmaf(scale[j / 2 % 2], acc[i][j], total);
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
