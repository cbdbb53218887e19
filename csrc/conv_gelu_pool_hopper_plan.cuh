// conv_gelu_pool, Hopper path: which shapes and which tiles. Pure functions of shape, operand type and device.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "common/text.h"
#include "conv_gelu_pool_plan.cuh"

namespace fxfuse::conv_gelu_pool {

constexpr int kHopperThreads = 128, kHopperRows = 64, kRunLen = 128;  // wgmma's m64 n128
constexpr int kMostSteps = 48, kStepGroup = 4;     // K steps; those in a group of products
constexpr int kMostPlaces = 128, kMostAhead = 8;  // of K steps in all phases; those that the kernel asks for ahead
constexpr int kStepBytes = 2 * kHopperRows * kChunkBytes;  // of weights, a K step
constexpr int kOnesBytes = kRunLen * kChunkBytes;
constexpr int kMaskBytes = kRunLen / 8;  // a bit a column
constexpr int kBatchSamples = 2 * kHopperThreads;

// Where a sample of a step comes from: its address when the step starts at input row 0, and its row; a row far away if it is always in
// the padding.
struct alignas(16) Source {
  const char* address;
  int row;
};

// A block walks down a strip of the image, `rows` output rows a step, and keeps the input rows in a ring in shared memory: a step's
// products need `halo` rows of the steps before and as many rows as it has itself, which came in during the step before.
//
// Samples are numbered along the rows of the box, halo included: output pixel (y, z, x) is sample (y * box[0] + z) * box[1] + x, and
// a tap adds a constant to that. So a product's columns are any kRunLen samples in a row; those that fall on the halo are masked. Runs
// start anew at each of `lines` lines: at each row where that wastes less than the masks.
//
// The ring has `slots` slots of `rows` rows. Behind `halo` rows more, the last `halo` of all are written a second time in front of the
// first slot: so every step finds its rows without a break, whatever its slot. Where steps of one row have both halves of all K steps in
// one row of the kernel, a break between rows does no harm and `where` has an own part for each slot: that saves the halo's memory.
struct HopperTiling {
  int rows, tile[2], box[2];   // of a step: output rows; depth and width, in outputs and in samples
  int tiles[3];                // along depth, the steps of a strip, along width
  int row, halo, slots, plane; // samples of a row; rows; slots; samples of the ring, of one chunk of channels
  int ring, ring_end;          // samples of all slots; where a step's rows never start
  int mirror;                  // samples from there on go a second time, a ring before
  int phases;                  // parts of `where`: 1, or slots
  int window_pitch, where_pitch;  // from one slot to the next: samples of the window, entries of `where`
  bool has_pairs;              // samples come in pairs along the width, aligned in memory
  int shift;                   // samples of the box in front of the first tap's, for that alignment
  int lines, line_runs;
  int chunks, k_steps;
  bool has_spare_chunk;        // K is odd in chunks: the last step pairs the last one with a row of ones
  // Of each phase and K step, in samples: its first half, and from that to its second half << 16.
  uint32_t where[kMostPlaces + kMostAhead];
  int spare_samples;           // behind the ring, where a gradient's columns without a pixel must find numbers
  size_t shared_bytes;
  int blocks_per_sm, blocks;   // at a time; for the whole batch and 64 output channels

  __host__ __device__ int step_samples() const { return rows * row; }
  __host__ __device__ int line_rows() const { return rows / lines; }
  __host__ __device__ int ring_samples(int splits) const { return splits * chunks * plane + spare_samples; }
  // A row of ones, in Fp32 of zeros.
  __host__ __device__ int ones_bytes() const { return has_spare_chunk ? kOnesBytes : 0; }
  __host__ __device__ int steps() const { return tiles[0] * tiles[1] * tiles[2]; }  // of an image
  __host__ __device__ int lead() const { return (halo + rows - 1) / rows; }  // steps that a strip loads ahead of its first

  std::string describe() const {
    return text_from("hopper(step=", tile[0], "x", rows, "x", tile[1], ", box=", box[0], "x", rows, "+", halo, "x", box[1], ", slots=",
                     slots, ", phases=", phases, ", pairs=", has_pairs, ", runs=", lines, "x", line_runs, ", blocks=", blocks, ", chunks=",
                     chunks, ", k_steps=", k_steps, ", spare_chunk=", has_spare_chunk, ", shared=", shared_bytes, ", blocks_per_sm=",
                     blocks_per_sm, ")");
  }
};

// A 1-d convolution walks along its width: its pixels become a column.
inline bool is_turned(const ConvShape& shape) { return shape.in[1] == 1 && shape.kernel[1] == 1 && shape.padding[1] == 0; }
inline ConvShape turned(ConvShape shape) {
  for (int* of : {shape.in, shape.out, shape.kernel, shape.stride, shape.padding, shape.dilation}) std::swap(of[1], of[2]);
  return shape;
}

// The halves of K, two to a step: taps by rows, depth, width, with all chunks of a tap together where that keeps steps within a tap, else
// chunk by chunk. The second half of a step is at the higher address: a descriptor's pitch is not negative.
struct Half {
  int chunk, h, d, w;  // chunk == chunks: the spare one

