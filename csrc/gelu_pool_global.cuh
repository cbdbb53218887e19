// gelu_pool over whole planes: the kernels that read each byte once, 16 at a time, and write next to nothing.
#pragma once

#include <algorithm>

#include "common/cuda.cuh"
#include "common/gelu.cuh"
#include "gelu_pool_map.cuh"
#include "gelu_pool_plan.cuh"

namespace fxfuse::gelu_pool {

// ---- the inner loop ----------------------------------------------------------------------------------------------

// Loads in flight a thread: 64 bytes, which at 1024 threads are 64 KB an SM, twice what Little's law asks for at 4.3 TB/s.
template <typename T, int kLen>
constexpr int kLoads = std::min<int>(8, 64 / (kLen * sizeof(T)));

// Issue slots decide how close to the memory's speed this comes: an fp32 element has about 28 at 4.2 TB/s, a 16-bit one 14. With
// conversion, bias and sum, Accurate takes 19 and Coarse 11.5. (Fast takes 13.5; with it 88 % of the slots were busy and bf16 came to 83 %
// of a copy's bandwidth at 1.9 GHz.)
// Two levels of sums. A total meets one addend a tile, so its rounding errors are those of a chain kLoads times shorter; and with
// a sum that starts anew, ptxas leaves the loads together in front (else it sinks some of them behind arithmetic: 15 % slower).
template <typename T, Gelu form, int kLen, bool kFull>
__device__ __forceinline__ void add_tile(const T* from, int64_t stride, int num_loads, const float (&bias)[kLen],
                                         float (&sum)[kLen]) {
  Vec<T, kLen> loaded[kLoads<T, kLen>];
#pragma unroll
  for (int u = 0; u < kLoads<T, kLen>; ++u) {
    if (kFull || u < num_loads) loaded[u].load_streaming(from + u * stride);
  }
  float part[kLen] = {};
#pragma unroll
  for (int u = 0; u < kLoads<T, kLen>; ++u) {
    if (!kFull && u >= num_loads) continue;
#pragma unroll
    for (int i = 0; i < kLen; ++i) part[i] += gelu_unguarded<form>(loaded[u][i] + bias[i]);
  }
#pragma unroll
  for (int i = 0; i < kLen; ++i) sum[i] += part[i];
}

// Sum of gelu(from[i] + bias) over i = 0, stride, ... below len, one by one and guarded: heads, tails, and sums that were not finite.
// Rare work, so never inlined: the kernels' registers belong to the tiles.
template <typename T, Gelu form>
__device__ __noinline__ float sum_strided(const T* from, int64_t len, int64_t stride, float bias) {
  float sum = 0.0f;
#pragma unroll 1
  for (int64_t i = 0; i < len; i += stride) sum += gelu<form>(to_float(from[i]) + bias);
  return sum;
}

// sum[i] = sum over k < num_loads of gelu(from[k * stride + i] + bias[i]). kIsLong: most tiles are full, and these have no branches;
// otherwise the lanes of a warp would take both kinds of tile after each other.
template <typename T, Gelu form, bool kIsLong, int kLen>
__device__ __forceinline__ void sum_loads(const T* from, int64_t stride, int num_loads, const float (&bias)[kLen],
                                          float (&sum)[kLen]) {
  constexpr int kTile = kLoads<T, kLen>;
#pragma unroll
  for (int i = 0; i < kLen; ++i) sum[i] = 0.0f;
  const T* at = from;
  int left = num_loads;
  if constexpr (kIsLong) {
    for (; left >= kTile; left -= kTile, at += kTile * stride) add_tile<T, form, kLen, true>(at, stride, kTile, bias, sum);
    if (left > 0) add_tile<T, form, kLen, false>(at, stride, left, bias, sum);
  } else {
    for (; left > 0; left -= kTile, at += kTile * stride) add_tile<T, form, kLen, false>(at, stride, left, bias, sum);
  }
  // One look for all: a sum of sums that overflows only costs time.
  float all = sum[0];
#pragma unroll
  for (int i = 1; i < kLen; ++i) all += sum[i];
  if (isfinite(all)) return;
#pragma unroll
  for (int i = 0; i < kLen; ++i) sum[i] = sum_strided<T, form>(from + i, num_loads * stride, stride, bias[i]);
}

// A run of elements as loads of kLen: a head of single elements up to the first aligned address, the loads, a tail.
template <typename T, int kLen>
struct Run {
  const T* data;
  int64_t len, num_loads, tail_begin;
  int head;

