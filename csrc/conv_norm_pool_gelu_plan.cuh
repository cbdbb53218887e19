// conv_norm_pool_gelu, portable path: what it takes, and which tiles it works on. Pure functions of shape, dtype and device; plans print
// themselves.
#pragma once

#include <algorithm>
#include <string>

#include "common/text.h"
#include "conv_norm_pool_gelu_operand.cuh"
#include "conv_norm_pool_gelu_problem.cuh"

namespace fxfuse::conv_norm_pool_gelu {

constexpr int64_t kMaxWorkspaceBytes = 8 << 20;
constexpr int kMaxWarps = 8, kMaxChannelWarps = 4;
constexpr int kAccumulatorTiles = 16;  // of 16 x 8 that leave a warp's lanes enough registers for two blocks a processor
constexpr int kWeightStages = 2, kMostStageChunks = 2;  // ring of weights: one (kernel d, kernel h) and up to 2 chunks a stage

// A block makes `row_warps` pooled rows of one pooled plane for `channel_warps * channel_tiles * 16` output channels; a warp makes one row
// of `channel_tiles * 16` of them, with every column of W in its registers.
struct PortablePlan {
  int phases;          // of W
  int columns;         // of 8 outputs, for each phase, that a warp holds
  int channel_tiles;   // of 16 output channels, that a warp holds
  int channel_warps, row_warps;

  int num_chunks;      // records of input channels
  bool resident;       // every input that the block needs lies in shared memory at once; else it comes a plane and a few chunks at a time
  int page_chunks;     // chunks of a page: a plane's rows in shared memory
  int page_rows;
  int pages;
  int line_slots;      // pixels of a line for each of the w_step residues that it is sorted by
  int first_slot;      // pixel w_step * (slot + first_slot) + residue

  int num_offsets;     // see WidthTaps
  uint32_t has_tap;
  int shift[kMaxKernel];  // bytes from a line's start to the first column's record, for each offset

  int weight_bytes;    // of one (kernel d, kernel h, chunk): all taps along W for the block's channels
  int stage_chunks;    // chunks that a stage of the ring brings in
  int sums_pitch;      // floats of one channel's row of sums
  int64_t channel_blocks, row_blocks, blocks;
  int64_t packed_bytes;
  size_t shared_bytes;

  int threads() const { return channel_warps * row_warps * kWarpSize; }
  __host__ __device__ int channels_per_block() const { return channel_warps * channel_tiles * 16; }
  __host__ __device__ int tiles_per_block() const { return channel_warps * channel_tiles; }
  __host__ __device__ int stage_bytes() const { return stage_chunks * weight_bytes; }
  int line_bytes(int w_step) const { return w_step * line_slots * kRecordBytes; }

