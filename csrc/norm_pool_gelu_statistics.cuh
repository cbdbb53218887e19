// norm_pool_gelu for everything that does not stay on chip: one pass takes mean and rstd of every norm group, a second one normalises,
// pools and applies GELU. Reads the input twice. Any norm_ndim, any width, both layouts.
//
// The statistics pass cuts each channel of each sample into chunks of consecutive positions that lie in one norm group: a warp a chunk
// in contiguous input, a lane a chunk in channels_last, where a warp so takes 32 channels and reads full lines. Chunks of one group
// are merged by a third kernel, in a fixed order; a group that is one chunk needs no merging.
#pragma once

#include "norm_pool_gelu_problem.cuh"

namespace fxfuse::norm_pool_gelu {

constexpr int kStatisticsThreads = 256;
constexpr int kStatisticsBatch = 8;  // elements a thread loads before it uses the first
constexpr int kMergeMaxThreads = 1024;
constexpr int kPoolTile = 32;        // channels and outputs of a block in the channels_last pooling pass

// Mean and centred sum of squares of `count` values; merging two never subtracts large numbers (Chan et al.).
struct RunningMoments {
  float count = 0.f, mean = 0.f, square = 0.f;

  __device__ __forceinline__ void merge(const RunningMoments& other) {
    const float total = count + other.count;
    if (total == 0.f) return;
    const float off = other.mean - mean, share = other.count / total;
    mean = fmaf(off, share, mean);
    square += other.square + off * off * share * count;
    count = total;
  }
  // The first `num` values of a batch.
  __device__ __forceinline__ void merge(const float (&y)[kStatisticsBatch], int num) {
    RunningMoments batch;
    batch.count = num;
    const float inverse_count = 1.f / num;
#pragma unroll
    for (int k = 0; k < kStatisticsBatch; ++k) batch.mean += k < num ? (y[k] - y[0]) * inverse_count : 0.f;
    batch.mean += y[0];
#pragma unroll
    for (int k = 0; k < kStatisticsBatch; ++k) {
      const float centred = k < num ? y[k] - batch.mean : 0.f;
      batch.square = fmaf(centred, centred, batch.square);
    }
    merge(batch);
  }
};

struct Statistics {
  float2* groups = nullptr;          // mean, rstd
  RunningMoments* chunks = nullptr;  // null where every group is one chunk
  int64_t num_groups = 1, chunks_per_group = 1;
  uint32_t merge_stride = 1;
  int64_t unit_size = 1, chunk_size = 1;  // unit: the positions of one channel in one group
  int64_t units_per_channel = 1, chunks_per_unit = 1;
  Affine input, group, param;  // offset of an element, index of its group, index of its norm parameters
  FastDiv by_out_h, by_out_w;
};

// The part of a channel that a warp or a lane takes; index: where its moments go.
struct Chunk {
  int64_t n, begin, end, index;
  int c;

  __device__ __forceinline__ Chunk(const Problem& p, const Statistics& s, int64_t task) : index(task) {
    int64_t chunk = task;  // contiguous: (n, c, unit, chunk), channels_last: (n, unit, chunk, c)
    if (p.channels_last) c = chunk % p.num_channels, chunk /= p.num_channels;
    int64_t unit = chunk / s.chunks_per_unit;
    chunk %= s.chunks_per_unit;
    n = unit / s.units_per_channel;
    unit %= s.units_per_channel;
    if (!p.channels_last) c = n % p.num_channels, n /= p.num_channels;
    begin = unit * s.unit_size + chunk * s.chunk_size;
    end = min(begin + s.chunk_size, (unit + 1) * s.unit_size);
  }
};

// kLanes lanes share a chunk: the warp in contiguous input, one in channels_last.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kStatisticsThreads)
    statistics_kernel(const __grid_constant__ Problem p, const __grid_constant__ Statistics s) {
  const int lane = threadIdx.x % kLanes;
  const int64_t task = static_cast<int64_t>(blockIdx.x) * (kStatisticsThreads / kLanes) + threadIdx.x / kLanes;
  if (task >= p.num_n * p.num_channels * s.units_per_channel * s.chunks_per_unit) return;
  const Chunk chunk(p, s, task);
  const T* input = static_cast<const T*>(p.input) + chunk.n * s.input.n + chunk.c * s.input.c;
  const bool addend_varies = p.addend && !p.addend_is_per_channel;
  const float constant = channel_constant<T>(p, chunk.n, chunk.c);
  const int64_t stride = kLanes == 1 ? s.input.w : 1;
  RunningMoments moments;
  for (int64_t i = chunk.begin + lane; i < chunk.end; i += kStatisticsBatch * kLanes) {
    float y[kStatisticsBatch];
    const int num = min((chunk.end - i + kLanes - 1) / kLanes, static_cast<int64_t>(kStatisticsBatch));
    const T* from = input + i * stride;
#pragma unroll
    for (int k = 0; k < kStatisticsBatch; ++k) y[k] = k < num ? to_float(from[k * kLanes * stride]) + constant : 0.f;
    if (addend_varies) {
#pragma unroll 1
      for (int k = 0; k < num; ++k) {
        const int64_t row = (i + k * kLanes) / p.w.input, w = (i + k * kLanes) % p.w.input;
        const float addend = element_addend<T>(p, chunk.n, chunk.c, row / p.h.input, row % p.h.input, w);
#pragma unroll
        for (int to = 0; to < kStatisticsBatch; ++to) y[to] += to == k ? addend : 0.f;
      }
    }
    moments.merge(y, num);
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    RunningMoments other;
    other.count = __shfl_down_sync(0xffffffffu, moments.count, offset);
    other.mean = __shfl_down_sync(0xffffffffu, moments.mean, offset);
    other.square = __shfl_down_sync(0xffffffffu, moments.square, offset);
    moments.merge(other);
  }
  if (lane != 0) return;
  if (s.chunks) s.chunks[chunk.index] = moments;
  else s.groups[chunk.index] = make_float2(moments.mean, rsqrtf(moments.square / moments.count + p.eps));
}

// A block a group. In double, because a group of 2^31 elements has a million chunks.
__global__ void __launch_bounds__(kMergeMaxThreads)
    merge_chunks_kernel(const __grid_constant__ Problem p, const __grid_constant__ Statistics s) {
  // Groups that share their chunks' index range alternate in it (channels of channels_last); others follow each other.
  const uint32_t group = blockIdx.x, stride = s.merge_stride;
  const int64_t first = static_cast<int64_t>(group / stride * stride) * s.chunks_per_group + group % stride;
  const auto chunk_at = [&](int64_t i) { return s.chunks[first + i * stride]; };
  __shared__ double scratch[kWarpSize];
  double count = 0., mean = 0., square = 0.;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < s.chunks_per_group; i += blockDim.x) {
    const RunningMoments m = chunk_at(i);
    count += m.count;
    mean += static_cast<double>(m.count) * m.mean;
  }
  count = block_sum(count, scratch);
  mean = block_sum(mean, scratch) / count;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < s.chunks_per_group; i += blockDim.x) {
    const RunningMoments m = chunk_at(i);
    square += m.square + m.count * (m.mean - mean) * (m.mean - mean);
  }
  square = block_sum(square, scratch);
  if (threadIdx.x == 0) s.groups[group] = make_float2(static_cast<float>(mean), rsqrtf(static_cast<float>(square / count) + p.eps));
}

