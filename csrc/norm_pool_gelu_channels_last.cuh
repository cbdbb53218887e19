// norm_pool_gelu on channels_last_3d input, norm over W: the rows of a window in shared memory, lanes along channels.
//
// A block makes some output rows of one sample for 128 bytes' worth of channels: a full line at every position, so that all reads are
// coalesced. It copies the windows' rows into shared memory with everything in flight at once. Then a warp takes the statistics of whole
// rows, a thread those of its own one or two channels, without exchanging anything; and a warp normalises and pools 16 positions of all
// the window's rows, in registers. The result goes through shared memory once more, because it is written contiguous: lanes along
// channels on one side, along w on the other.
#pragma once

#include "norm_pool_gelu_plan.cuh"

namespace fxfuse::norm_pool_gelu {

constexpr int kChannelsRegisters = 96;  // blocks have up to 512 threads; five of 128 share a multiprocessor

struct ChannelsGrid {
  int rows_per_block;          // output rows of a block, all of one sample
  int rows_per_sample;
  int padded_width;            // W, rounded up to segments
  int tile_stride;             // floats from one channel to the next in the output tile
  int piece_bytes;             // of a channel's output row that a thread writes at a time
  int copy_parts, copy_width;  // parts that a row is copied in, and their positions
  ChannelsShared shared;
  int64_t first_n;             // the first sample of this launch
  FastDiv by_channel_tile, by_row_block, by_oh, by_window_rows, by_segments, by_row_pieces, by_copy_parts, by_kernel_h;
};

__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global));
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// An output row of the block's sample and the input rows of its window. kWhole: no window is cut off by an edge.
template <bool kWhole>
struct OutputRow {
  uint32_t od, oh;
  int d_begin, d_len, h_begin, h_len;

  __device__ __forceinline__ OutputRow(const Problem& p, const ChannelsGrid& grid, int row_idx) {
    od = grid.by_oh.divide(row_idx, oh);
    if constexpr (kWhole) {
      d_begin = od * p.d.stride, d_len = p.d.kernel;
      h_begin = oh * p.h.stride, h_len = p.h.kernel;
    } else {
      const Axis::Window d = p.d.window(od), h = p.h.window(oh);
      d_begin = d.begin, d_len = d.len();
      h_begin = h.begin, h_len = h.len();
    }
  }
  __device__ __forceinline__ int num_rows() const { return d_len * h_len; }
  // d and h of the window's row r.
  __device__ __forceinline__ int2 position(const ChannelsGrid& grid, uint32_t r) const {
    uint32_t h = r % h_len, d = r / h_len;
    if constexpr (kWhole) d = grid.by_kernel_h.divide(r, h);
    return make_int2(d_begin + d, h_begin + h);
  }
};

// A warp starts copying positions [w, end) of a row; `from` and `to` are at position 0 and the block's first channel.
template <typename T, int kColumns>
__device__ __forceinline__ void copy_positions(const Problem& p, const T* from, T* to, int w, int end, int num_columns) {
  constexpr int kPiece = kVecLen<T>, kPieces = kColumns / kPiece, kStep = kWarpSize / kPieces;
  const int lane = threadIdx.x % kWarpSize, first_column = lane % kPieces * kPiece;
  if (first_column >= num_columns) return;
  w += lane / kPieces;
  from += static_cast<int64_t>(w) * p.num_channels + first_column;
  to += w * kColumns + first_column;
  const int64_t from_step = static_cast<int64_t>(kStep) * p.num_channels;
#pragma unroll 4
  for (; w < end; w += kStep, from += from_step, to += kStep * kColumns) copy_async_16(to, from);
}

// The same one element at a time: for channels that are not aligned to 16 bytes, and with an addend that varies within a channel.
template <typename T, bool kAddend, typename Held, int kColumns>
__device__ __forceinline__ void load_positions(const Problem& p, const T* from, Held* to, int w, int end, int num_columns, int64_t n,
                                               int first_channel, int d, int h) {
  for (int column = threadIdx.x % kWarpSize; column < num_columns; column += kWarpSize) {
    const float constant = kAddend ? channel_constant<T>(p, n, first_channel + column) : 0.f;
#pragma unroll 4
    for (int at = w; at < end; ++at) {
      const T value = from[static_cast<int64_t>(at) * p.num_channels + column];
      if constexpr (kAddend) to[at * kColumns + column] = to_float(value) + constant + element_addend<T>(p, n, first_channel + column, d, h, at);
      else to[at * kColumns + column] = value;
    }
  }
}

