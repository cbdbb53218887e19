// conv_norm_pool_gelu on Hopper: wgmma with channels as M and pixels as N, a walk along D through a ring of input planes.
//
// Every output parity (d, h, w) of the stride-2 transposed convolution is a small convolution over the same pixels, and a pool window of
// 2 x 2 x 2 is the 8 parities of one input voxel. So a thread that holds the even and the odd columns of a pixel pools without a neighbour,
// and LayerNorm over the 64 columns of a row needs two shuffles in a quad for a statistic.
//
// Warpgroups: 0 and 1 multiply, normalise and store pooled planes d and d + 1 in turns (while one is in its fp32 arithmetic the other has
// the tensor cores); 2 loads, rounds and stages planes; one thread of 3 fetches weights. 67 MB in, 134 MB out at the headline's shape in
// fp32.
#pragma once

#include "common/gelu.cuh"
#include "common/hopper.cuh"
#include "conv_norm_pool_gelu_hopper_epilogue.cuh"
#include "conv_norm_pool_gelu_hopper_planes.cuh"

namespace fxfuse::conv_norm_pool_gelu {

#if defined(FXFUSE_HAS_WGMMA)

constexpr int kCoreMatrixBytes = 8 * kChunkBytes;
template <Operand operand>
using Columns = float[HopperTile<operand>::kPixels / 2];

// The products of one output parity (d, h), even and odd columns, for `kPixels` pixels of one pooled plane. `first_plane`: the ring's
// count of the plane that the taps without a neighbour read.
template <Operand operand>
__device__ __forceinline__ void multiply_parity(Columns<operand>& even, Columns<operand>& odd, int parity, uint32_t first_plane,
                                                const HopperBarriers& barriers, WeightCursor<operand>& weights, int warpgroup) {
  using Tile = HopperTile<operand>;
  using Type = MmaOf<operand>;
  constexpr bool kTakesTurns = Tile::kTerms == 1;
  constexpr int kTurn = Tile::kResident ? 4 : 2;  // (plane, row) pairs that a warpgroup multiplies before it lets the other one go
  const int parity_d = parity >> 1, parity_h = parity & 1, num_pairs = (1 << parity_d) << parity_h;
  const bool is_first_lane = threadIdx.x % kWarpSize == 0;
  int unreleased = -1;
#pragma unroll 1
  for (int pair = 0; pair < num_pairs; ++pair) {
    const int neighbour_d = parity_d ? pair >> parity_h : 0, neighbour_h = parity_h ? pair & 1 : 0;
    if (kTakesTurns && pair % kTurn == 0) wait_for_turn(warpgroup);
    const uint32_t plane = first_plane + neighbour_d, slot = plane % kPlaneSlots;
    mbarrier_wait(barriers.plane_full(slot), plane / kPlaneSlots & 1);
    const uint32_t first_pixel = barriers.planes + slot * Tile::kPlaneBytes + neighbour_h * Tile::kLineBytes;
    const uint64_t pixels = matrix_descriptor(first_pixel, Tile::kChunkPitch, kCoreMatrixBytes);
#pragma unroll
    for (int tap_w = 0; tap_w < 3; ++tap_w) {
#pragma unroll
      for (int term = 0; term < Tile::kTerms; ++term) {
        if constexpr (!Tile::kResident) mbarrier_wait(barriers.weights_full(weights.stage), weights.parity);
        const uint64_t a = matrix_descriptor(barriers.weights + weights.stage * Tile::kStageBytes, Tile::kWeightPitch, kCoreMatrixBytes);
        const uint64_t b = pixels + ((tap_w == 2 ? Tile::kCopyBytes : 0) + term * Tile::kTermBytes) / kChunkBytes;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Tile::kChunks / 2; ++k) {
          const uint64_t a_k = a + k * (2 * Tile::kWeightPitch / kChunkBytes), b_k = b + k * (2 * Tile::kChunkPitch / kChunkBytes);
          const int accumulate = tap_w < 2 && k == 0 && term == 0 ? pair > 0 : 1;
          auto& columns = tap_w == 0 ? even : odd;
          if (term == 0) wgmma(columns, a_k, b_k, accumulate, Type{});
          else wgmma(columns, a_k, b_k, accumulate, __nv_bfloat16{});
        }
        wgmma_commit();
        if constexpr (!Tile::kResident) {
          wgmma_wait<1>();
          if (unreleased >= 0 && is_first_lane) mbarrier_arrive(barriers.weights_empty(unreleased));
          unreleased = weights.stage;
        }
        weights.advance();
      }
    }
    const bool is_last = pair == num_pairs - 1;
    if (kTakesTurns && (pair % kTurn == kTurn - 1 || is_last)) {
      give_turn(warpgroup);
      if (!Tile::kResident && !is_last) {
        wgmma_wait<0>();
        if (is_first_lane) mbarrier_arrive(barriers.weights_empty(unreleased));
        unreleased = -1;
      }
    }
  }
  wgmma_wait<0>();
  if (!Tile::kResident && is_first_lane) mbarrier_arrive(barriers.weights_empty(unreleased));
}