template <typename T>
__device__ __forceinline__ float normalise_and_pool(const Problem& p, const Statistics& s, int64_t n, int c, float constant, uint32_t output) {
  uint32_t oh, ow;
  const uint32_t od = s.by_out_h.divide(s.by_out_w.divide(output, ow), oh);
  const Axis::Window d_window = p.d.window(od), h_window = p.h.window(oh), w_window = p.w.window(ow);
  const bool addend_varies = p.addend && !p.addend_is_per_channel;
  float sum = 0.f;
  for (int d = d_window.begin; d < d_window.end; ++d) {
    for (int h = h_window.begin; h < h_window.end; ++h) {
      const float2 moments = s.groups[s.group.at(n, c, d, h, 0)];
      const T* row = static_cast<const T*>(p.input) + s.input.at(n, c, d, h, 0);
      const int64_t param = s.param.at(n, c, d, h, 0);
#pragma unroll 2
      for (int w = w_window.begin; w < w_window.end; ++w) {
        const float shift = addend_varies ? constant + element_addend<T>(p, n, c, d, h, w) : constant;
        const float z = (to_float(row[w * s.input.w]) + shift - moments.x) * moments.y;
        sum = fmaf(z, p.norm_weight ? p.norm_weight.at<T>(param + w) : 1.f, sum);
        sum += p.norm_bias ? p.norm_bias.at<T>(param + w) : 0.f;
      }
    }
  }
  return sum / divisor(p, d_window, h_window, w_window);
}

// A block takes consecutive outputs of one channel.
template <typename T>
__global__ void __launch_bounds__(kStatisticsThreads)
    pool_contiguous_kernel(const __grid_constant__ Problem p, const __grid_constant__ Statistics s) {
  const uint32_t channel_size = p.output_spatial(), blocks_per_channel = (channel_size + kStatisticsThreads - 1) / kStatisticsThreads;
  const uint32_t channel = blockIdx.x / blocks_per_channel, n = channel / p.num_channels, c = channel % p.num_channels;
  const uint32_t output = blockIdx.x % blocks_per_channel * kStatisticsThreads + threadIdx.x;
  if (output >= channel_size) return;
  const float pooled = normalise_and_pool<T>(p, s, n, c, channel_constant<T>(p, n, c), output);
  store_gelu<T>(p, static_cast<int64_t>(channel) * channel_size + output, pooled);
}

// Lanes along channels to read, along outputs to write; a tile of 32 x 32 in shared memory turns one into the other.
template <typename T>
__global__ void __maxnreg__(64)
    pool_channels_last_kernel(const __grid_constant__ Problem p, const __grid_constant__ Statistics s) {
  __shared__ float tile[kPoolTile][kPoolTile + 1];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const uint32_t channel_size = p.output_spatial();
  const uint32_t channel_tiles = (p.num_channels + kPoolTile - 1) / kPoolTile, output_tiles = (channel_size + kPoolTile - 1) / kPoolTile;
  const uint32_t rest = blockIdx.x / channel_tiles, first_o = rest % output_tiles * kPoolTile;
  const int first_c = blockIdx.x % channel_tiles * kPoolTile, c = first_c + lane;
  const int64_t n = rest / output_tiles;
  const float constant = c < p.num_channels ? channel_constant<T>(p, n, c) : 0.f;
#pragma unroll 1
  for (int i = warp; i < kPoolTile; i += kStatisticsThreads / kWarpSize) {
    if (first_o + i < channel_size && c < p.num_channels) tile[i][lane] = normalise_and_pool<T>(p, s, n, c, constant, first_o + i);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = warp; i < kPoolTile; i += kStatisticsThreads / kWarpSize) {
    if (first_o + lane >= channel_size || first_c + i >= p.num_channels) continue;
    store_gelu<T>(p, (n * p.num_channels + first_c + i) * channel_size + first_o + lane, tile[lane][i]);
  }
}

}  // namespace fxfuse::norm_pool_gelu