  std::string describe() const {
    return text_from("portable(phases=", phases, ", columns=", columns, ", channel_tiles=", channel_tiles, ", channel_warps=",
                     channel_warps, ", row_warps=", row_warps, ", resident=", resident, ", stage_chunks=", stage_chunks, ", page_chunks=",
                     page_chunks, ", page_rows=", page_rows, ", pages=", pages, ", blocks=", blocks, ", shared_bytes=", shared_bytes, ")");
  }
};

// Columns and channel tiles of a warp: 64 accumulators a lane where rows are up to 128 wide, two blocks of 8 warps a processor; 128 beyond.
inline void plan_warp(const Problem& p, PortablePlan& plan) {
  plan.phases = p.w_phases();
  int columns = 4;
  while (columns * 8 < static_cast<int>(ceil_div(p.w.output, plan.phases)) * plan.phases) columns *= 2;
  plan.columns = columns / plan.phases;
  plan.channel_tiles = columns <= 8 ? 2 : 1;
  plan.sums_pitch = columns * 8 / (p.w.pool % 2 == 0 ? 2 : 1) + 8;
}

inline void plan_line(const Problem& p, PortablePlan& plan) {
  const WidthTaps taps(p);
  const int step = p.w_step();
  plan.num_offsets = taps.num_offsets;
  plan.has_tap = taps.has_tap;
  plan.first_slot = floor_div2(taps.first_offset, step);
  const int last_slot = floor_div2(taps.first_offset + taps.num_offsets - 1, step);
  plan.line_slots = plan.columns * 8 + last_slot - plan.first_slot;
  for (int i = 0; i < kMaxKernel; ++i) {
    const int offset = taps.first_offset + i, slot = floor_div2(offset, step);
    plan.shift[i] = ((offset - slot * step) * plan.line_slots + slot - plan.first_slot) * kRecordBytes;
  }
}

// Fits the input into what `budget` leaves beside the sums: all of it, or a page of as many chunks as go in. False if not even one does.
inline bool plan_pages(const Problem& p, PortablePlan& plan, int64_t budget) {
  const int64_t warps = plan.channel_warps * plan.row_warps, columns = plan.columns * plan.phases * 8;
  plan.weight_bytes = p.w.kernel * plan.tiles_per_block() * kFragmentBytes;
  plan.page_rows = p.h.most_inputs(plan.row_warps * p.h.pool, p.transposed);
  const int planes = p.d.most_inputs(p.d.pool, p.transposed);
  const int64_t chunk_bytes = static_cast<int64_t>(plan.page_rows) * plan.line_bytes(p.w_step());
  int64_t fixed = sizeof(float) * (2 * columns + warps * plan.channel_tiles * 16 * plan.sums_pitch);
  plan.stage_chunks = std::min(plan.num_chunks, kMostStageChunks);
  if (fixed + kWeightStages * plan.stage_bytes() + plan.stage_chunks * chunk_bytes > budget) plan.stage_chunks = 1;
  fixed += kWeightStages * plan.stage_bytes();
  plan.resident = fixed + planes * plan.num_chunks * chunk_bytes <= budget;
  plan.pages = plan.resident ? planes : 1;
  plan.page_chunks = plan.num_chunks;
  if (!plan.resident) {
    const int64_t fitting = std::max<int64_t>(0, budget - fixed) / chunk_bytes;
    plan.page_chunks = static_cast<int>(std::min<int64_t>(plan.num_chunks, fitting / plan.stage_chunks * plan.stage_chunks));
  }
  plan.shared_bytes = fixed + plan.pages * plan.page_chunks * chunk_bytes;
  return plan.page_chunks > 0;
}

constexpr int kSystemSharedBytes = 1024;  // of a block's shared memory

// The sentence why no block can work on a problem, or an empty one: what a warp of its own needs. With the limits on kernel, stride, pool
// and width that the op checks and with packed_bytes <= kMaxWorkspaceBytes this is all that the portable kernel asks for.
inline std::string refusal(const Problem& p, int max_shared_bytes) {
  PortablePlan plan{.channel_warps = 1, .row_warps = 1, .num_chunks = 1};
  plan_warp(p, plan);
  plan_line(p, plan);
  if (plan_pages(p, plan, max_shared_bytes - kSystemSharedBytes)) return {};
  return text_from("a row of windows of a convolution output ", p.w.output, " wide needs ", plan.page_rows,
                   " rows of input in shared memory, more than the ", max_shared_bytes, " bytes that this device has.");
}

// For a problem that is not refused. As many rows a block as fit, with two blocks a processor where registers allow it: they share the
// weights, which come from L2 once a block, and most of their input.
inline PortablePlan make_portable_plan(const Problem& p, int record_channels, int max_shared_bytes) {
  PortablePlan plan{};
  plan_warp(p, plan);
  plan_line(p, plan);
  plan.num_chunks = static_cast<int>(ceil_div(p.in_channels, record_channels));
  const int channels = plan.channel_tiles * 16, most_channel_warps = static_cast<int>(ceil_div(p.out_channels, channels));
  const int64_t most = max_shared_bytes - kSystemSharedBytes;
  int64_t budget = plan.phases * plan.columns * plan.channel_tiles <= kAccumulatorTiles ? max_shared_bytes / 2 - kSystemSharedBytes : most;
  plan.channel_warps = std::min(most_channel_warps, 2);
  plan.row_warps = kMaxWarps / plan.channel_warps;
  while (plan.row_warps / 2 >= p.h.pooled) {
    plan.row_warps /= 2;
    if (2 * plan.channel_warps <= std::min(most_channel_warps, kMaxChannelWarps)) plan.channel_warps *= 2;
  }
  while (!plan_pages(p, plan, budget)) {
    if (plan.row_warps > 1) plan.row_warps /= 2;
    else if (budget < most) budget = most;
    else plan.channel_warps /= 2;
  }
  plan.channel_blocks = ceil_div(p.out_channels, plan.channels_per_block());
  plan.row_blocks = ceil_div(p.h.pooled, plan.row_warps);
  plan.blocks = plan.channel_blocks * plan.row_blocks * p.d.pooled * p.num_n;
  plan.packed_bytes = plan.channel_blocks * p.d.kernel * p.h.kernel * plan.num_chunks * plan.weight_bytes;
  return plan;
}

}  // namespace fxfuse::conv_norm_pool_gelu
