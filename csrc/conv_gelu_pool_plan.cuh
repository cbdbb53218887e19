// conv_gelu_pool, portable path: which tiles. Pure functions of shape, operand type and shared memory; a plan prints itself.
#pragma once

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "common/text.h"
#include "conv_gelu_pool_problem.cuh"

namespace fxfuse::conv_gelu_pool {

constexpr int kPortableThreads = 256, kPortableWarps = kPortableThreads / kWarpSize;
constexpr int kWarpRows = 32;
constexpr int kRowSumBytes = kPortableWarps * kWarpRows * static_cast<int>(sizeof(float));

// A warp's accumulators take a register a lane and pixel; two splits have two sets of them (see conv_gelu_pool_portable.cuh).
constexpr int warp_pixels(int splits) { return splits == 2 ? 32 : 64; }

// A block computes tiles of `tile` output pixels (padded to its warps' pixels) x 32 or 64 channels. It stages one box of input for
// `steps` tiles in a row along `axis`, if all channels and taps fit; else it walks over `stages` boxes per tile, each with some
// channels (`chunks`) and either all taps of a dimension or one, and keeps the accumulators.
struct Tiling {
  int warps_m;              // 32 output channels each; the other warps share the pixels
  int warp_pixels;
  int tile[3], steps, axis;
  int tiles[3];             // boxes along each dimension
  int taps[3];              // of a stage: 1 or kernel
  int step[3];              // input pixels between samples of the box
  int box[3];               // samples
  int plane;                // samples of one chunk
  int chunks;               // of a stage
  int channel_stages, tap_stages[3];
  int k_steps;              // tensor core steps of a stage: pairs of (chunk, tap)
  size_t shared_bytes;
  double cost;              // per image and output channel tile: instructions of a thread, as the policy counts them

  __host__ __device__ int rows() const { return warps_m * kWarpRows; }
  __host__ __device__ int pixels() const { return kPortableWarps / warps_m * warp_pixels; }
  __host__ __device__ int stages() const { return channel_stages * tap_stages[0] * tap_stages[1] * tap_stages[2]; }
  __host__ __device__ int num_tiles() const { return tiles[0] * tiles[1] * tiles[2]; }
  __host__ __device__ int stage_taps() const { return taps[0] * taps[1] * taps[2]; }

