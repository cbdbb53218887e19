// conv_norm_pool_gelu, gradients of weight and norm_weight on Hopper, without the convolution's output or its gradient in memory.
//
// The forward's kernel first writes, in place of each output, the gradient of every value in its window (134 MB in fp32 at the headline's
// shape, where the convolution's output has 1.07 GB). Then this one computes the output again, one parity (d, h) at a time, takes each row's
// gradient through the norm in registers, and multiplies it as operand A, of bf16 or fp16, with the pixels that made it:
//   of_weight[k, c, tap] = sum over pixels of of_y[c, pixel] * input[k, pixel + tap]
// B is the plane that the output came from, read with channels as N. In fp32 all operands are sums of two bf16 values, of whose products the
// three large ones are taken: 2^-16 of a product is left, TF32 leaves 2^-11.
//
// The weight's gradient has 27 x 32 x 64 sums, more than registers: see GradientJob. Each warpgroup walks columns of tiles along D.
#pragma once

#include "common/hopper.cuh"
#include "conv_norm_pool_gelu_gradient_plan.cuh"
#include "conv_norm_pool_gelu_hopper.cuh"

namespace fxfuse::conv_norm_pool_gelu {

// packed[tap, in the order of HopperTap][term][chunk][64 output channels][16 bytes].
template <Operand operand>
__global__ void __launch_bounds__(kPackThreads) pack_gradient_weight(const __grid_constant__ Weight w, uint4* packed) {
  using Tile = GradientTile<operand>;
  using T = DataOf<operand>;
  constexpr int kOfTerm = Tile::kWeightBytes / kChunkBytes;
  let_next_kernel_start();
  for (int i = blockIdx.x * kPackThreads + threadIdx.x; i < kHopperTaps * kOfTerm; i += gridDim.x * kPackThreads) {
    const int within = i % kOfTerm, channel_out = within % kHopperOutChannels, first_in = within / kHopperOutChannels * Tile::kChunkChannels;
    const HopperTap tap(i / kOfTerm);
    const T* from = static_cast<const T*>(w.data) + channel_out * w.stride[0] + first_in * w.stride[1] + tap.kernel_d * w.stride[2] +
                    tap.kernel_h * w.stride[3] + tap.kernel_w * w.stride[4];
    T values[Tile::kChunkChannels];
#pragma unroll
    for (int c = 0; c < Tile::kChunkChannels; ++c) {
      values[c] = channel_out < w.out_channels && first_in + c < w.in_channels ? from[c * w.stride[1]] : from_float<T>(0.f);
    }
    uint4* const to = packed + i / kOfTerm * Tile::kTerms * kOfTerm + within;
    if constexpr (Tile::kTerms == 2) split_bf16(values, to[0], to[kOfTerm]);
    else memcpy(to, values, kChunkBytes);
  }
}

#if defined(FXFUSE_HAS_WGMMA)

template <Operand operand>
struct GradientWalk {
  using Tile = GradientTile<operand>;
  using T = DataOf<operand>;
  using Mma = std::conditional_t<Tile::kTerms == 2, __nv_bfloat16, MmaOf<operand>>;
  using Values = float[Tile::kPixels / 2];
  static constexpr int kLines = Tile::kRows + 1, kWords = Tile::kPixels / 4;
  // Of descriptors, which count 16 bytes: what stands above the address, pitch of K in the lower word and of the other dimension in the upper.
  static constexpr uint32_t kCore = kCoreMatrixBytes / kChunkBytes, kChunk = Tile::kChunkPitch / kChunkBytes;
  static constexpr uint32_t kWeightK = uint32_t{Tile::kWeightPitch / kChunkBytes} << 16, kPixelK = kChunk << 16, kGradientK = kCore << 16;

  const Problem& p;
  const GradientPlan& plan;
  const GradientJob& job;
  const float* norm_params;
  const uint32_t weights, planes;  // shared addresses, in 16 bytes: the job's taps; this warpgroup's two slots
  float* const norm_sums;          // this thread's, kGradientThreads apart
  const int warpgroup;
  uint32_t raw[kLines][Tile::kChunkChannels];  // a value each, as loaded: pairs of 16 bits would make a load wait for the one before it

  __device__ __forceinline__ int warp() const { return threadIdx.x / kWarpSize % 4; }
  __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory"); }

