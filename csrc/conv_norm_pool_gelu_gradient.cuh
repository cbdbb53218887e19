// conv_norm_pool_gelu, gradients of weight, norm_weight and norm_bias on Hopper, without the convolution's output or its gradient in memory.
//
// The forward's kernel first writes, in place of each output, the gradient of every value in its window (134 MB in fp32 at the headline's
// shape, where the convolution's output has 1.07 GB). Then this one computes the output again, one parity (d, h) at a time, takes each row's
// gradient through the norm in registers, and multiplies it as operand A, of bf16 or fp16, with the pixels that made it:
//   of_weight[k, c, tap] = sum over pixels of of_y[c, pixel] * input[k, pixel + tap]
// B is the plane that the output came from, read with channels as N. In fp32 all operands are sums of bf16 values, of whose products the large
// ones are taken: of two, where TF32 is allowed, three, which leave 2^-16 of a product (TF32 leaves 2^-11); else of three, six that leave 2^-24.
//
// The weight's gradient has 27 x 32 x 64 sums, more than registers: see GradientJob. A block walks columns of tiles along D: warpgroups 0 and 1
// take planes d and d + 1, each with sums of its own; 2 brings the planes, which both read.
#pragma once

#include "common/hopper.cuh"
#include "conv_norm_pool_gelu_gradient_load.cuh"
#include "conv_norm_pool_gelu_gradient_norm.cuh"
#include "conv_norm_pool_gelu_hopper.cuh"

namespace fxfuse::conv_norm_pool_gelu {

#if defined(FXFUSE_HAS_WGMMA)

// A tile of a warpgroup's walk: plane d of a column's rows. plane: the ring's count of it.
struct GradientPosition {
  int column, n, first_row, d;
  uint32_t plane;
};

// G: the type of the windows' gradients.
template <Operand operand, typename G>
struct GradientWalk {
  using Tile = GradientTile<operand>;
  using T = DataOf<operand>;
  using Mma = std::conditional_t<(Tile::kTerms > 1), __nv_bfloat16, MmaOf<operand>>;
  using Values = float[Tile::kPixels / 2];
  static constexpr int kNormPitch = Tile::kHoldsNormSums ? kConsumerThreads : 128;
  using Terms = uint32_t[Tile::kTerms][Tile::kPixels / 4];
  // Tiles whose sums stay in the accumulators, which add towards zero: without end where that is less than the operands' own error.
  static constexpr int kMostTiles = Tile::kTerms == 3 ? 4 : INT32_MAX;
  // Of descriptors, which count 16 bytes: what stands above the address, pitch of K in the lower word and of the other dimension in the upper.
  static constexpr uint32_t kCore = kCoreMatrixBytes / kChunkBytes, kChunk = Tile::kChunkPitch / kChunkBytes;
  static constexpr uint32_t kWeightK = uint32_t{Tile::kWeightPitch / kChunkBytes} << 16, kPixelK = kChunk << 16, kGradientK = kCore << 16;
  static constexpr uint32_t kCopy = Tile::kCopyBytes / kChunkBytes;

  const Problem& p;
  const GradientJob& job;
  const ColumnWalk& columns;
  const HopperBarriers& barriers;
  const float* norm_params;
  float* const norm_sums;  // this thread's, kNormPitch apart
  const int warpgroup;

  // Of this lane, and 8 above it: see the epilogue.
  __device__ __forceinline__ int channel() const { return threadIdx.x / kWarpSize % 4 * 16 + threadIdx.x % kWarpSize / 4; }

  // ---- the walk ----

  // Both warpgroups have as many tiles: where D is odd, the last one lies outside.
  __device__ __forceinline__ GradientPosition start_of(int column, uint32_t first_plane) const {
    if (column >= columns.columns) return {column, 0, 0, p.d.input, first_plane};
    const int n = column / columns.row_blocks;
    return {column, n, (column - n * columns.row_blocks) * Tile::kRows, warpgroup, first_plane + warpgroup};
  }

