// conv_norm_pool_gelu on Hopper: how a warpgroup brings planes of the input into shared memory, for the forward and for the gradient.
#pragma once

#include "conv_norm_pool_gelu_hopper_load.cuh"

namespace fxfuse::conv_norm_pool_gelu {

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

// The columns of tiles that a block walks, (sample, row block) pairs, and how many planes of each it reads, those beyond the input as zeros.
struct ColumnWalk {
  int first, step, columns, row_blocks, planes;
};

// Two warpgroups take planes in turns and read the one behind theirs.
template <typename Plan>
__device__ __forceinline__ ColumnWalk walk_of(const Problem& p, const Plan& plan, int first, int step) {
  return {first, step, plan.columns, plan.row_blocks, (p.d.input + 1) / 2 * 2 + 1};
}

// A plane of a walk: from: the tile's first row in it; rows: how many the input has from there on, 0 outside of it.
template <typename T, int kTileRows>
struct PlanePosition {
  int column, plane, rows;
  const T* from;

  __device__ __forceinline__ void start(const Problem& p, const ColumnWalk& walk, int of) {
    const int n = of / walk.row_blocks;
    const int first_row = (of - n * walk.row_blocks) * kTileRows;
    column = of, plane = 0;
    from = static_cast<const T*>(p.input) + n * p.input_stride[0] + first_row * p.input_stride[3];
    rows = column < walk.columns ? p.h.input - first_row : 0;
  }
  __device__ __forceinline__ void advance(const Problem& p, const ColumnWalk& walk) {
    if (++plane == walk.planes) return start(p, walk, column + walk.step);
    from += p.input_stride[2];
    if (plane == p.d.input) rows = 0;
  }
};

// 8 input channels of this lane's pixel as they come from memory, in registers: one each, or 16 bytes at a time where Problem::reads_records.
// Nothing here waits for them.
template <typename T>
struct RawLine {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, unsigned short>;
  uint32_t words[kWarpChannels];

  // channels: how many exist.
  __device__ __forceinline__ void load(const Problem& p, const T* from, int channels) {
    if (p.reads_records) {
      constexpr int kChunks = kWarpChannels * sizeof(T) / kChunkBytes, kPerChunk = kWarpChannels / kChunks;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const uint4 chunk = i * kPerChunk < channels ? __ldg(reinterpret_cast<const uint4*>(from) + i) : uint4{};
        memcpy(words + 4 * i, &chunk, sizeof chunk);
      }
      return;
    }
    const Bits* bits = reinterpret_cast<const Bits*>(from);
    // Opaque, or the compiler keeps the addresses of all channels in registers, of which a producer has few.
    asm volatile("" : "+l"(bits));
    if (channels >= kWarpChannels) {
#pragma unroll
      for (int c = 0; c < kWarpChannels; ++c, bits += p.input_stride[1]) words[c] = __ldg(bits);
    } else {
#pragma unroll
      for (int c = 0; c < kWarpChannels; ++c, bits += p.input_stride[1]) words[c] = c < channels ? __ldg(bits) : Bits{0};
    }
  }

  __device__ __forceinline__ void unpack(const Problem& p, T (&value)[kWarpChannels]) const {
    if (sizeof(T) == 4 || p.reads_records) {
      memcpy(value, words, sizeof value);
      return;
    }
#pragma unroll
    for (int c = 0; c < kWarpChannels; ++c) memcpy(value + c, words + c, sizeof(T));
  }
};

// A warp brings 8 input channels; lane = pixel, so that a load of contiguous input is one line. kAtOnce lines are under way, of the next
// plane too: a line's registers take a new one as soon as it is stored. store_line(shared address, 8 channels of this lane's pixel).
template <typename Tile, int kAtOnce, typename T, typename S>
__device__ __forceinline__ void produce_planes(const Problem& p, const ColumnWalk& walk, const HopperBarriers& barriers, const S& store_line) {
  constexpr int kLines = Tile::kRows + 1;
  const int lane = threadIdx.x % kWarpSize, channel = threadIdx.x / kWarpSize % kProducerWarps * kWarpChannels;
  const int offset = channel * static_cast<int>(p.input_stride[1]) + lane * static_cast<int>(p.input_stride[4]);  // 32 bits: hopper_takes
  RawLine<T> raw[kAtOnce];
  PlanePosition<T, Tile::kRows> at;
  at.start(p, walk, walk.first);
  const auto load = [&](RawLine<T>& to, int line) {
    const int channels = line < at.rows ? p.in_channels - channel : 0;
    to.load(p, at.from + (offset + line * static_cast<int>(p.input_stride[3])), channels);
  };
#pragma unroll
  for (int line = 0; line < kAtOnce; ++line) load(raw[line], line);
#pragma unroll 1
  for (uint32_t count = 0; at.column < walk.columns; ++count) {
    const int slot = count % Tile::kSlots;
    const uint32_t to = barriers.planes + slot * Tile::kPlaneBytes + channel / Tile::kChunkChannels * Tile::kChunkPitch;
    mbarrier_wait(barriers.plane_empty(slot), (count / Tile::kSlots & 1) ^ 1);
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      T value[kWarpChannels];
      raw[line % kAtOnce].unpack(p, value);
      store_line(to + line * Tile::kLineBytes, value);
      if (line + kAtOnce == kLines) at.advance(p, walk);
      load(raw[line % kAtOnce], line + kAtOnce < kLines ? line + kAtOnce : line % kAtOnce);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.plane_full(slot));
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