  // A warp has the 8 channels of a chunk, a lane the pixels of one column.
  __device__ __forceinline__ void load(int64_t n, int plane, int first_row) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, unsigned short>;
    const int lane = threadIdx.x % kWarpSize, channel = warp() * Tile::kChunkChannels;
    const int64_t first = n * p.input_stride[0] + channel * p.input_stride[1] + plane * p.input_stride[2] + first_row * p.input_stride[3] +
                          lane * p.input_stride[4];
    const Bits* line = static_cast<const Bits*>(p.input) + first;
    // Addresses by additions alone, which the compiler is kept from undoing: what it takes from constant memory for each, the load waits for.
    asm volatile("" : "+l"(line));
    const int rows = plane < p.d.input ? p.h.input - first_row : 0, channels = p.in_channels - channel;
    const int64_t channel_pitch = p.input_stride[1], row_pitch = p.input_stride[3];
#pragma unroll
    for (int row = 0; row < kLines; ++row, line += row_pitch) {
      const Bits* value = line;
#pragma unroll
      for (int c = 0; c < Tile::kChunkChannels; ++c, value += channel_pitch) raw[row][c] = row < rows && c < channels ? __ldg(value) : Bits{0};
    }
  }

  __device__ __forceinline__ void store(int plane) const {
    const uint32_t to = planes * kChunkBytes + plane % Tile::kSlots * Tile::kPlaneBytes + warp() * Tile::kChunkPitch;
#pragma unroll
    for (int row = 0; row < kLines; ++row) {
      uint4 words;
      if constexpr (Tile::kTerms == 2) {
        float values[Tile::kChunkChannels];
        uint4 low;
#pragma unroll
        for (int c = 0; c < Tile::kChunkChannels; ++c) values[c] = __uint_as_float(raw[row][c]);
        split_bf16(values, words, low);
        store_pixel<Tile::kCopyBytes>(to + Tile::kTermBytes + row * Tile::kLineBytes, low);
      } else {
        const auto pair = [&](int c) { return raw[row][c] | raw[row][c + 1] << 16; };
        words = make_uint4(pair(0), pair(2), pair(4), pair(6));
      }
      store_pixel<Tile::kCopyBytes>(to + row * Tile::kLineBytes, words);
    }
  }

  static __device__ __forceinline__ uint64_t descriptor(uint32_t upper, uint32_t lower) { return uint64_t{upper} << 32 | lower; }

  // Where the pixels of a pair lie: its plane and row. Behind that, a tap's copy and a term, of a few constants.
  __device__ __forceinline__ uint32_t pixels_of(int d, int pair) const {
    const int neighbour_d = job.parity >> 1 ? pair >> (job.parity & 1) : 0, neighbour_h = job.parity & 1 ? pair & 1 : 0;
    return planes + (d + neighbour_d) % Tile::kSlots * (Tile::kPlaneBytes / kChunkBytes) + neighbour_h * (Tile::kLineBytes / kChunkBytes);
  }
  static __device__ __forceinline__ constexpr uint32_t copy_of(int tap_w, int term) {
    return ((tap_w == 2 ? Tile::kCopyBytes : 0) + term * Tile::kTermBytes) / kChunkBytes;
  }