  __device__ __forceinline__ GradientPosition after(const GradientPosition& at) const {
    const int d = at.d + kGradientGroups;
    if (d + 1 >= columns.planes) return start_of(at.column + columns.step, at.plane - at.d + columns.planes);
    return {at.column, at.n, at.first_row, d, at.plane + kGradientGroups};
  }

  __device__ __forceinline__ bool is_inside(const GradientPosition& at, int row) const {
    return at.d < p.d.input && at.first_row + row < p.h.input;
  }

  __device__ __forceinline__ void wait_for_plane(uint32_t plane) const {
    mbarrier_wait(barriers.plane_full(plane % Tile::kSlots), plane / Tile::kSlots & 1);
  }

  // Each warpgroup gives back every plane, also those that it does not read.
  __device__ __forceinline__ void release(uint32_t plane, uint32_t until) const {
#pragma unroll 1
    for (; plane != until; ++plane) {
      wait_for_plane(plane);
      if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(barriers.plane_empty(plane % Tile::kSlots));
    }
  }

  // ---- products ----

  static __device__ __forceinline__ uint64_t descriptor(uint32_t upper, uint32_t lower) { return uint64_t{upper} << 32 | lower; }

  // Where the pixels of a pair lie: its plane and row. Behind that, a tap's copy and a term, of a few constants.
  __device__ __forceinline__ uint32_t pixels_of(uint32_t plane, int pair) const {
    const int neighbour_d = job.parity >> 1 ? pair >> (job.parity & 1) : 0, neighbour_h = job.parity & 1 ? pair & 1 : 0;
    const uint32_t slot = (plane + neighbour_d) % Tile::kSlots;
    return (barriers.planes + slot * Tile::kPlaneBytes + neighbour_h * Tile::kLineBytes) / kChunkBytes;
  }

  // The convolution's output, even and odd columns.
  template <int kAllPairs>
  __device__ __forceinline__ void multiply(Values& even, Values& odd, uint32_t plane) const {
    wait_for_plane(plane);
    if (job.parity >> 1) wait_for_plane(plane + 1);
    wgmma_fence();
    // The small products of all pairs first, where they are to count to their last place.
    if constexpr (Tile::kTerms == 3) multiply_pairs<kAllPairs, 1, 2>(even, odd, plane);
    multiply_pairs<kAllPairs, 0, Tile::kTerms == 2>(even, odd, plane);
    wgmma_commit();
    wgmma_wait<0>();
  }

  // Those of terms i and j with kFirst <= i + j <= kLast.
  template <int kAllPairs, int kFirst, int kLast>
  __device__ __forceinline__ void multiply_pairs(Values& even, Values& odd, uint32_t plane) const {
    constexpr uint32_t kTerm = Tile::kTermBytes / kChunkBytes, kWeightTerm = Tile::kWeightBytes / kChunkBytes, kTap = Tile::kTerms * kWeightTerm;
    uint32_t of_pair = barriers.weights / kChunkBytes + kWeightK;
#pragma unroll
    for (int pair = 0; pair < kAllPairs; ++pair, of_pair += 3 * kTap) {
      const uint32_t pixels = pixels_of(plane, pair) + kPixelK;
#pragma unroll
      for (int tap_w = 0; tap_w < 3; ++tap_w) {
        auto& columns = tap_w == 0 ? even : odd;
        for_each_product<Tile::kTerms>([&](int of_weight, int of_pixels) {
          if (of_weight + of_pixels < kFirst || of_weight + of_pixels > kLast) return;
          const uint32_t a = of_pair + tap_w * kTap + of_weight * kWeightTerm, b = pixels + (tap_w == 2 ? kCopy : 0) + of_pixels * kTerm;
#pragma unroll
          for (int k = 0; k < Tile::kChunks / 2; ++k) {
            const bool is_first = pair == 0 && tap_w < 2 && of_pixels == Tile::kTerms - 1 && k == 0;
            wgmma(columns, descriptor(kCore, a + k * (2 * Tile::kWeightPitch / kChunkBytes)), descriptor(kCore, b + k * 2 * kChunk),
                  !is_first, Mma{});
          }
        });
      }
    }
  }

