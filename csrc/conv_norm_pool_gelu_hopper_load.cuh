// conv_norm_pool_gelu on Hopper: what producers bring into shared memory, and the barriers between them and the consumers.
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

// Addresses in shared memory.
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

__device__ __forceinline__ void store_shared(uint32_t to, const uint4& words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
}

// A pixel's 16 bytes into both copies; the shifted one gets a zero where the row's right neighbour would be.
template <int kCopyBytes>
__device__ __forceinline__ void store_pixel(uint32_t line, const uint4& words) {
  const int w = threadIdx.x % kWarpSize;
  const uint32_t keep = w == 0 ? 0u : 0xffffffffu;
  store_shared(line + w * kChunkBytes, words);
  store_shared(line + kCopyBytes + (w + kHopperWidth - 1) % kHopperWidth * kChunkBytes,
               make_uint4(words.x & keep, words.y & keep, words.z & keep, words.w & keep));
}

constexpr int kWarpChannels = kHopperInChannels / kProducerWarps;

// A warp's share of `kLines` lines of a plane: 8 input channels; lane = pixel, so that every load of contiguous input is one line. All are
// under way before before_stores() runs; then store_line(line, values of the channels).
template <typename T, int kLines, typename F, typename S>
__device__ __forceinline__ void stage_lines(const Problem& p, const T* from, int num_channels, int first_row, bool is_inside,
                                            const F& before_stores, const S& store_line) {
  T value[kLines][kWarpChannels];
#pragma unroll
  for (int line = 0; line < kLines; ++line) {
#pragma unroll
    for (int c = 0; c < kWarpChannels; ++c) {
      // 32-bit offsets suffice (hopper_takes); strides are read where they are used, since a producer has 40 registers.
      const bool exists = is_inside && first_row + line < p.h.input && c < num_channels;
      value[line][c] = exists ? from[c * static_cast<int>(p.input_stride[1]) + line * static_cast<int>(p.input_stride[3])]
                              : from_float<T>(0.f);
    }
  }
  before_stores();
#pragma unroll
  for (int line = 0; line < kLines; ++line) store_line(line, value[line]);
}

// The columns of tiles that a block walks, (sample, row block) pairs, and how many planes of each it reads, those beyond the input as zeros.
struct ColumnWalk {
  int first, step, columns, row_blocks, planes;
};

// kAtOnce: lines of a plane that are loaded together. store_line(shared address, 8 channels of this lane's pixel).
template <typename Tile, int kAtOnce, typename T, typename S>
__device__ __forceinline__ void produce_planes(const Problem& p, const ColumnWalk& walk, const HopperBarriers& barriers, const S& store_line) {
  const int warp = threadIdx.x / kWarpSize % kProducerWarps, lane = threadIdx.x % kWarpSize, channel = warp * kWarpChannels;
  constexpr int kRest = Tile::kRows + 1 - kAtOnce;
  uint32_t count = 0;
  for (int column = walk.first; column < walk.columns; column += walk.step) {
    const int n = column / walk.row_blocks, first_row = (column - n * walk.row_blocks) * Tile::kRows;
    const T* from = static_cast<const T*>(p.input) + n * p.input_stride[0] + channel * p.input_stride[1] + first_row * p.input_stride[3] +
                    lane * p.input_stride[4];
#pragma unroll 1
    for (int plane = 0; plane < walk.planes; ++plane, ++count, from += p.input_stride[2]) {
      const int slot = count % kPlaneSlots;
      const bool is_inside = plane < p.d.input;
      const uint32_t to = barriers.planes + slot * Tile::kPlaneBytes + channel / Tile::kChunkChannels * Tile::kChunkPitch;
      const auto store = [&](int line, const T (&value)[kWarpChannels]) { store_line(to + line * Tile::kLineBytes, value); };
      stage_lines<T, kAtOnce>(p, from, p.in_channels - channel, first_row, is_inside,
                              [&] { mbarrier_wait(barriers.plane_empty(slot), (count / kPlaneSlots & 1) ^ 1); }, store);
      if constexpr (kRest > 0) {
        stage_lines<T, kRest>(p, from + kAtOnce * p.input_stride[3], p.in_channels - channel, first_row + kAtOnce, is_inside, [] {},
                              [&](int line, const T (&value)[kWarpChannels]) { store(line + kAtOnce, value); });
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barriers.plane_full(slot));
    }
  }
}

// 8 channels of a pixel: one chunk of 16 bits, or two of fp32.
template <Operand operand>
__device__ __forceinline__ void store_operand_line(uint32_t line, const DataOf<operand> (&value)[kWarpChannels]) {
  using Tile = HopperTile<operand>;
  const auto word = [&](int chunk, int i) {
    constexpr int kPerWord = 4 / sizeof(DataOf<operand>);
    const auto* first = &value[chunk * Tile::kChunkChannels + i * kPerWord];
    return operand_word<operand>(first[0], first[kPerWord - 1]);
  };
#pragma unroll
  for (int chunk = 0; chunk < kWarpChannels / Tile::kChunkChannels; ++chunk, line += Tile::kChunkPitch) {
    uint4 words = make_uint4(word(chunk, 0), word(chunk, 1), word(chunk, 2), word(chunk, 3));
    if constexpr (Tile::kTerms == 2) {
      float high[4], low[4];
      split_word(words.x, high[0], low[0]);
      split_word(words.y, high[1], low[1]);
      split_word(words.z, high[2], low[2]);
      split_word(words.w, high[3], low[3]);
      store_pixel<Tile::kCopyBytes>(line + Tile::kTermBytes, cross_chunk<CrossOrder::HighFirst>(high, low));
      words = make_uint4(__float_as_uint(high[0]), __float_as_uint(high[1]), __float_as_uint(high[2]), __float_as_uint(high[3]));
    }
    store_pixel<Tile::kCopyBytes>(line, words);
  }
}

}  // namespace fxfuse::conv_norm_pool_gelu