  // The convolution's output, even and odd columns. Small products come first.
  __device__ __forceinline__ void multiply(Values& even, Values& odd, int d) const {
    constexpr int kProducts = Tile::kTerms == 2 ? 3 : 1;
    constexpr uint32_t kOfTap = Tile::kTerms * Tile::kWeightBytes / kChunkBytes;
    const int pairs = job.all_pairs();
    uint32_t of_pair = weights + kWeightK;
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair, of_pair += 3 * kOfTap) {
      const uint32_t pixels = pixels_of(d, pair) + kPixelK;
      wgmma_fence();
#pragma unroll
      for (int tap_w = 0; tap_w < 3; ++tap_w) {
        auto& columns = tap_w == 0 ? even : odd;
#pragma unroll
        for (int product = 0; product < kProducts; ++product) {
          const int of_weight = kProducts == 3 && product == 1, of_pixels = kProducts == 3 && product == 0;
          const uint32_t a = of_pair + tap_w * kOfTap + of_weight * (Tile::kWeightBytes / kChunkBytes);
          const uint32_t b = pixels + copy_of(tap_w, of_pixels);
#pragma unroll
          for (int k = 0; k < Tile::kChunks / 2; ++k) {
            const bool is_first = tap_w < 2 && product == 0 && k == 0;
            wgmma(columns, descriptor(kCore, a + k * (2 * Tile::kWeightPitch / kChunkBytes)), descriptor(kCore, b + k * 2 * kChunk),
                  is_first ? pair > 0 : 1, Mma{});
          }
        }
      }
      wgmma_commit();
      wgmma_wait<0>();  // with more under way the compiler, short of registers, would wait for each product
    }
  }

  // From y and the gradients of its normalised values, which two columns share, to the gradient of y. With z = y - mean, u = norm_weight * grad:
  // of_y = rstd * (u - mean(u) - z * rstd^2 * mean(u * z)).
  __device__ __forceinline__ void differentiate(Values& even, Values& odd, const Values& grad, const float (&poison)[2]) const {
    constexpr int kOfRow = 2 * Tile::kRows;
    constexpr float kInverseWidth = 1.f / (2 * kHopperWidth);
    const int q = threadIdx.x % 4;
    float rstd[kOfRow], mean_u[kOfRow] = {}, mean_uz[kOfRow] = {};
    center_rows<Tile::kRows>(even, odd, rstd, poison, p.eps);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float4 weight = *reinterpret_cast<const float4*>(norm_params + (8 * b + 2 * q) * 2);
      float sums[4] = {};
#pragma unroll
      for (int r = 0; r < kOfRow; ++r) {
        const int i = value_index(r, b, 0);
        const float grad_0 = grad[8 * r + 2 * b], grad_1 = grad[8 * r + 2 * b + 1];
        mean_u[r] += fmaf(weight.x + weight.y, grad_0, (weight.z + weight.w) * grad_1);
        mean_uz[r] = fmaf(grad_0, fmaf(weight.x, even[i], weight.y * odd[i]), mean_uz[r]);
        mean_uz[r] = fmaf(grad_1, fmaf(weight.z, even[i + 1], weight.w * odd[i + 1]), mean_uz[r]);
        const float scaled_0 = grad_0 * rstd[r], scaled_1 = grad_1 * rstd[r];
        sums[0] = fmaf(scaled_0, even[i], sums[0]), sums[1] = fmaf(scaled_0, odd[i], sums[1]);
        sums[2] = fmaf(scaled_1, even[i + 1], sums[2]), sums[3] = fmaf(scaled_1, odd[i + 1], sums[3]);
      }
      if (job.sums_norm()) {
#pragma unroll
        for (int j = 0; j < 4; ++j) norm_sums[(4 * b + j) * kGradientThreads] += sums[j];
      }
    }