  __device__ __forceinline__ void add_norm_sum(int i, float value) const {
    float* const total = norm_sums + i * kNormPitch;
    if constexpr (Tile::kHoldsNormSums) *total += value;
    else atomicAdd(total, value);  // this thread's alone; nothing waits for it
  }

  static __device__ __forceinline__ void to_operand(const Values& values, Terms& terms) {
#pragma unroll
    for (int i = 0; i < Tile::kPixels / 4; ++i) {
      uint32_t words[Tile::kTerms];
      if constexpr (operand == Operand::Fp16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[0]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
      else split_bf16(values[2 * i], values[2 * i + 1], words);
#pragma unroll
      for (int term = 0; term < Tile::kTerms; ++term) terms[term][i] = words[term];
    }
  }

  // The taps of a pair: the even columns' one, and both of the odd columns as one product, whose N runs over chunks of 8 channels and, in
  // each, over the two copies of the pixels.
  struct PairSums {
    float even[kOfTap], odd[2 * kOfTap];
  };

  template <int kPairs>
  __device__ __forceinline__ void add_gradient(PairSums (&sums)[kPairs], const Values& even, const Values& odd, uint32_t plane) const {
    constexpr uint32_t kStepPixels = 16, kTerm = Tile::kTermBytes / kChunkBytes;
    uint32_t pixels[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pixels[i] = pixels_of(plane, job.first_pair + i) + kGradientK;
    Terms of_even, of_odd;
    to_operand(even, of_even);
    to_operand(odd, of_odd);
    wgmma_fence();
    for_each_product<Tile::kTerms>([&](int of_gradient, int of_pixels) {
#pragma unroll
      for (int step = 0; step < Tile::kPixels / 16; ++step) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const uint32_t b = pixels[i] + of_pixels * kTerm + step * kStepPixels;
          wgmma(sums[i].even, of_even[of_gradient] + 4 * step, descriptor(kChunk, b), 1, Mma{});
          wgmma(sums[i].odd, of_odd[of_gradient] + 4 * step, descriptor(kCopy, b), 1, Mma{});
        }
      }
    });
    wgmma_commit();
    wgmma_wait<0>();
  }

  // To this thread's own places in partials: of this warpgroup, [pair][even, then odd sums][thread].
  template <int kPairs>
  static __device__ __forceinline__ void flush(PairSums (&sums)[kPairs], float* partials, bool starts) {
    float* to = partials + threadIdx.x % 128;
    const auto move = [&](float& sum) {
      if (starts) *to = sum;
      else atomicAdd(to, sum);
      sum = 0.f, to += 128;
    };
#pragma unroll
    for (PairSums& of_pair : sums) {
#pragma unroll
      for (float& sum : of_pair.even) move(sum);
#pragma unroll
      for (float& sum : of_pair.odd) move(sum);
    }
  }

