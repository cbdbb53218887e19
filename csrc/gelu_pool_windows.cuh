// gelu_pool over adaptive windows of any size, in one to three dims and both layouts, and the kernel that adds the chunks' sums.
#pragma once

#include "common/cuda.cuh"
#include "common/gelu.cuh"
#include "gelu_pool_map.cuh"
#include "gelu_pool_plan.cuh"

namespace fxfuse::gelu_pool {

template <typename T, int kLen>
__device__ __forceinline__ void load_biases(const PoolData& pool, int64_t channel, float (&bias)[kLen]) {
#pragma unroll
  for (int i = 0; i < kLen; ++i) bias[i] = pool.bias_at<T>(channel + i);
}

// ---- small windows: a thread an output, or kLen neighbouring channels of one -------------------------------------------

template <typename T, Gelu form, typename Index, int kLen>
__global__ void __launch_bounds__(kThreads, 2) pool_outputs(PoolData pool, OutputMap<Index> map) {
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (number >= map.count) return;
  const Window<Index> window = map.window(number);
  const T* input = static_cast<const T*>(pool.input);
  float bias[kLen], total[kLen] = {};
  load_biases<T>(pool, window.channel, bias);
  Index plane = map.first_pixel(window);
  for (Index d = 0; d < window.len[0]; ++d, plane += map.in_stride[2]) {
    Index row = plane;
    for (Index h = 0; h < window.len[1]; ++h, row += map.in_stride[3]) {
      float sum[kLen] = {};
#pragma unroll(kLen == 1 ? 4 : 2)
      for (Index w = 0; w < window.len[2]; ++w) {
        Vec<T, kLen> loaded;
        loaded.load(input + row + w * map.in_stride[4]);
#pragma unroll
        for (int i = 0; i < kLen; ++i) sum[i] += gelu<form>(loaded[i] + bias[i]);
      }
#pragma unroll
      for (int i = 0; i < kLen; ++i) total[i] += sum[i];
    }
  }
  map.template store<T>(pool, window, total, number, 0);
}

// ---- large windows: several lanes an output --------------------------------------------------------------------------

// Steps through a window's pixels, numbered row by row, `step` at a time, without a division: the step in (d, h, w) digits
// is added digit by digit with carries.
template <typename Index>
struct WindowWalk {
  Index offset;

  __device__ __forceinline__ WindowWalk(const OutputMap<Index>& map, const Window<Index>& window, Index pixel, Index step)
      : width_(window.len[2]), height_(window.len[1]) {
    const Index d_stride = map.in_stride[2], h_stride = map.in_stride[3], w_stride = map.in_stride[4];
    w_ = pixel % width_, w_step_ = step % width_;
    const Index row = pixel / width_, row_step = step / width_;
    h_ = row % height_, h_step_ = row_step % height_;
    offset = map.first_pixel(window) + (row / height_) * d_stride + h_ * h_stride + w_ * w_stride;
    step_ = (row_step / height_) * d_stride + h_step_ * h_stride + w_step_ * w_stride;
    w_carry_ = h_stride - width_ * w_stride;
    h_carry_ = d_stride - height_ * h_stride;
  }
  __device__ __forceinline__ void advance() {
    w_ += w_step_, h_ += h_step_, offset += step_;
    if (w_ >= width_) w_ -= width_, ++h_, offset += w_carry_;
    if (h_ >= height_) h_ -= height_, offset += h_carry_;
  }

 private:
  Index width_, height_, w_, h_, w_step_, h_step_, step_, w_carry_, h_carry_;
};

// The next num_loads pixels of the walk, at most kInFlight. kFull: as many, with no branch between them.
template <typename T, Gelu form, int kInFlight, bool kFull, typename Index, int kLen>
__device__ __forceinline__ void add_pixels(const T* input, WindowWalk<Index>& walk, int num_loads, const float (&bias)[kLen],
                                           float (&sum)[kLen]) {
  Vec<T, kLen> loaded[kInFlight];
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    if (kFull || u < num_loads) loaded[u].load(input + walk.offset);
    walk.advance();
  }
  float part[kLen] = {};
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    if (!kFull && u >= num_loads) continue;
#pragma unroll
    for (int i = 0; i < kLen; ++i) part[i] += gelu<form>(loaded[u][i] + bias[i]);
  }