  __host__ __device__ Half(const ConvShape& shape, int chunks, int half) {
    const int taps = shape.kernel[0] * shape.kernel[1] * shape.kernel[2];
    const int tap = chunks % 2 == 0 ? half / chunks : half % taps;
    chunk = half == chunks * taps ? chunks : chunks % 2 == 0 ? half % chunks : half / taps;
    w = tap % shape.kernel[2], d = tap / shape.kernel[2] % shape.kernel[0], h = tap / shape.kernel[2] / shape.kernel[0];
  }
};

inline void place_steps(HopperTiling& t, const ConvShape& shape, int splits) {
  const auto sample_of = [&](int half, int phase) {
    const Half place(shape, t.chunks, half);
    if (place.chunk == t.chunks) return t.ring_samples(splits);  // the row of ones
    const int row = t.phases > 1 ? (phase + place.h * shape.dilation[1]) % t.slots : place.h * shape.dilation[1];
    return place.chunk * t.plane + row * t.row + place.d * shape.dilation[0] * t.box[1] + t.shift + place.w * shape.dilation[2];
  };
  for (int phase = 0; phase < t.phases; ++phase) {
    for (int step = 0; step < t.k_steps; ++step) {
      const int at = sample_of(2 * step, phase);
      t.where[phase * t.k_steps + step] = at | (sample_of(2 * step + 1, phase) - at) << 16;
    }
  }
}

inline int last_run(const HopperTiling& t, int splits) {
  const int last_window = t.phases == 1 ? (t.slots - 1) * t.step_samples() : 0;
  return last_window + (t.lines - 1) * t.row + (t.line_runs - 1) * kRunLen + (splits - 1) * t.chunks * t.plane;
}

// The sample behind the furthest that a product reads. What the last run reads behind the ring is masked and mostly lies in what follows
// it, but a block must own it; and compute-sanitizer takes the two halves of a K step, kRunLen samples each, for one piece.
inline int end_of_reads(const HopperTiling& t, int splits) {
  int end = 0;
  for (int i = 0; i < t.phases * t.k_steps; ++i) {
    const bool has_ones = t.has_spare_chunk && (i + 1) % t.k_steps == 0;  // its second half is no sample
    const int at = t.where[i] & 0xffff, pitch = has_ones ? 0 : t.where[i] >> 16;
    end = std::max(end, last_run(t, splits) + at + std::max(pitch, kRunLen) + kRunLen);
  }
  return end;
}

// What a kernel needs, and what the device has. gradient_bytes: of a block's sums of a gradient, 0 for the forward.
// sm_bytes, block_bytes: shared memory of an SM, and the most that one block can have.
struct HopperNeeds {
  int chunk_len, splits, most_blocks_per_sm;
  int64_t gradient_bytes;
  size_t sm_bytes, block_bytes;
  int num_sms;
};

inline HopperNeeds hopper_needs(Product product, int most_blocks_per_sm, int64_t gradient_bytes, int device_index) {
  const auto bytes = [&](cudaDeviceAttr attribute) { return static_cast<size_t>(device_attribute(attribute, device_index)); };
  return {chunk_len(product), num_splits(product), most_blocks_per_sm, gradient_bytes, bytes(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
          bytes(cudaDevAttrMaxSharedMemoryPerBlockOptin), device_attribute(cudaDevAttrMultiProcessorCount, device_index)};
}

inline std::optional<HopperTiling> hopper_tiled(const ConvShape& shape, std::array<int, 3> tile, bool has_lines, bool allows_pairs,
                                                const HopperNeeds& needs) {
  const int chunks = ceil_div(shape.channels_in, needs.chunk_len), splits = needs.splits;
  HopperTiling t{.rows = tile[1], .tile = {tile[0], tile[2]}, .chunks = chunks};
  for (int i = 0; i < 3; ++i) t.tiles[i] = ceil_div(shape.out[i], tile[i]);
  t.has_pairs = allows_pairs && (t.tiles[2] == 1 || tile[2] % 2 == 0);
  t.shift = t.has_pairs ? shape.padding[2] % 2 : 0;
  const auto reach = [&](int i) { return int64_t{shape.kernel[i] - 1} * shape.dilation[i]; };
  int64_t width = t.shift + tile[2] + reach(2);
  if (t.has_pairs) width += width % 2;
  const int64_t depth = tile[0] + reach(0), row = depth * width;
  const int64_t most = static_cast<int64_t>(needs.block_bytes) / kChunkBytes, halves = chunks * shape.taps();
  if (std::max({depth, width, reach(1)}) > most || int64_t{t.tiles[0]} * t.tiles[1] * t.tiles[2] > INT32_MAX) return std::nullopt;
  t.slots = 2 + ceil_div(reach(1), t.rows);
  t.k_steps = ceil_div(halves, 2);
  t.has_spare_chunk = halves % 2 == 1;
  const bool has_even_rows = chunks * shape.kernel[0] * shape.kernel[2] % 2 == 0;
  const bool has_phases = t.rows == 1 && has_even_rows && t.slots * int64_t{t.k_steps} <= kMostPlaces;
  t.phases = has_phases ? t.slots : 1;
  const int64_t plane = (t.slots * int64_t{t.rows} + (has_phases ? 0 : reach(1))) * row;
  if (plane * chunks * splits > most) return std::nullopt;
  t.box[0] = static_cast<int>(depth), t.box[1] = static_cast<int>(width), t.row = static_cast<int>(row);
  t.halo = static_cast<int>(reach(1)), t.plane = static_cast<int>(plane);
  t.ring = t.slots * t.step_samples();
  t.ring_end = t.ring + (has_phases ? 0 : t.halo * t.row);
  t.mirror = has_phases ? INT32_MAX : t.ring;
  t.window_pitch = has_phases ? 0 : t.step_samples();
  t.where_pitch = has_phases ? t.k_steps : 0;
  t.lines = has_lines ? t.rows : 1;
  t.line_runs = ceil_div((int64_t{t.line_rows() - 1} * depth + tile[0] - 1) * width + tile[2], kRunLen);
  const int furthest = (chunks - 1) * t.plane + (has_phases ? t.slots - 1 : t.halo) * t.row + t.row + kRunLen;
  t.spare_samples = needs.gradient_bytes > 0 ? std::max(0, last_run(t, splits) + furthest - splits * chunks * t.plane) : 0;
  place_steps(t, shape, splits);
  const int64_t own_bytes = int64_t{t.ring_samples(splits)} * kChunkBytes + t.ones_bytes() + int64_t{t.k_steps} * splits * kStepBytes +
                            int64_t{t.lines} * t.line_runs * kMaskBytes + t.step_samples() * sizeof(Source) + needs.gradient_bytes;
  t.shared_bytes = std::max(own_bytes, int64_t{end_of_reads(t, splits)} * kChunkBytes);
  if (t.shared_bytes > needs.block_bytes) return std::nullopt;
  t.blocks_per_sm = std::min<int>(needs.most_blocks_per_sm, static_cast<int>(needs.sm_bytes / (t.shared_bytes + 1024)));
  return t;
}

// Issue slots of a warp for `steps` steps of one block, as its SM sees them when `blocks` such blocks come to each SM: the tensor cores'
// cycles add to the instructions', they hardly overlap; where few blocks share an SM, nothing fills the waits.
inline double hopper_cost(const HopperTiling& t, int chunk_len, int splits, double steps, int64_t blocks) {
  constexpr double kPerGelu = 10, kPerProduct = 60, kPerRun = 40, kPerStep = 80, kPerStrip = 500, kPerMask = 1.5;
  constexpr double kLoss[] = {0, 1.9, 1.35, 1.1, 1.0};
  const int halo = t.box[1] - t.tile[1];
  const bool has_halo = t.line_rows() > 1 || t.tile[0] > 1;
  const double of_end = t.line_runs * kRunLen > t.tile[1] ? 16.0 / kRunLen : 0;
  const double masked = has_halo && halo > 0 ? std::min(1.0, (8.0 + halo) / t.box[1]) : of_end;
  const double run = kRunLen / 2 * (kPerGelu + 2 * (splits - 1) + (t.has_spare_chunk ? 0 : 1) + kPerMask * masked) + kPerRun +
                     kPerProduct * t.k_steps * splits;
  const double per_chunk = t.has_pairs ? (chunk_len == 4 ? 10 + 12 * (splits - 1) : 16) : (chunk_len == 4 ? 22 + 10 * (splits - 1) : 34);
  const double per_sample = t.chunks * per_chunk / static_cast<double>(kHopperThreads);
  // A warp's samples come in pairs; a batch costs the warps that have none of it something, too.
  const int batches = ceil_div(t.step_samples(), kBatchSamples) * ceil_div(t.chunks * chunk_len, 8);
  const double late = 250.0 * std::max(0, batches - t.lines * t.line_runs);  // batches that no products overlap
  const double load = ceil_div(t.step_samples(), 32) * 32 * per_sample + 40 * batches + late;
  const double step = t.lines * t.line_runs * run + load + kPerStep;
  const double starts = 1 + (steps - 1) / t.tiles[1];  // loads ahead, which nothing overlaps
  const double block = steps * step + starts * (2 * per_sample * (t.halo + t.rows) * t.row + kPerStrip);
  const int64_t at_a_time = std::min<int64_t>(t.blocks_per_sm, blocks), rest = blocks % at_a_time;
  return block * ((blocks - rest) * kLoss[at_a_time] + rest * kLoss[rest]);
}

// The same for the portable path, from what it takes on an H200 for 13 shapes.
inline double portable_cost(const ConvShape& shape, const HopperTiling& t, int splits, int64_t images, int num_sms) {
  const double per_output = 18 + 4.5 * t.k_steps * splits;
  return static_cast<double>(images * shape.out_pixels()) / num_sms * kHopperRows / kHopperThreads * per_output;
}

// Strides of 1, more than 32 output channels, and all weights of 64 output channels in shared memory with a ring of input whose steps
// fill their runs well enough to be faster than the portable path, which has no gradient; nullopt else. allows_pairs: memory does.
inline std::optional<HopperTiling> make_hopper_tiling(const ConvShape& shape, bool allows_pairs, const HopperNeeds& needs) {
  constexpr int kMostRounds = 8;  // blocks that come to an SM, in turns of blocks_per_sm
  const int chunks = ceil_div(shape.channels_in, needs.chunk_len), splits = needs.splits, num_sms = needs.num_sms;
  for (const int stride : shape.stride) {
    if (stride != 1) return std::nullopt;
  }
  if (shape.channels_out <= kWarpRows || ceil_div(chunks * shape.taps(), 2) * splits > kMostSteps) return std::nullopt;
  std::vector<int> widths = tile_sizes(shape.out[2], 1024);
  const int halo = (shape.kernel[2] - 1) * shape.dilation[2];
  for (int width = kRunLen; width <= 1024; width += kRunLen) {
    for (const int w : {width, width - halo}) {
      if (w > 0 && w < shape.out[2]) widths.push_back(w);
    }
  }
  const int64_t row_tiles = ceil_div(shape.channels_out, kHopperRows);
  std::optional<HopperTiling> best;
  double best_cost = 0;
  const auto consider = [&](std::optional<HopperTiling> t) {
    if (!t || t->blocks_per_sm < 2) return;
    const int64_t steps = shape.batch * t->steps();
    for (int64_t per_sm = 1; per_sm <= kMostRounds * t->blocks_per_sm; ++per_sm) {
      const int64_t blocks = std::clamp<int64_t>(per_sm * num_sms / row_tiles, 1, std::min<int64_t>(steps, INT32_MAX));
      const int64_t of_block = ceil_div(steps, blocks), of_sm = ceil_div(blocks * row_tiles, num_sms);
      const double cost = hopper_cost(*t, needs.chunk_len, splits, static_cast<double>(of_block), of_sm);
      if (best && cost >= best_cost) continue;
      best = t, best_cost = cost, best->blocks = static_cast<int>(blocks);
    }
  };
  for (const int w : widths) {
    for (const int h : tile_sizes(shape.out[1], 1024)) {
      for (const int d : tile_sizes(shape.out[0], 16)) {
        if (int64_t{w} * h * d > 4096) continue;
        consider(hopper_tiled(shape, {d, h, w}, false, allows_pairs, needs));
        if (d == 1 && h > 1) consider(hopper_tiled(shape, {d, h, w}, true, allows_pairs, needs));
      }
    }
  }
  if (needs.gradient_bytes > 0) return best;
  // With little work any kernel is fast: only full cards are compared.
  const bool is_small = best && best->blocks * row_tiles < num_sms;
  if (best && !is_small && best_cost > portable_cost(shape, *best, splits, shape.batch * row_tiles, num_sms)) return std::nullopt;
  return best;
}

}  // namespace fxfuse::conv_gelu_pool