  template <int kAllPairs, bool kSumsOutput, int kPairs = kAllPairs < kJobPairs ? kAllPairs : kJobPairs>
  __device__ __forceinline__ void run(float* partials) const {
    PairSums sums[kPairs] = {};
    Values even, odd;
    GradientRows<G, Tile::kRows> of_windows;
    const float poison[2] = {poison_of<T>(p, channel()), poison_of<T>(p, channel() + 8)};
    GradientPosition at = start_of(columns.first, 0);
    release(0, at.plane);
    of_windows.load(p, at.n, channel(), at.d, at.first_row);
    int tiles = 0;
    while (at.column < columns.columns) {
      multiply<kAllPairs>(even, odd, at.plane);
      bool inside[Tile::kRows];
#pragma unroll
      for (int row = 0; row < Tile::kRows; ++row) inside[row] = is_inside(at, row);
      differentiate_rows<Tile::kRows, kSumsOutput>(even, odd, of_windows, inside, norm_params, poison, p.eps,
                                                   [&](int i, float sum) { add_norm_sum(i, sum); });
      const GradientPosition next = after(at);
      // Early, so that nothing waits for them, where registers hold them beside the operands.
      if constexpr (Tile::kTerms == 1) of_windows.load(p, next.n, channel(), next.d, next.first_row);
      add_gradient<kPairs>(sums, even, odd, at.plane);
      if constexpr (Tile::kTerms > 1) of_windows.load(p, next.n, channel(), next.d, next.first_row);
      release(at.plane, next.plane);
      at = next;
      if (kMostTiles < INT32_MAX && ++tiles % kMostTiles == 0) flush(sums, partials, tiles == kMostTiles);
    }
    flush(sums, partials, tiles < kMostTiles);
  }
};

#endif

constexpr int kWalkerPartials = (kJobSums + kNormSums) * 128;  // floats of a warpgroup: its taps' sums, then the norm's

template <Operand operand, typename G>
__global__ void __launch_bounds__(kGradientThreads, 1)
gradient_kernel(const __grid_constant__ Problem p, const __grid_constant__ GradientPlan plan, const char* __restrict__ packed, float* partials) {
#if defined(FXFUSE_HAS_WGMMA)
  using Tile = GradientTile<operand>;
  extern __shared__ __align__(128) char gradient_memory[];
  const uint32_t planes = shared_address(gradient_memory) + Tile::kHeaderBytes + Tile::kNormSumBytes;
  const HopperBarriers barriers{shared_address(gradient_memory), planes, planes + Tile::kSlots * Tile::kPlaneBytes};
  float* const norm_params = reinterpret_cast<float*>(gradient_memory + HopperBarriers::kBytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  int job_idx = 0;
  while (job_idx < kJobs - 1 && static_cast<int>(blockIdx.x) >= plan.jobs[job_idx + 1].first_block) ++job_idx;
  const GradientJob& job = plan.jobs[job_idx];
  const ColumnWalk columns = walk_of(p, plan, blockIdx.x - job.first_block, job.blocks);

  if (threadIdx.x == 0) barriers.init(1);
  stage_hopper_norm_params<DataOf<operand>>(p, norm_params);
  __syncthreads();
  if (warpgroup == kGradientGroups) {
    give_registers<56>();
    produce_gradient_operands<operand>(p, job, columns, barriers, packed);
  } else {
    take_registers<224>();
    using Walk = GradientWalk<operand, G>;
    float* const to = partials + int64_t{blockIdx.x * kGradientGroups + warpgroup} * kWalkerPartials;
    float* const norm_partials = to + kJobSums * 128 + threadIdx.x % 128;
    float* const norm_sums = Tile::kHoldsNormSums ? reinterpret_cast<float*>(gradient_memory + Tile::kHeaderBytes) + threadIdx.x : norm_partials;
#pragma unroll
    for (int i = 0; i < kNormSums; ++i) norm_sums[i * Walk::kNormPitch] = 0.f;
    mbarrier_wait(barriers.weights_full(0), 0);
    const Walk walk{p, job, columns, barriers, norm_params, norm_sums, warpgroup};
    if (job.all_pairs() == 1) walk.template run<1, true>(to);
    else if (job.all_pairs() == 2) walk.template run<2, true>(to);
    else if (job.sums_output()) walk.template run<4, true>(to);
    else walk.template run<4, false>(to);
    if constexpr (Tile::kHoldsNormSums) {
#pragma unroll
      for (int i = 0; i < kNormSums; ++i) norm_partials[i * 128] = norm_sums[i * Walk::kNormPitch];
    }
  }
#endif
}

}  // namespace fxfuse::conv_norm_pool_gelu