#pragma unroll
  for (int i = 0; i < kLen; ++i) sum[i] += part[i];
}

template <typename T, Gelu form, typename Index, int kLen>
__device__ __forceinline__ void sum_walk(const T* input, WindowWalk<Index> walk, Index num_loads, const float (&bias)[kLen],
                                         float (&sum)[kLen]) {
  constexpr int kInFlight = kLen == 1 ? 4 : 2;
  Index left = num_loads;
  for (; left >= kInFlight; left -= kInFlight) add_pixels<T, form, kInFlight, true>(input, walk, kInFlight, bias, sum);
  if (left > 0) add_pixels<T, form, kInFlight, false>(input, walk, static_cast<int>(left), bias, sum);
}

// A block takes 256 / lanes outputs and one chunk of each one's window. channels_last: an output's lanes are a stride apart, so that a
// warp reads neighbouring channels of a pixel; contiguous: they are neighbours, and read neighbouring pixels.
template <typename T, Gelu form, typename Index, int kLen>
__global__ void __launch_bounds__(kThreads, 2) pool_windows(PoolData pool, OutputMap<Index> map, PoolPlan plan) {
  __shared__ float sums[kLen][kThreads];
  const int lanes = plan.lanes, outputs = kThreads / lanes;
  const int lane = map.channels_last ? threadIdx.x / outputs : threadIdx.x % lanes;
  const int output = map.channels_last ? threadIdx.x % outputs : threadIdx.x / lanes;
  const unsigned chunks = static_cast<unsigned>(plan.chunks);
  const int64_t chunk = blockIdx.x % chunks, number = static_cast<int64_t>(blockIdx.x / chunks) * outputs + output;
  const bool is_output = number < map.count;
  const Window<Index> window = map.window(is_output ? number : 0);
  const int64_t pixels = window.pixels(), begin = pixels * chunk / chunks + lane, end = pixels * (chunk + 1) / chunks;

  float total[kLen] = {};
  if (is_output && begin < end) {
    float bias[kLen];
    load_biases<T>(pool, window.channel, bias);
    const WindowWalk<Index> walk(map, window, static_cast<Index>(begin), lanes);
    const auto num_loads = static_cast<Index>((end - begin + lanes - 1) / lanes);
    sum_walk<T, form>(static_cast<const T*>(pool.input), walk, num_loads, bias, total);
  }
#pragma unroll
  for (int i = 0; i < kLen; ++i) sums[i][threadIdx.x] = total[i];
  const int lane_stride = map.channels_last ? outputs : 1;
  for (int width = lanes / 2; width > 0; width /= 2) {
    __syncthreads();
    if (lane >= width) continue;
#pragma unroll
    for (int i = 0; i < kLen; ++i) sums[i][threadIdx.x] += sums[i][threadIdx.x + width * lane_stride];
  }
  if (lane != 0 || !is_output) return;
#pragma unroll
  for (int i = 0; i < kLen; ++i) total[i] = sums[i][threadIdx.x];
  map.template store<T>(pool, window, total, number, chunk);
}

// ---- chunks' sums: [chunks][outputs] -> outputs ------------------------------------------------------------------------

// `lanes` threads an output, a fixed order: this is why no atomic is needed and two runs agree bit for bit.
template <typename T>
__global__ void __launch_bounds__(kThreads) add_chunks(PoolData pool, OutputMap<int64_t> map, int64_t chunks, int lanes) {
  __shared__ float sums[kThreads];
  const int outputs = kThreads / lanes, output = threadIdx.x % outputs, lane = threadIdx.x / outputs;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * outputs + output;
  const bool is_output = number < map.count;
  float total = 0.0f;
  if (is_output) {
    for (int64_t chunk = lane; chunk < chunks; chunk += lanes) total += pool.partials[chunk * map.count + number];
  }
  sums[threadIdx.x] = total;
  for (int width = lanes / 2; width > 0; width /= 2) {
    __syncthreads();
    if (lane < width) sums[threadIdx.x] += sums[threadIdx.x + width * outputs];
  }
  if (lane != 0 || !is_output) return;
  const Window<int64_t> window = map.window(number);
  pool.store<T>(window.out_offset, sums[threadIdx.x] / static_cast<float>(window.pixels()));
}

}  // namespace fxfuse::gelu_pool
