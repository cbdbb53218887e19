// conv_norm_pool_gelu on Hopper: what the wgmma kernel takes, and how it lays out shared memory. Pure functions; plans print themselves.
#pragma once

#include <string>

#include "common/text.h"
#include "conv_norm_pool_gelu_operand.cuh"
#include "conv_norm_pool_gelu_problem.cuh"

namespace fxfuse::conv_norm_pool_gelu {

constexpr int kHopperWidth = 32, kHopperInChannels = 32, kHopperOutChannels = 64, kHopperThreads = 512;
constexpr int kHopperTaps = 27, kPlaneSlots = 4;

// Shared memory of one tile: 64 output channels x kPixels input pixels (kRows rows of 32) of one plane, for every output parity.
template <Operand operand>
struct HopperTile {
  static constexpr int kTerms = operand == Operand::Fp32 ? 2 : 1;
  static constexpr int kRows = kTerms == 2 ? 2 : 4, kPixels = kRows * kHopperWidth, kSlots = kPlaneSlots;
  static constexpr int kChunkChannels = kChunkBytes / static_cast<int>(sizeof(DataOf<operand>));
  static constexpr int kChunks = kHopperInChannels / kChunkChannels;

  // Terms: TF32 parts, and in Fp32 cross chunks.
  // A plane: [term][chunk of channels][copy: as it is, and shifted by one pixel along W][row, one more than kRows][pixel][16 bytes].
  // Eight pixels are a core matrix; a tap along H is another start address, one along W is the other copy, so that all rows of a tile are
  // one operand of N = kPixels.
  static constexpr int kLineBytes = kHopperWidth * kChunkBytes, kCopyBytes = (kRows + 1) * kLineBytes, kChunkPitch = 2 * kCopyBytes;
  static constexpr int kTermBytes = kChunks * kChunkPitch, kPlaneBytes = kTerms * kTermBytes;

  // Weights: [tap][term] stages of [chunk of channels][output channel][16 bytes].
  static constexpr int kWeightPitch = kHopperOutChannels * kChunkBytes, kStageBytes = kChunks * kWeightPitch;
  static constexpr int kTileStages = kHopperTaps * kTerms;

  static constexpr int kHeaderBytes = 1024, kMostBytes = 227 * 1024;
  static constexpr int kFree = (kMostBytes - kHeaderBytes - kPlaneSlots * kPlaneBytes) / kStageBytes;
  static constexpr bool kResident = kFree >= kTileStages;  // 16 bits: all weights stay
  static constexpr int kStages = kResident ? kTileStages : kFree < 12 ? kFree : 12;
  static constexpr int kSharedBytes = kHeaderBytes + kPlaneSlots * kPlaneBytes + kStages * kStageBytes;
  static_assert(kStages >= 2, "the ring of weights needs two stages");
};

struct HopperPlan {
  int rows;           // input rows (= pooled rows) of a tile
  int row_blocks;     // tiles along H
  int columns;        // (sample, row block) pairs; a block walks one along D, two planes at a time
  int blocks;
  int stages;         // weights in shared memory
  int64_t packed_bytes;
  int shared_bytes;

  std::string describe() const {
    return text_from("hopper(rows=", rows, ", columns=", columns, ", blocks=", blocks, ", stages=", stages, ", shared_bytes=", shared_bytes,
                     ")");
  }
};

template <Operand operand>
HopperPlan make_hopper_plan(const Problem& p, int num_processors) {
  using Tile = HopperTile<operand>;
  const int row_blocks = static_cast<int>(ceil_div(p.h.input, Tile::kRows));
  const int columns = static_cast<int>(p.num_n * row_blocks);  // each has at least 64 pixels: int counts all that fit any memory
  return {Tile::kRows, row_blocks, columns, std::min(columns, num_processors), Tile::kStages,
          int64_t{Tile::kTileStages} * Tile::kStageBytes, Tile::kSharedBytes};
}

// The class of the headline model: the 2x upsampling transposed convolution (kernel 3, stride 2, padding 1, output_padding 1) of rows of 32
// with up to 32 input and 33 to 64 output channels, pooled by 2; at least half as many columns as processors.
inline bool hopper_takes(const Problem& p, int compute_capability_major, int num_processors) {
  const auto doubles = [](const Axis& a) {
    return a.kernel == 3 && a.stride == 2 && a.padding == 1 && a.output == 2 * a.input && a.pool == 2;
  };
  const int64_t elements = p.input_stride[1] * (p.in_channels - 1) + p.input_stride[2] * (p.d.input - 1) +
                           p.input_stride[3] * (p.h.input - 1) + p.input_stride[4] * (p.w.input - 1);
  return compute_capability_major == 9 && p.transposed && doubles(p.d) && doubles(p.h) && doubles(p.w) && p.w.input == kHopperWidth &&
         p.in_channels <= kHopperInChannels && p.out_channels > kHopperOutChannels / 2 && p.out_channels <= kHopperOutChannels &&
         elements < INT32_MAX && 2 * p.num_n * ceil_div(p.h.input, 4) >= num_processors;
}

// Taps in the order in which a tile takes them: output parities of (d, h) one after another; within one, input planes and rows (0 or +1),
// and for each the taps along W: even outputs at the pixel, odd ones at the pixel, odd ones at its right neighbour.
struct HopperTap {
  int kernel_d, kernel_h, kernel_w;

  __host__ __device__ static int kernel_at(int parity, int neighbour) { return parity == 0 ? 1 : neighbour == 0 ? 2 : 0; }
  __host__ __device__ explicit HopperTap(int index) {
    const int w = index % 3;
    int rest = index / 3, parity = 0;
    for (int count = 1; rest >= count; count = parity == 3 ? 4 : 2) rest -= count, ++parity;
    const int parity_d = parity / 2, parity_h = parity % 2, neighbour_h = parity_h ? rest % 2 : 0, neighbour_d = parity_h ? rest / 2 : rest;
    kernel_d = kernel_at(parity_d, neighbour_d);
    kernel_h = kernel_at(parity_h, neighbour_h);
    kernel_w = w == 0 ? 1 : w == 1 ? 2 : 0;
  }
};

}  // namespace fxfuse::conv_norm_pool_gelu
