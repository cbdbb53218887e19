// conv_gelu_pool, Hopper path: which shapes and which tiles. Pure functions of shape, operand type and shared memory.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <sstream>
#include <string>

#include "conv_gelu_pool_plan.cuh"

namespace fxfuse::conv_gelu_pool {

constexpr int kHopperThreads = 128, kHopperRows = 64, kRunLen = 128;  // wgmma's m64 n128
constexpr int kMostSteps = 48;
constexpr int kStepBytes = 2 * kHopperRows * kChunkBytes;  // of weights, a K step
constexpr int kOnesBytes = kRunLen * kChunkBytes;
constexpr int kMaskBytes = kRunLen / 8;  // a bit a column

// Samples of a box are numbered along its rows, halo included: output pixel (z, y, x) of a tile is sample (z * box[1] + y) * box[2]
// + x, and a tap adds a constant to that. So a product's columns are any kRunLen samples in a row; those that fall on the halo are masked.
struct HopperTiling {
  int tile[3], tiles[3], box[3];
  int samples, plane;  // of the box; of a chunk with the samples that the last run reads behind it
  int chunks, k_steps, runs;
  bool has_spare_chunk;  // K is odd in chunks: the last step pairs the last one with a row of ones
  int at[kMostSteps], pitch[kMostSteps];  // of each K step, in samples: its first half, and from that to its second half
  size_t shared_bytes;
  int blocks_per_sm;

  __host__ __device__ int num_tiles() const { return tiles[0] * tiles[1] * tiles[2]; }

  std::string describe() const {
    const auto triple = [](const int(&x)[3]) { return std::to_string(x[0]) + "x" + std::to_string(x[1]) + "x" + std::to_string(x[2]); };
    std::ostringstream text;
    text << "hopper(tile=" << triple(tile) << ", box=" << triple(box) << ", runs=" << runs << ", chunks=" << chunks << ", k_steps=" << k_steps
         << ", spare_chunk=" << has_spare_chunk << ", shared=" << shared_bytes << ", blocks_per_sm=" << blocks_per_sm << ")";
    return text.str();
  }
};

// Where each K step's halves are: pairs of (chunk, tap) in ascending order of address, since a descriptor's pitch is not negative.
inline void place_steps(HopperTiling& t, const ConvShape& shape, int splits) {
  const int taps = static_cast<int>(shape.taps());
  const auto sample_of = [&](int pair) {
    const int chunk = pair / taps, tap = pair % taps;
    if (chunk == t.chunks) return t.chunks * splits * t.plane;  // the row of ones
    const int w = tap % shape.kernel[2] * shape.dilation[2], h = tap / shape.kernel[2] % shape.kernel[1] * shape.dilation[1];
    const int d = tap / shape.kernel[2] / shape.kernel[1] * shape.dilation[0];
    return chunk * t.plane + (d * t.box[1] + h) * t.box[2] + w;
  };
  for (int step = 0; step < t.k_steps; ++step) {
    t.at[step] = sample_of(2 * step);
    t.pitch[step] = sample_of(2 * step + 1) - t.at[step];
  }
}

inline std::optional<HopperTiling> hopper_tiled(const ConvShape& shape, std::array<int, 3> tile, int chunks, int splits, size_t sm_bytes,
                                                size_t block_bytes) {
  HopperTiling t{.chunks = chunks};
  int64_t span = 0, last_tap = 0, samples = 1;
  for (int i = 0; i < 3; ++i) {
    t.tile[i] = tile[i];
    t.tiles[i] = ceil_div(shape.out[i], tile[i]);
    t.box[i] = tile[i] + (shape.kernel[i] - 1) * shape.dilation[i];
    span = span * t.box[i] + tile[i] - 1;
    last_tap = last_tap * t.box[i] + (shape.kernel[i] - 1) * shape.dilation[i];
    samples *= t.box[i];
  }
  const int64_t pairs = chunks * shape.taps();
  t.runs = ceil_div(span + 1, kRunLen);
  const int64_t plane = std::max(samples, int64_t{t.runs} * kRunLen + last_tap);
  t.k_steps = ceil_div(pairs, 2);
  t.has_spare_chunk = pairs % 2 == 1;
  t.shared_bytes = (plane * chunks * splits) * kChunkBytes + int64_t{t.k_steps} * splits * kStepBytes + kOnesBytes +
                   t.runs * kMaskBytes;
  if (t.shared_bytes > block_bytes || int64_t{t.tiles[0]} * t.tiles[1] * t.tiles[2] > INT32_MAX) return std::nullopt;
  t.samples = static_cast<int>(samples);
  t.plane = static_cast<int>(plane);
  t.blocks_per_sm = std::min<int>(4, static_cast<int>(sm_bytes / (t.shared_bytes + 1024)));
  place_steps(t, shape, splits);
  return t;
}

// Instructions of a thread, as in the portable policy, times what is lost where few blocks share an SM and none computes while all load.
inline double hopper_cost(const HopperTiling& t, int splits) {
  constexpr double kPerChunk = 48, kPerGelu = 13, kPerMask = 1.5, kPerStep = 0.5, kPerBox = 500.0 * kHopperThreads;
  constexpr double kLoss[] = {0, 1.9, 1.35, 1.1, 1.0};
  // Masks are applied to groups of 32 columns, where the group touches the halo.
  const int halo = t.box[2] - t.tile[2];
  const double masked = halo == 0 ? 0 : std::min(1.0, (kWarpSize + halo) / static_cast<double>(t.box[2]));
  const double per_output = kPerGelu + kPerMask * masked + kPerStep * t.k_steps * (splits == 2 ? 3 : 1);
  const double box = static_cast<double>(t.samples) * t.chunks * splits * kPerChunk + kPerBox +
                     static_cast<double>(t.runs) * kRunLen * kHopperRows * per_output;
  return t.num_tiles() * box * kLoss[t.blocks_per_sm];
}

// Strides of 1, more than 32 output channels, and all weights of 64 output channels in shared memory with a box of input; nullopt else.
// sm_bytes, block_bytes: shared memory of an SM, and the most that one block can have.
inline std::optional<HopperTiling> make_hopper_tiling(const ConvShape& shape, int chunk_len, int splits, size_t sm_bytes,
                                                      size_t block_bytes) {
  const int chunks = ceil_div(shape.channels_in, chunk_len);
  for (const int stride : shape.stride) {
    if (stride != 1) return std::nullopt;
  }
  if (shape.channels_out <= kWarpRows || ceil_div(chunks * shape.taps(), 2) * splits > kMostSteps) return std::nullopt;
  std::vector<int> widths = tile_sizes(shape.out[2], 1024);
  const int halo = (shape.kernel[2] - 1) * shape.dilation[2];
  for (int width = kRunLen; width <= 1024; width += kRunLen) {
    if (width > halo && width - halo < shape.out[2]) widths.push_back(width - halo);
  }
  std::optional<HopperTiling> best;
  for (const int w : widths) {
    for (int h = 1; h <= std::min(shape.out[1], 64); ++h) {
      for (const int d : tile_sizes(shape.out[0], 16)) {
        const auto t = hopper_tiled(shape, {d, h, w}, chunks, splits, sm_bytes, block_bytes);
        if (t && t->blocks_per_sm >= 2 && (!best || hopper_cost(*t, splits) < hopper_cost(*best, splits))) best = t;
      }
    }
  }
  return best;
}

}  // namespace fxfuse::conv_gelu_pool