// Grad: void, or of which type `p.grad` is: instead of the output, the gradient of each value of a pool window then goes into `p.output`.
template <Operand operand, typename Grad>
__device__ __forceinline__ void consume(const Problem& p, const HopperPlan& plan, const HopperBarriers& barriers, const float* norm_params,
                                        int warpgroup) {
  using Tile = HopperTile<operand>;
  constexpr bool kIsGradient = !std::is_void_v<Grad>;
  const int lane = threadIdx.x % kWarpSize, channel = threadIdx.x / kWarpSize % 4 * 16 + lane / 4;
  const bool is_first_lane = lane == 0;
  const float poison[2] = {poison_of<DataOf<operand>>(p, channel), poison_of<DataOf<operand>>(p, channel + 8)};
  WeightCursor<operand> weights;
  Columns<operand> even, odd, pooled;
  const int tiles = (p.d.input + 1) / 2;
  if (Tile::kTerms == 1 && warpgroup == 1) give_turn(warpgroup);
  if (Tile::kResident) mbarrier_wait(barriers.weights_full(0), 0);
  uint32_t planes_before = 0;
  for (int column = blockIdx.x; column < plan.columns; column += gridDim.x, planes_before += 2 * tiles + 1) {
    const int n = column / plan.row_blocks, first_row = (column - n * plan.row_blocks) * Tile::kRows;
    // Each plane is released by both warpgroups, also the column's first and last, which one of them does not read.
    if (warpgroup == 1 && is_first_lane) mbarrier_arrive(barriers.plane_empty(planes_before % kPlaneSlots));
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const int d = 2 * tile + warpgroup;
      const uint32_t first_plane = planes_before + d;
      if constexpr (kIsGradient) prefetch_gradient<Grad, Tile::kRows>(p, n, d, first_row);
#pragma unroll
      for (int i = 0; i < Tile::kPixels / 2; ++i) pooled[i] = 0.f;
#pragma unroll 1
      for (int parity = 0; parity < 4; ++parity) {
        multiply_parity<operand>(even, odd, parity, first_plane, barriers, weights, warpgroup);
        if (parity == 3 && is_first_lane) {
          mbarrier_arrive(barriers.plane_empty(first_plane % kPlaneSlots));
          mbarrier_arrive(barriers.plane_empty((first_plane + 1) % kPlaneSlots));
          if (tile == tiles - 1 && warpgroup == 0) mbarrier_arrive(barriers.plane_empty((first_plane + 2) % kPlaneSlots));
        }
        add_normalised_rows<Tile::kRows>(even, odd, pooled, poison, norm_params, p.eps);
      }
      average_windows(pooled, norm_params + 2 * kHopperWidth);
      if constexpr (!kIsGradient) apply_gelu<operand>(pooled, p.gelu_is_tanh);
      else if (p.gelu_is_tanh) apply_gelu_gradient<Grad, Tile::kRows, Gelu::Tanh>(p, pooled, n, channel, d, first_row);
      else apply_gelu_gradient<Grad, Tile::kRows, kExactGelu<operand>>(p, pooled, n, channel, d, first_row);
      store_rows<DataOf<operand>, Tile::kRows>(p, pooled, n, channel, d, first_row);
    }
  }
}

#endif

template <Operand operand, typename Grad = void>
__global__ void __launch_bounds__(kHopperThreads, 1)
hopper_kernel(const __grid_constant__ Problem p, const __grid_constant__ HopperPlan plan, const char* __restrict__ packed) {
#if defined(FXFUSE_HAS_WGMMA)
  using Tile = HopperTile<operand>;
  extern __shared__ __align__(128) char shared_bytes[];
  const HopperBarriers barriers{shared_address(shared_bytes), shared_address(shared_bytes) + Tile::kHeaderBytes,
                                shared_address(shared_bytes) + Tile::kHeaderBytes + kPlaneSlots * Tile::kPlaneBytes};
  float* norm_params = reinterpret_cast<float*>(shared_bytes + HopperBarriers::kBytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform for the compiler too
  if (threadIdx.x == 0) barriers.init(Tile::kResident ? 1 : Tile::kStages);
  stage_hopper_norm_params<DataOf<operand>>(p, norm_params);
  __syncthreads();
  if (warpgroup == 3) {
    give_registers<24>();
    if (threadIdx.x == 3 * 128) produce_weights<operand>(p, plan, barriers, packed);
  } else if (warpgroup == 2) {
    give_registers<(Tile::kTerms == 2 ? 56 : 40)>();
    const ColumnWalk walk = walk_of(p, plan, blockIdx.x, gridDim.x);
    produce_planes<Tile, 2, DataOf<operand>>(
        p, walk, barriers, [](uint32_t line, const auto& value) { store_operand_line<operand>(line, value); });
  } else {
    take_registers<(Tile::kTerms == 2 ? 216 : 224)>();
    consume<operand, Grad>(p, plan, barriers, norm_params, warpgroup);
  }
#endif
}

}  // namespace fxfuse::conv_norm_pool_gelu
