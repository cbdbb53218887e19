// norm_pool_gelu: from a plan to the kernel that it names, with its grid.
#pragma once

#include <vector>

#include "norm_pool_gelu_block.cuh"
#include "norm_pool_gelu_channels_last.cuh"
#include "norm_pool_gelu_plan.cuh"
#include "norm_pool_gelu_rows.cuh"
#include "norm_pool_gelu_statistics.cuh"

namespace fxfuse::norm_pool_gelu {

// Calls f(first_n, rows) for runs of samples whose output rows, `rows_per_sample` each, a 31-bit index can count.
template <typename F>
void for_each_run_of_samples(const Problem& p, int64_t rows_per_sample, const F& f) {
  const int64_t run = std::max<int64_t>(1, INT32_MAX / rows_per_sample);
  for (int64_t first_n = 0; first_n < p.num_n; first_n += run) f(first_n, std::min(run, p.num_n - first_n) * rows_per_sample);
}

template <typename T, int kVec, int kVecs, int kRows, RowsMode kMode, bool kAddend = false>
void launch_rows_kernel(const Tensor& input, const Problem& p, const RowsPlan& plan) {
  const int groups = kRowsThreads / plan.lanes;
  const size_t shared_bytes = sizeof(float) * p.w.input * (kMode == RowsMode::General ? 2 + groups : 2);
  uint32_t log2_lanes = 0;
  while ((1 << log2_lanes) < plan.lanes) ++log2_lanes;
  const int64_t rows_per_sample = p.num_channels * p.output_rows();
  for_each_run_of_samples(p, rows_per_sample, [&](int64_t first_n, int64_t rows) {
    const RowsGrid grid{static_cast<uint32_t>(plan.lanes), log2_lanes, static_cast<uint32_t>(rows), first_n, first_n * p.num_channels,
                        first_n * rows_per_sample, FastDiv(p.h.output), FastDiv(p.d.output), FastDiv(p.num_channels)};
    launch(input, {ceil_div(rows, groups), kRowsThreads, shared_bytes}, rows_kernel<T, kVec, kVecs, kRows, kMode, kAddend>, p, grid);
  });
}

// kMostRows: rows in flight that the registers allow.
template <typename T, int kVec, int kVecs, int kMostRows>
void launch_rows_tile(const Tensor& input, const Problem& p, const RowsPlan& plan) {
  constexpr bool kWide = kVec > 2;
  if (!p.addend_is_per_channel) return launch_rows_kernel<T, kVec, kVecs, 1, RowsMode::General, true>(input, p, plan);
  if constexpr (kWide && kMostRows > 1) {
    if (plan.rows_in_flight == 1) return launch_rows_tile<T, kVec, kVecs, 1>(input, p, plan);
  }
  if constexpr (kWide) {
    if (plan.exact) return launch_rows_kernel<T, kVec, kVecs, kMostRows, RowsMode::Exact>(input, p, plan);
  }
  if constexpr (kVec > 1) {
    if (plan.pairs) return launch_rows_kernel<T, kVec, kVecs, kMostRows, RowsMode::Pairs>(input, p, plan);
  }
  launch_rows_kernel<T, kVec, kVecs, kMostRows, RowsMode::General>(input, p, plan);
}

template <typename T>
void launch_plan(const Tensor& input, const Problem& p, const RowsPlan& plan) {
  constexpr int kWide = kVecLen<T>;
  if (plan.vec_len == kWide && plan.vecs == 1) return launch_rows_tile<T, kWide, 1, 2>(input, p, plan);
  if (plan.vec_len == kWide && plan.vecs == 2) return launch_rows_tile<T, kWide, 2, 2>(input, p, plan);
  if (plan.vec_len == kWide && plan.vecs == 4) return launch_rows_tile<T, kWide, 4, 1>(input, p, plan);
  if (plan.vec_len == 2 && plan.vecs == 4) return launch_rows_tile<T, 2, 4, 2>(input, p, plan);
  if (plan.vec_len == 2 && plan.vecs == 8) return launch_rows_tile<T, 2, 8, 1>(input, p, plan);
  if (plan.vec_len == 1 && plan.vecs == 8) return launch_rows_tile<T, 1, 8, 2>(input, p, plan);
  if (plan.vec_len == 1 && plan.vecs == 16) return launch_rows_tile<T, 1, 16, 1>(input, p, plan);
  throw std::runtime_error("no kernel has this tile");
}

template <typename T, bool kPairs, bool kAddend>
void launch_channels_kernel(const Tensor& input, const Problem& p, const ChannelsPlan& plan) {
  const int out_size = p.output_is_float ? sizeof(float) : sizeof(T);
  ChannelsGrid grid;
  grid.rows_per_block = plan.rows_per_block;
  grid.rows_per_sample = static_cast<int>(p.output_rows());
  grid.padded_width = plan.padded_width;
  grid.tile_stride = plan.tile_stride;
  grid.piece_bytes = p.w.output * out_size % kVecBytes == 0 ? kVecBytes : out_size;
  grid.copy_parts = std::max(1, plan.threads / kWarpSize / (plan.rows_per_block * p.window_rows()));
  grid.copy_width = static_cast<int>(ceil_div(p.w.input, grid.copy_parts));
  grid.shared = plan.shared;
  const int64_t channel_tiles = ceil_div(p.num_channels, kLineChannels<T>);
  const int64_t row_blocks = ceil_div(grid.rows_per_sample, grid.rows_per_block);
  grid.by_channel_tile = FastDiv(channel_tiles);
  grid.by_row_block = FastDiv(row_blocks);
  grid.by_oh = FastDiv(p.h.output);
  grid.by_window_rows = FastDiv(p.window_rows());
  grid.by_segments = FastDiv(plan.padded_width / kSegment);
  grid.by_row_pieces = FastDiv(p.w.output / (grid.piece_bytes / out_size));
  grid.by_copy_parts = FastDiv(grid.copy_parts);
  grid.by_kernel_h = FastDiv(p.h.kernel);
  for_each_run_of_samples(p, row_blocks * channel_tiles, [&](int64_t first_n, int64_t blocks) {
    grid.first_n = first_n;
    launch(input, {blocks, plan.threads, static_cast<size_t>(plan.shared.total)}, channels_last_kernel<T, kPairs, kAddend>, p, grid);
  });
}

template <typename T>
void launch_plan(const Tensor& input, const Problem& p, const ChannelsPlan& plan) {
  if (!p.addend_is_per_channel) return launch_channels_kernel<T, false, true>(input, p, plan);
  if (plan.pairs) return launch_channels_kernel<T, true, false>(input, p, plan);
  launch_channels_kernel<T, false, false>(input, p, plan);
}

template <typename T, int kVec, int kVecs>
void launch_block_tile(const Tensor& input, const Problem& p, const BlockPlan& plan) {
  const int out_h = p.norm_ndim >= 2 ? p.h.output : 1, out_d = p.norm_ndim >= 3 ? p.d.output : 1;
  const int64_t blocks = p.num_n * p.num_channels * (p.d.output / out_d) * (p.h.output / out_h);
  const BlockGrid grid{static_cast<int>(p.group_size()), out_d * out_h * p.w.output, FastDiv(p.h.output), FastDiv(p.d.output),
                       FastDiv(p.num_channels), FastDiv(out_h), FastDiv(p.w.output), FastDiv(p.h.input), FastDiv(p.w.input)};
  constexpr int kRows = kVec > 1 && kVec * kVecs == 8 ? 2 : 1;
  const auto kernel = p.addend_is_per_channel ? block_kernel<T, kVec, kVecs, kRows, false> : block_kernel<T, kVec, kVecs, 1, true>;
  launch(input, {blocks, plan.threads, sizeof(float) * p.group_size()}, kernel, p, grid);
}

template <typename T>
void launch_plan(const Tensor& input, const Problem& p, const BlockPlan& plan) {
  constexpr int kWide = kVecLen<T>;
  if (plan.vec_len == 1) return launch_block_tile<T, 1, 8>(input, p, plan);
  if (plan.values == 8) return launch_block_tile<T, kWide, 8 / kWide>(input, p, plan);
  launch_block_tile<T, kWide, 16 / kWide>(input, p, plan);
}

// Dense strides of [N, C, D, H, W] in the input's layout.
inline Affine dense_strides(const Problem& p) {
  const int64_t c = p.num_channels, w = p.w.input, h = p.h.input, volume = p.volume_size;
  if (p.channels_last) return {c * volume, 1, c * h * w, c * w, c};
  return {c * volume, volume, h * w, w, 1};
}

// Groups are numbered in the order of the dimensions that they do not span; a channel's, in channels_last, next to its neighbour's.
inline Affine group_index(const Problem& p) {
  int64_t sizes[] = {p.d.input, p.h.input, p.num_channels};
  if (p.norm_ndim >= 2) sizes[1] = 1;
  if (p.norm_ndim >= 3) sizes[0] = 1;
  const auto [d, h, c] = sizes;
  const auto if_outside = [&](int spanned_from, int64_t stride) { return p.norm_ndim >= spanned_from ? 0 : stride; };
  if (p.channels_last && p.norm_ndim <= 3) return {d * h * c, 1, if_outside(3, h * c), if_outside(2, c), 0};
  return {if_outside(5, if_outside(4, c * d * h) + (p.norm_ndim == 4 ? 1 : 0)), if_outside(4, d * h), if_outside(3, h), if_outside(2, 1), 0};
}

inline Affine param_index(const Problem& p) {
  const int64_t w = p.w.input, h = p.h.input, volume = p.volume_size;
  const auto if_inside = [&](int norm_ndim, int64_t stride) { return p.norm_ndim >= norm_ndim ? stride : 0; };
  return {if_inside(5, p.num_channels * volume), if_inside(4, volume), if_inside(3, h * w), if_inside(2, w), 1};
}

template <typename T>
void launch_plan(const Tensor& input, const Problem& p, const StatisticsPlan& plan) {
  const int64_t channel_size = p.output_spatial();
  check(channel_size <= INT32_MAX, "a channel has ", channel_size, " outputs, but less than 2^31 are supported: split the input");
  Statistics s;
  s.unit_size = plan.unit_size;
  s.chunk_size = plan.chunk_size;
  s.units_per_channel = p.volume_size / plan.unit_size;
  s.chunks_per_unit = ceil_div(plan.unit_size, plan.chunk_size);
  const int64_t num_chunks = p.num_n * p.num_channels * s.units_per_channel * s.chunks_per_unit;
  s.num_groups = p.num_n * p.num_channels * p.volume_size / p.group_size();
  s.chunks_per_group = num_chunks / s.num_groups;
  s.merge_stride = p.channels_last && p.norm_ndim <= 3 ? p.num_channels : 1;
  s.input = dense_strides(p);
  s.group = group_index(p);
  s.param = param_index(p);
  s.by_out_h = FastDiv(p.h.output);
  s.by_out_w = FastDiv(p.w.output);
  const auto workspace = [&](size_t bytes) {
    return torch::stable::empty(std::vector<int64_t>{static_cast<int64_t>(bytes)}, ScalarType::Byte, std::nullopt, input.device());
  };
  const Tensor groups = workspace(s.num_groups * sizeof(float2));
  const Tensor chunks = workspace(s.chunks_per_group > 1 ? num_chunks * sizeof(RunningMoments) : 0);
  s.groups = static_cast<float2*>(groups.data_ptr());
  if (s.chunks_per_group > 1) s.chunks = static_cast<RunningMoments*>(chunks.data_ptr());

  constexpr int kThreads = kStatisticsThreads, kWarps = kThreads / kWarpSize;
  if (p.channels_last) launch(input, {ceil_div(num_chunks, kThreads), kThreads}, statistics_kernel<T, 1>, p, s);
  else launch(input, {ceil_div(num_chunks, kWarps), kThreads}, statistics_kernel<T, kWarpSize>, p, s);
  if (s.chunks) {
    const int64_t threads = std::min<int64_t>(ceil_div(s.chunks_per_group, kWarpSize) * kWarpSize, kMergeMaxThreads);
    launch(input, {s.num_groups, static_cast<int>(threads)}, merge_chunks_kernel, p, s);
  }
  const int64_t channels = p.num_n * p.num_channels;
  if (!p.channels_last) return launch(input, {channels * ceil_div(channel_size, kThreads), kThreads}, pool_contiguous_kernel<T>, p, s);
  const int64_t tiles = p.num_n * ceil_div(channel_size, kPoolTile) * ceil_div(p.num_channels, kPoolTile);
  launch(input, {tiles, kThreads}, pool_channels_last_kernel<T>, p, s);
}

}  // namespace fxfuse::norm_pool_gelu
