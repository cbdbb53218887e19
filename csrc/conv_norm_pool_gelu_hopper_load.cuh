// conv_norm_pool_gelu on Hopper: how weights come into shared memory, and the barriers between producers and consumers.
#pragma once

#include "common/hopper.cuh"
#include "conv_norm_pool_gelu_hopper_plan.cuh"
#include "conv_norm_pool_gelu_pack.cuh"

namespace fxfuse::conv_norm_pool_gelu {

// ---- weights -----------------------------------------------------------------------------------------------------

// packed[tap, in the order of HopperTap][term][chunk of input channels][64 output channels][16 bytes]; zeros beyond the weight's channels.
template <Operand operand>
__global__ void __launch_bounds__(kPackThreads) pack_hopper_weight_kernel(const __grid_constant__ Weight w, uint32_t* packed) {
  using Tile = HopperTile<operand>;
  using T = DataOf<operand>;
  constexpr int kPerWord = 4 / sizeof(T), kStageWords = Tile::kStageBytes / 4;
  let_next_kernel_start();
  for (int i = blockIdx.x * kPackThreads + threadIdx.x; i < Tile::kTileStages * kStageWords; i += gridDim.x * kPackThreads) {
    const int word = i % 4, out_channel = i / 4 % kHopperOutChannels, chunk = i / (4 * kHopperOutChannels) % Tile::kChunks;
    const int term = i / kStageWords % Tile::kTerms, in_channel = chunk * Tile::kChunkChannels + word * kPerWord;
    const HopperTap tap(i / kStageWords / Tile::kTerms);
    const T* from = static_cast<const T*>(w.data) + out_channel * w.stride[0] + tap.kernel_d * w.stride[2] + tap.kernel_h * w.stride[3] +
                    tap.kernel_w * w.stride[4];
    const auto value = [&](int in_channel) {
      return out_channel < w.out_channels && in_channel < w.in_channels ? from[in_channel * w.stride[1]] : from_float<T>(0.f);
    };
    if constexpr (Tile::kTerms == 1) {
      packed[i] = operand_word<operand>(value(in_channel), value(in_channel + kPerWord - 1));
    } else {
      float high[4], low[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) split_word(fp32_word<operand>(value(in_channel - word + c)), high[c], low[c]);
      const uint4 cross = cross_chunk<CrossOrder::LowFirst>(high, low);
      packed[i] = term == 0 ? __float_as_uint(high[word]) : reinterpret_cast<const uint32_t*>(&cross)[word];
    }
  }
}

// ---- barriers ----------------------------------------------------------------------------------------------------

constexpr int kMaxStages = 12, kProducerWarps = 4, kConsumerWarps = 8;

// Addresses in shared memory. Of kPlaneSlots, a kernel whose planes are large uses fewer.
struct HopperBarriers {
  static constexpr int kBytes = 256;
  static_assert(8 * (2 * kPlaneSlots + 2 * kMaxStages) <= kBytes, "barriers fit in front of the norm's parameters");
  uint32_t base, planes, weights;

  __device__ __forceinline__ uint32_t plane_full(int slot) const { return base + 8 * slot; }
  __device__ __forceinline__ uint32_t plane_empty(int slot) const { return base + 8 * (kPlaneSlots + slot); }
  __device__ __forceinline__ uint32_t weights_full(int stage) const { return base + 8 * (2 * kPlaneSlots + stage); }
  __device__ __forceinline__ uint32_t weights_empty(int stage) const { return base + 8 * (2 * kPlaneSlots + kMaxStages + stage); }

  __device__ __forceinline__ void init(int stages) const {
    for (int i = 0; i < kPlaneSlots; ++i) mbarrier_init(plane_full(i), kProducerWarps), mbarrier_init(plane_empty(i), kConsumerWarps);
    for (int i = 0; i < stages; ++i) mbarrier_init(weights_full(i), 1), mbarrier_init(weights_empty(i), kConsumerWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// A position in the ring of weights; the parity of the barrier's phase that makes its stage full.
template <Operand operand>
struct WeightCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == HopperTile<operand>::kStages) stage = 0, parity ^= 1;
  }
};

// ---- producers ---------------------------------------------------------------------------------------------------

// One thread. 16 bits: all taps once. fp32: each tile's taps through the ring, which both consumers read in the same order.
template <Operand operand>
__device__ __forceinline__ void produce_weights(const Problem& p, const HopperPlan& plan, const HopperBarriers& barriers,
                                                const char* packed) {
  using Tile = HopperTile<operand>;
  wait_for_previous_kernel();  // which packs the weights; nothing else of this kernel depends on it
  if constexpr (Tile::kResident) {
    mbarrier_expect(barriers.weights_full(0), Tile::kTileStages * Tile::kStageBytes);
    for (int i = 0; i < Tile::kTileStages; ++i) {
      bulk_copy(barriers.weights + i * Tile::kStageBytes, packed + i * Tile::kStageBytes, Tile::kStageBytes, barriers.weights_full(0));
    }
  } else {
    WeightCursor<operand> cursor;
    for (int column = blockIdx.x; column < plan.columns; column += gridDim.x) {
      for (int tile = 0; tile < (p.d.input + 1) / 2; ++tile) {
        for (int i = 0; i < Tile::kTileStages; ++i, cursor.advance()) {
          mbarrier_wait(barriers.weights_empty(cursor.stage), cursor.parity ^ 1);
          mbarrier_expect(barriers.weights_full(cursor.stage), Tile::kStageBytes);
          bulk_copy(barriers.weights + cursor.stage * Tile::kStageBytes, packed + i * Tile::kStageBytes, Tile::kStageBytes,
                    barriers.weights_full(cursor.stage));
        }
      }
    }
  }
}

}  // namespace fxfuse::conv_norm_pool_gelu