// Mean and rstd of a row in shared memory, for the kChannels channels from `row` on. In segments whose moments are merged, with means taken
// relative to the first segment's, so that they round well where they are far from zero.
template <typename Held, int kChannels, int kColumns>
__device__ __forceinline__ void take_statistics(const Problem& p, const Held* row, const float* poison, float2* statistics) {
  float base[kChannels], mean[kChannels], square[kChannels];
#pragma unroll
  for (int j = 0; j < kChannels; ++j) base[j] = mean[j] = square[j] = 0.f;
  const auto merge_segment = [&]<bool kWhole>(int first_w, int count) {
    Vec<Held, kChannels> held[kSegment];
#pragma unroll
    for (int i = 0; i < kSegment; ++i) {
      if (kWhole || i < count) held[i].load(row + (first_w + i) * kColumns);
      else held[i].zero();
    }
    const float share = __fdividef(count, first_w + count), weight = share * first_w;
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      float own_mean = 0.f, own_square = 0.f;
#pragma unroll
      for (int i = 0; i < kSegment; ++i) own_mean += held[i][j];
      own_mean = kWhole ? own_mean * (1.f / kSegment) : own_mean / count;
#pragma unroll
      for (int i = 0; i < kSegment; ++i) {
        const float centred = kWhole || i < count ? held[i][j] - own_mean : 0.f;
        own_square = fmaf(centred, centred, own_square);
      }
      if (first_w == 0) base[j] = own_mean;
      const float off = own_mean - base[j] - mean[j];
      mean[j] = fmaf(off, share, mean[j]);
      square[j] += fmaf(off * weight, off, own_square);
    }
  };
  int w = 0;
#pragma unroll 1
  for (; w + kSegment <= p.w.input; w += kSegment) merge_segment.template operator()<true>(w, kSegment);
  if (w < p.w.input) merge_segment.template operator()<false>(w, p.w.input - w);
#pragma unroll
  for (int j = 0; j < kChannels; ++j) {
    statistics[j] = make_float2(base[j] + mean[j], rsqrtf(fmaf(square[j], p.inverse_group_size, p.eps)) + poison[j]);
  }
}

// Writes rows of finished outputs, kPiece of them at a time: neighbouring threads take neighbouring pieces of one channel's row.
template <typename Out, int kPiece>
__device__ __forceinline__ void copy_tile_row(const Problem& p, const ChannelsGrid& grid, const float* tile, Out* to, int num_columns) {
  const int64_t channel_size = p.output_spatial();
#pragma unroll 1
  for (int i = threadIdx.x; i < num_columns * (p.w.output / kPiece); i += blockDim.x) {
    uint32_t piece;
    const uint32_t column = grid.by_row_pieces.divide(i, piece);
    Vec<Out, kPiece> out;
    out.load(reinterpret_cast<const Out*>(tile + column * grid.tile_stride) + piece * kPiece);
    out.store(to + column * channel_size + piece * kPiece);
  }
}

// Pools rows along w: lanes along the outputs of a channel, warps along channels.
template <typename T>
__device__ __forceinline__ void pool_tile_row(const Problem& p, const ChannelsGrid& grid, const float* tile, int64_t to, int num_columns,
                                              float divisor_of_rows) {
  const int64_t channel_size = p.output_spatial();
  for (int ow = threadIdx.x % kWarpSize; ow < p.w.output; ow += kWarpSize) {
    for (int column = threadIdx.x / kWarpSize; column < num_columns; column += blockDim.x / kWarpSize) {
      store_gelu<T>(p, to + column * channel_size + ow, pool_row(p, tile + column * grid.tile_stride, divisor_of_rows, ow));
    }
  }
}