  std::string describe() const {
    const auto triple = [](const int(&x)[3]) { return std::to_string(x[0]) + "x" + std::to_string(x[1]) + "x" + std::to_string(x[2]); };
    return text_from("portable(rows=", rows(), ", tile=", triple(tile), ", steps=", steps, " along ", "dhw"[axis], ", box=", triple(box),
                     ", taps=", triple(taps), ", chunks=", chunks, ", stages=", stages(), ", k_steps=", k_steps, ", shared=", shared_bytes,
                     ")");
  }
};

// Sizes worth trying for one dimension of a tile: powers of two, and even cuts of the output.
inline std::vector<int> tile_sizes(int out, int most) {
  std::vector<int> sizes;
  for (int size = 1; size < 2 * out && size <= most; size *= 2) sizes.push_back(std::min(size, out));
  for (int cuts = 1; cuts <= 8 && cuts <= out; ++cuts) {
    if (ceil_div(out, cuts) <= most) sizes.push_back(ceil_div(out, cuts));
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes;
}

// Taps, chunks and k_steps of a stage when `taps` and `chunks` are chosen.
inline Tiling staged(const ConvShape& shape, int warps_m, int splits, std::array<int, 3> taps, int chunks, int all_chunks) {
  Tiling t{.warps_m = warps_m, .warp_pixels = warp_pixels(splits)};
  for (int i = 0; i < 3; ++i) {
    t.taps[i] = taps[i];
    t.tap_stages[i] = shape.kernel[i] / taps[i];
    // One tap needs every stride-th pixel only; several need what stride and dilation have in common.
    t.step[i] = taps[i] == 1 ? shape.stride[i] : std::gcd(shape.stride[i], shape.dilation[i]);
  }
  t.channel_stages = ceil_div(all_chunks, chunks);
  t.chunks = ceil_div(all_chunks, t.channel_stages);
  t.k_steps = ceil_div(int64_t{t.chunks} * t.stage_taps(), 2);
  return t;
}

// The tiling with its tile chosen; nullopt where it does not fit into shared memory.
inline std::optional<Tiling> tiled(Tiling t, const ConvShape& shape, std::array<int, 3> tile, int steps, int splits, size_t budget) {
  t.steps = steps;
  t.axis = shape.out[1] > tile[1] ? 1 : shape.out[0] > tile[0] ? 0 : 2;
  int64_t samples = 1, boxes = 1, num_tiles = 1;
  for (int i = 0; i < 3; ++i) {
    const int64_t span = int64_t{tile[i]} * (i == t.axis ? steps : 1);
    t.tile[i] = tile[i];
    const int64_t extent = ((span - 1) * shape.stride[i] + int64_t{t.taps[i] - 1} * shape.dilation[i]) / t.step[i] + 1;
    if (extent > 1 << 16) return std::nullopt;
    t.box[i] = static_cast<int>(extent);
    t.tiles[i] = ceil_div(shape.out[i], span);
    samples *= extent;
    boxes *= t.tiles[i];
    num_tiles *= ceil_div(shape.out[i], tile[i]);
  }
  const int64_t bytes = samples * t.chunks * splits * kChunkBytes + kChunkBytes + 2 * t.k_steps * sizeof(uint2) + kRowSumBytes;
  if (bytes > static_cast<int64_t>(budget) || boxes > INT32_MAX) return std::nullopt;
  t.plane = static_cast<int>(samples);
  t.shared_bytes = bytes;
  // Thread instructions: 14 to bring in a chunk, 12 for a GELU, 0.9 a tensor core step and output; 2000 a box for its latency.
  constexpr double kPerChunk = 14, kPerGelu = 12, kPerStep = 0.9, kPerBox = 2000;
  const double per_output = kPerGelu + kPerStep * t.k_steps * t.stages() * splits;
  t.cost = static_cast<double>(boxes) * (steps > 1 ? 1 : ceil_div(num_tiles, boxes)) * t.stages() *
               (static_cast<double>(samples) * t.chunks * splits * kPerChunk + kPerBox * kWarpSize) +
           static_cast<double>(num_tiles) * t.pixels() * t.rows() * per_output;
  return t;
}

// The cheapest tiling. `budget`: bytes of shared memory a block, so that two blocks run on an SM and one computes while the other loads.
inline Tiling make_tiling(const ConvShape& shape, int chunk_len, int splits, size_t budget) {
  const int all_chunks = ceil_div(shape.channels_in, chunk_len);
  const auto& k = shape.kernel;
  std::vector<std::array<int, 3>> groups{{k[0], k[1], k[2]}, {1, k[1], k[2]}, {1, 1, k[2]}, {1, 1, 1}};
  groups.erase(std::unique(groups.begin(), groups.end()), groups.end());
  std::optional<Tiling> best;
  double best_cost = 0;
  const auto consider = [&](const std::optional<Tiling>& t) {
    if (!t) return;
    const double cost = t->cost * ceil_div(shape.channels_out, t->rows());
    if (best && cost >= best_cost) return;
    best = t, best_cost = cost;
  };
  for (const int warps_m : {2, 1}) {
    for (const auto& group : groups) {
      for (int chunks = all_chunks; chunks >= 1; chunks = chunks == 1 ? 0 : ceil_div(chunks, 2)) {
        const Tiling t = staged(shape, warps_m, splits, group, chunks, all_chunks);
        const int pixels = t.pixels();
        for (const int w : tile_sizes(shape.out[2], pixels)) {
          for (const int h : tile_sizes(shape.out[1], pixels / w)) {
            for (const int d : tile_sizes(shape.out[0], pixels / (w * h))) {
              for (int steps = 1; steps <= (t.stages() == 1 ? 16 : 1); steps *= 2) {
                consider(tiled(t, shape, {d, h, w}, steps, splits, budget));
              }
            }
          }
        }
      }
    }
  }
  check(best.has_value(), "a convolution with kernel ", k[0], "x", k[1], "x", k[2], " does not fit into shared memory: use ",
        "fxfuse::gelu_pool behind the convolution");
  return *best;
}

}  // namespace fxfuse::conv_gelu_pool