  __device__ __forceinline__ Run(const T* data, int64_t len) : data(data), len(len) {
    constexpr int kBytes = kLen * sizeof(T);
    const int to_boundary = static_cast<int>((kBytes - reinterpret_cast<uintptr_t>(data) % kBytes) % kBytes / sizeof(T));
    head = len < to_boundary ? static_cast<int>(len) : to_boundary;
    num_loads = (len - head) / kLen;
    tail_begin = head + num_loads * kLen;
  }
  // How many of the loads first, first + step, ... there are.
  __device__ __forceinline__ int loads_of(int64_t first, int64_t step) const {
    return first < num_loads ? static_cast<int>((num_loads - first + step - 1) / step) : 0;
  }
};

// ---- contiguous: rows (n, c) of pixels -----------------------------------------------------------------------------

// kWholeBlock: a block a chunk of a row, lane t reads load t, t + 256, ...: 4 KB a step. Otherwise groups of plan.lanes lanes take a
// row each: rows of a few hundred bytes, which neighbour each other in memory, so the warp's reads are still dense.
template <typename T, Gelu form, bool kWholeBlock>
__global__ void __launch_bounds__(kThreads) pool_rows(PoolData pool, PoolShape shape, PoolPlan plan) {
  constexpr int kLen = kVecLen<T>;
  const int lanes = kWholeBlock ? kThreads : plan.lanes;
  const int lane = threadIdx.x % lanes;
  const int64_t num_rows = shape.batch * shape.channels, row_len = shape.in_pixels();
  int64_t row, begin = 0, len = row_len, chunk = 0;
  if constexpr (kWholeBlock) {
    row = blockIdx.x / static_cast<unsigned>(plan.chunks);
    chunk = blockIdx.x % static_cast<unsigned>(plan.chunks);
    begin = chunk * plan.chunk_len;
    len = min(plan.chunk_len, row_len - begin);
  } else {
    row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / lanes;
  }
  const bool is_row = row < num_rows;  // past the end lanes go on with nothing to add: the shuffles below need whole warps
  if (!is_row) row = 0, len = 0;

  const Run<T, kLen> run(static_cast<const T*>(pool.input) + row * row_len + begin, len);
  // A grid has less than 2^31 blocks, so that a block's row divides in 32 bits.
  const int64_t channel = kWholeBlock ? static_cast<uint32_t>(row) % static_cast<uint32_t>(shape.channels) : row % shape.channels;
  const float channel_bias = pool.bias_at<T>(channel);
  float bias[kLen], sum[kLen];
#pragma unroll
  for (int i = 0; i < kLen; ++i) bias[i] = channel_bias;
  sum_loads<T, form, kWholeBlock>(run.data + run.head + lane * kLen, lanes * kLen, run.loads_of(lane, lanes), bias, sum);
#pragma unroll
  for (int width = kLen / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
  }
  float total = sum[0];
  if (lane < run.head) total += sum_strided<T, form>(run.data + lane, run.head - lane, lanes, channel_bias);
  const int64_t tail = run.tail_begin + lane;
  if (tail < run.len) total += sum_strided<T, form>(run.data + tail, run.len - tail, lanes, channel_bias);

  if constexpr (kWholeBlock) {
    __shared__ float scratch[kWarpSize];
    total = block_sum(total, scratch);
  } else {
    total = warp_sum(total, lanes);
  }
  if (lane != 0 || !is_row) return;
  if (pool.partials != nullptr) pool.partials[chunk * num_rows + row] = total;
  else pool.store<T>(row, total / static_cast<float>(row_len));
}

// ---- channels_last: images of pixels x channels ----------------------------------------------------------------------

// Thread (r, k) of a block reads load r * columns + k, then every (rows * columns)-th: a step of the block is rows whole periods of
// channels, consecutive bytes when there is one tile. Its component i is always the same channel, so the sums stay in registers.
template <typename T, Gelu form, int kLen>
__global__ void __launch_bounds__(kThreads, 4) pool_channels(PoolData pool, PoolShape shape, PoolPlan plan) {
  __shared__ float sums[kThreads * kLen];
  const int64_t channels = shape.channels, pixels = shape.in_pixels();
  const unsigned tiles = plan.tiles, chunks = static_cast<unsigned>(plan.chunks);
  const int tile = blockIdx.x % tiles;
  const int64_t chunk = blockIdx.x / tiles % chunks, image = blockIdx.x / tiles / chunks;
  const int64_t begin = chunk * plan.chunk_len, num_pixels = min(plan.chunk_len, pixels - begin);
  const Run<T, kLen> run(static_cast<const T*>(pool.input) + (image * pixels + begin) * channels, num_pixels * channels);

  const int rows = kThreads / plan.tile_columns, row = threadIdx.x / plan.tile_columns;
  const int column = tile * plan.tile_columns + threadIdx.x % plan.tile_columns;
  const bool is_active = row < rows && column < plan.columns;
  float bias[kLen], sum[kLen];
  int64_t column_channel = (run.head + static_cast<int64_t>(column) * kLen) % channels;
#pragma unroll
  for (int i = 0; i < kLen; ++i) {
    bias[i] = pool.bias_at<T>(column_channel);
    column_channel = column_channel + 1 == channels ? 0 : column_channel + 1;
  }
  const int64_t first = static_cast<int64_t>(row) * plan.columns + column, step = static_cast<int64_t>(rows) * plan.columns;
  const int num_loads = is_active ? run.loads_of(first, step) : 0;
  sum_loads<T, form, true>(run.data + run.head + first * kLen, step * kLen, num_loads, bias, sum);
#pragma unroll
  for (int i = 0; i < kLen; ++i) sums[threadIdx.x * kLen + i] = sum[i];
  __syncthreads();

  // sums[q] belongs to channel first_channel + (head + q) mod tile_channels. A group of lanes adds a channel's in a fixed order.
  const int tile_channels = tiles == 1 ? static_cast<int>(channels) : plan.tile_columns * kLen;
  const int64_t first_channel = static_cast<int64_t>(tile) * tile_channels;
  const int num_sums = rows * plan.tile_columns * kLen;
  int lanes = kWarpSize;
  while (lanes > 1 && lanes * tile_channels > kThreads) lanes /= 2;
  const int lane = threadIdx.x % lanes;
  for (int base = 0; base < tile_channels; base += kThreads / lanes) {
    const int local = base + threadIdx.x / lanes;
    const int64_t channel = first_channel + local;
    const bool is_channel = local < tile_channels && channel < channels;
    float total = 0.0f;
    if (is_channel) {
      const int q0 = ((local - run.head) % tile_channels + tile_channels) % tile_channels;
      for (int q = q0 + lane * tile_channels; q < num_sums; q += lanes * tile_channels) total += sums[q];
    }
    total = warp_sum(total, lanes);
    if (!is_channel || lane != 0) continue;
    // Head and tail exist only with one tile; a chunk starts with channel 0, so element i is of channel i mod C.
    const float channel_bias = pool.bias_at<T>(channel);
    if (channel < run.head) total += sum_strided<T, form>(run.data + channel, run.head - channel, channels, channel_bias);
    if (run.tail_begin < run.len) {
      const int64_t first_tail = run.tail_begin + (channel + channels - run.tail_begin % channels) % channels;
      total += sum_strided<T, form>(run.data + first_tail, run.len - first_tail, channels, channel_bias);
    }
    const int64_t output = image * channels + channel;
    if (pool.partials != nullptr) pool.partials[chunk * shape.batch * channels + output] = total;
    else pool.store<T>(output, total / static_cast<float>(pixels));
  }
}

}  // namespace fxfuse::gelu_pool