// kPairs: every window is whole and takes two positions along w, side by side. kAddend: the addend varies within a channel.
template <typename T, bool kPairs, bool kAddend>
__global__ void __maxnreg__(kChannelsRegisters) channels_last_kernel(const __grid_constant__ Problem p, const __grid_constant__ ChannelsGrid grid) {
  constexpr int kColumns = kLineChannels<T>, kChannels = kColumns / kWarpSize;
  using Held = std::conditional_t<kAddend, float, T>;
  extern __shared__ __align__(16) float shared[];
  char* const bytes = reinterpret_cast<char*>(shared);
  const ChannelsShared& at = grid.shared;
  Held* values = reinterpret_cast<Held*>(bytes + at.values);
  float2* statistics = reinterpret_cast<float2*>(bytes + at.statistics);
  float *tile = reinterpret_cast<float*>(bytes + at.tile), *norm_weight = reinterpret_cast<float*>(bytes + at.norm_params);
  float *norm_bias = norm_weight + grid.padded_width, *poison = reinterpret_cast<float*>(bytes + at.poison);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, num_warps = blockDim.x / kWarpSize;
  const int value_row = p.w.input * kColumns;

  uint32_t channel_tile, row_block;
  const int64_t n = grid.first_n + grid.by_row_block.divide(grid.by_channel_tile.divide(blockIdx.x, channel_tile), row_block);
  const int first_channel = channel_tile * kColumns, num_columns = min(kColumns, p.num_channels - first_channel);
  const int first_row = row_block * grid.rows_per_block, num_rows = min(grid.rows_per_block, grid.rows_per_sample - first_row);
  const T* sample = static_cast<const T*>(p.input) + n * p.volume_size * p.num_channels + first_channel;

  // A warp copies a row, or a part of one where there are fewer rows than warps.
#pragma unroll 1
  for (int i = warp; i < num_rows * p.window_rows() * grid.copy_parts; i += num_warps) {
    uint32_t part, r;
    const int item = grid.by_copy_parts.divide(i, part);
    const OutputRow<kPairs> row(p, grid, first_row + grid.by_window_rows.divide(item, r));
    if (!kPairs && static_cast<int>(r) >= row.num_rows()) continue;
    const auto [d, h] = row.position(grid, r);
    const int w = part * grid.copy_width, end = min(w + grid.copy_width, p.w.input);
    const T* from = sample + (static_cast<int64_t>(d) * p.h.input + h) * p.next_row;
    Held* to = values + item * value_row;
    if constexpr (!kAddend) {
      if (p.channels_are_aligned) {
        copy_positions<T, kColumns>(p, from, to, w, end, num_columns);
        continue;
      }
    }
    load_positions<T, kAddend, Held, kColumns>(p, from, to, w, end, num_columns, n, first_channel, d, h);
  }
  stage_norm_params<T>(p, kPairs, norm_weight, norm_bias);
  if (threadIdx.x < kColumns) {
    const float constant = kAddend ? 0.f : channel_constant<T>(p, n, min(first_channel + static_cast<int>(threadIdx.x), p.num_channels - 1));
    poison[threadIdx.x] = constant - constant;
  }
  wait_for_copies();
  __syncthreads();

  for (int i = warp; i < num_rows * p.window_rows(); i += num_warps) {
    uint32_t r;
    const int row_in_block = grid.by_window_rows.divide(i, r);
    if (!kPairs && static_cast<int>(r) >= OutputRow<false>(p, grid, first_row + row_in_block).num_rows()) continue;
    const int column = lane * kChannels;
    take_statistics<Held, kChannels, kColumns>(p, values + i * value_row + column, poison + column, statistics + i * kColumns + column);
  }
  __syncthreads();

  const int segments = grid.padded_width / kSegment;
  for (int i = warp; i < num_rows * segments; i += num_warps) {
    uint32_t segment;
    const int row_in_block = grid.by_segments.divide(i, segment), first_w = segment * kSegment;
    const int window_rows = OutputRow<kPairs>(p, grid, first_row + row_in_block).num_rows();
    const Held* from = values + row_in_block * p.window_rows() * value_row + first_w * kColumns + lane * kChannels;
    const float2* moments = statistics + row_in_block * p.window_rows() * kColumns + lane * kChannels;
    float sum[kSegment][kChannels] = {};
#pragma unroll 1
    for (int r = 0; r < window_rows; ++r, from += value_row, moments += kColumns) {
      float2 own[kChannels];
#pragma unroll
      for (int j = 0; j < kChannels; ++j) own[j] = moments[j];
#pragma unroll
      for (int w = 0; w < kSegment; ++w) {
        Vec<Held, kChannels> held;
        held.load(from + w * kColumns);
#pragma unroll
        for (int j = 0; j < kChannels; ++j) sum[w][j] = fmaf(held[j] - own[j].x, own[j].y, sum[w][j]);
      }
    }
    float weight[kSegment], bias[kPairs ? kSegment / 2 : kSegment];
    load_staged(norm_weight + first_w, weight);
    load_staged(norm_bias + (kPairs ? first_w / 2 : first_w), bias);
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      float* column = tile + (row_in_block * kColumns + lane * kChannels + j) * grid.tile_stride;
      if constexpr (kPairs) {
        float out[kSegment / 2];
#pragma unroll
        for (int o = 0; o < kSegment / 2; ++o) {
          out[o] = fmaf(sum[2 * o][j], weight[2 * o], fmaf(sum[2 * o + 1][j], weight[2 * o + 1], bias[o]));
        }
        apply_gelu<T>(p, out);
        store_output<T>(p, column, first_w / 2, out);
      } else {
#pragma unroll
        for (int w = 0; w < kSegment; ++w) column[first_w + w] = fmaf(sum[w][j], weight[w], window_rows * bias[w]);
      }
    }
  }
  __syncthreads();

#pragma unroll 1
  for (int i = 0; i < num_rows; ++i) {
    const OutputRow<kPairs> row(p, grid, first_row + i);
    const float* from = tile + i * kColumns * grid.tile_stride;
    const int64_t to = ((n * p.num_channels + first_channel) * grid.rows_per_sample + first_row + i) * p.w.output;
    if constexpr (!kPairs) {
      pool_tile_row<T>(p, grid, from, to, num_columns, rows_divisor(p, row.od, row.oh));
    } else if (std::is_same_v<T, float> || p.output_is_float) {
      float* out = static_cast<float*>(p.output) + to;
      if (grid.piece_bytes == kVecBytes) copy_tile_row<float, kVecLen<float>>(p, grid, from, out, num_columns);
      else copy_tile_row<float, 1>(p, grid, from, out, num_columns);
    } else {
      T* out = static_cast<T*>(p.output) + to;
      if (grid.piece_bytes == kVecBytes) copy_tile_row<T, kVecLen<T>>(p, grid, from, out, num_columns);
      else copy_tile_row<T, 1>(p, grid, from, out, num_columns);
    }
  }
}

}  // namespace fxfuse::norm_pool_gelu