#pragma unroll
    for (int r = 0; r < kOfRow; ++r) {
      mean_u[r] = warp_sum(mean_u[r], 4) * kInverseWidth * rstd[r];
      mean_uz[r] = warp_sum(mean_uz[r], 4) * kInverseWidth * rstd[r] * rstd[r] * rstd[r];
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float4 weight = *reinterpret_cast<const float4*>(norm_params + (8 * b + 2 * q) * 2);
#pragma unroll
      for (int r = 0; r < kOfRow; ++r) {
        const auto of_y = [&](float& z, float weight, float scaled) { z = fmaf(-z, mean_uz[r], fmaf(weight, scaled, -mean_u[r])); };
        const int i = value_index(r, b, 0);
        const float scaled_0 = grad[8 * r + 2 * b] * rstd[r], scaled_1 = grad[8 * r + 2 * b + 1] * rstd[r];
        of_y(even[i], weight.x, scaled_0), of_y(odd[i], weight.y, scaled_0);
        of_y(even[i + 1], weight.z, scaled_1), of_y(odd[i + 1], weight.w, scaled_1);
      }
    }
  }

  static __device__ __forceinline__ void to_operand(const Values& values, uint32_t (&high)[kWords], uint32_t (&low)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (Tile::kTerms == 2) split_bf16(values[2 * i], values[2 * i + 1], high[i], low[i]);
      else if constexpr (operand == Operand::Fp16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(high[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
      else high[i] = bf16_low_parts(values[2 * i], values[2 * i + 1]);
    }
  }

  template <int kPairs>
  __device__ __forceinline__ void add_gradient(float (&acc)[3 * kPairs][kOfTap], const Values& even, const Values& odd, int d) const {
    constexpr uint32_t kStepPixels = 16;
    uint32_t pixels[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pixels[i] = pixels_of(d, job.first_pair + i) + kGradientK;
    uint32_t even_high[kWords], even_low[kWords], odd_high[kWords], odd_low[kWords];
    to_operand(even, even_high, even_low);
    to_operand(odd, odd_high, odd_low);
    wgmma_fence();
#pragma unroll
    for (int product = Tile::kTerms == 2 ? 0 : 2; product < 3; ++product) {
#pragma unroll
      for (int step = 0; step < Tile::kPixels / 16; ++step) {
#pragma unroll
        for (int tap = 0; tap < 3 * kPairs; ++tap) {
          const int tap_w = tap % 3;
          const uint64_t b = descriptor(kChunk, pixels[tap / 3] + (copy_of(tap_w, product == 0) + step * kStepPixels));
          if (product == 1) wgmma(acc[tap], (tap_w == 0 ? even_low : odd_low) + 4 * step, b, 1, Mma{});
          else wgmma(acc[tap], (tap_w == 0 ? even_high : odd_high) + 4 * step, b, 1, Mma{});
        }
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  // partials: of this warpgroup, [tap][sum][thread].
  template <int kPairs>
  __device__ __forceinline__ void run(int first_column, int num_walkers, float* partials) {
    float acc[3 * kPairs][kOfTap] = {};
    Values even, odd;
    const int channel = warp() * 16 + threadIdx.x % kWarpSize / 4;
    const float poison[2] = {poison_of<T>(p, channel), poison_of<T>(p, channel + 8)};
    for (int64_t column = first_column; column < plan.columns; column += num_walkers) {
      const int64_t n = column / plan.row_blocks;
      const int first_row = static_cast<int>(column - n * plan.row_blocks) * Tile::kRows;
      load(n, 0, first_row), store(0);
      load(n, 1, first_row), store(1);
      fence_async_proxy();
      sync();
#pragma unroll 1
      for (int d = 0; d < p.d.input; ++d) {
        Values grad;
        GradientRows<T, Tile::kRows> of_windows;
        // What these bring is used behind the products.
        load(n, d + 2, first_row);
        of_windows.load(p, n, channel, d, first_row);
        multiply(even, odd, d);
        of_windows.convert(p, grad);
        differentiate(even, odd, grad, poison);
        add_gradient<kPairs>(acc, even, odd, d);
        sync();
        store(d + 2);
        fence_async_proxy();
        sync();
      }
    }
#pragma unroll
    for (int tap = 0; tap < 3 * kPairs; ++tap) {
#pragma unroll
      for (int i = 0; i < kOfTap; ++i) partials[(tap * kOfTap + i) * 128 + threadIdx.x % 128] = acc[tap][i];
    }
  }
};

#endif

constexpr int kWalkerPartials = (kJobTaps * kOfTap + kNormSums) * 128;  // floats of a warpgroup: its taps' sums, then the norm's

template <Operand operand>
__global__ void __launch_bounds__(kGradientThreads, 1)
gradient_kernel(const __grid_constant__ Problem p, const __grid_constant__ GradientPlan plan, const char* __restrict__ packed, float* partials) {
#if defined(FXFUSE_HAS_WGMMA)
  using Tile = GradientTile<operand>;
  extern __shared__ __align__(128) char gradient_memory[];
  float* const norm_params = reinterpret_cast<float*>(gradient_memory);
  float* const norm_sums = reinterpret_cast<float*>(gradient_memory + Tile::kHeaderBytes) + threadIdx.x;
  const uint32_t weights = shared_address(gradient_memory) + Tile::kHeaderBytes + Tile::kNormSumBytes;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const uint32_t planes = weights + Tile::kMostTaps * Tile::kTerms * Tile::kWeightBytes + warpgroup * Tile::kSlots * Tile::kPlaneBytes;
  int job_idx = 0;
  while (job_idx < kJobs - 1 && static_cast<int>(blockIdx.x) >= plan.jobs[job_idx + 1].first_block) ++job_idx;
  const GradientJob& job = plan.jobs[job_idx];

  stage_hopper_norm_params<DataOf<operand>>(p, norm_params);
#pragma unroll
  for (int i = 0; i < kNormSums; ++i) norm_sums[i * kGradientThreads] = 0.f;
  wait_for_previous_kernel();
  const int bytes = 3 * job.all_pairs() * Tile::kTerms * Tile::kWeightBytes;
  const char* const from = packed + job.first_tap() * Tile::kTerms * Tile::kWeightBytes;
  for (int i = threadIdx.x * kChunkBytes; i < bytes; i += kGradientThreads * kChunkBytes) cp_async_16(weights + i, from + i);
  cp_async_commit();
  cp_async_wait<0>();
  fence_async_proxy();
  __syncthreads();

  GradientWalk<operand> walk{p, plan, job, norm_params, weights / kChunkBytes, planes / kChunkBytes, norm_sums, warpgroup};
  const int walker = (blockIdx.x - job.first_block) * kGradientGroups + warpgroup, walkers = job.blocks * kGradientGroups;
  float* const to = partials + int64_t{blockIdx.x * kGradientGroups + warpgroup} * kWalkerPartials;
  if (job.pairs == 1) walk.template run<1>(walker, walkers, to);
  else walk.template run<2>(walker, walkers, to);
#pragma unroll
  for (int i = 0; i < kNormSums; ++i) to[(kJobTaps * kOfTap + i) * 128 + threadIdx.x % 128] = norm_sums[i * kGradientThreads];
#endif
}

}  // namespace fxfuse::conv_norm_pool_gelu
