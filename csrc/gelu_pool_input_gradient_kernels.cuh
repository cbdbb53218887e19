// gelu_pool_input_gradient: the kernels. Every element is read once, and its gradient written by the thread that read it, so in place is safe.
#pragma once

#include "gelu_pool_input_gradient_plan.cuh"

namespace fxfuse::gelu_pool {

// Shares for kVec elements of a row from `pixel` on: one look where they lie in the same windows, which is most of them where windows are
// wide, and one each elsewhere.
template <int kVec>
__device__ __forceinline__ void shares_of_elements(const PoolGradient& pool, const float* shares, int pixel, float (&g)[kVec]) {
  const int3 first = pool.position(pixel);
  const PooledAxis::Span w = pool.w.windows_of(first.z);
  if (first.z + kVec <= pool.w.in && w == pool.w.windows_of(first.z + kVec - 1)) {
    float sum[1];
    pool.add_windows(shares, 1, pool.d.windows_of(first.x), pool.h.windows_of(first.y), w, sum);
#pragma unroll
    for (int j = 0; j < kVec; ++j) g[j] = sum[0];
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kVec; ++i) {
    const int3 at = pool.position(pixel + i);
    float sum[1];
    pool.add_windows(shares, 1, pool.d.windows_of(at.x), pool.h.windows_of(at.y), pool.w.windows_of(at.z), sum);
#pragma unroll
    for (int j = 0; j < kVec; ++j) g[j] = i == j ? sum[0] : g[j];
  }
}

// kInFlight accesses of kVec elements of a row, `step` elements apart, from `pixel` on as far as they lie below `end`. Returns the sum of their
// gradients. share: a global pool's only one.
template <typename T, bool kTanh, bool kGlobal, int kVec, int kInFlight>
__device__ __forceinline__ float gradient_of_elements(const PoolGradient& pool, const float* shares, float share, int64_t row_offset, int pixel,
                                                      int step, int end, float bias) {
  Vec<T, kVec> raw[kInFlight];
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    if (pixel + u * step < end) raw[u].load_streaming(static_cast<const T*>(pool.input) + row_offset + pixel + u * step);
  }
  float total = 0.f;
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    if (pixel + u * step >= end) break;
    float g[kVec] = {share};
    if constexpr (!kGlobal) shares_of_elements(pool, shares, pixel + u * step, g);
    Vec<T, kVec> out;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float value = g[kGlobal ? 0 : j] * gelu_derivative<kTanh ? Gelu::Tanh : Gelu::Accurate>(raw[u][j] + bias);
      total += value;
      out.value[j] = from_float<T>(value);
    }
    out.store(static_cast<T*>(pool.of_input) + row_offset + pixel + u * step);
  }
  return total;
}

// Contiguous: a block takes a chunk of a row (n, c), or a warp a whole row. Rows may start anywhere: elements up to the first 16-byte boundary
// and behind the last are taken one by one.
template <typename T, bool kTanh, bool kGlobal, int kVec>
__global__ void __launch_bounds__(kThreads, 4) gradient_rows_kernel(const __grid_constant__ PoolGradient pool, const GradientPlan plan) {
  constexpr int kInFlight = kGlobal ? 4 : 2;
  extern __shared__ __align__(16) float scratch[];
  const bool is_warps = plan.lanes == kWarpSize;
  const int lane = threadIdx.x % plan.lanes;
  const int64_t part = static_cast<int64_t>(blockIdx.x) * (kThreads / plan.lanes) + threadIdx.x / plan.lanes;
  const int64_t row = part / plan.chunks, num_rows = pool.batch * pool.channels;
  const bool is_row = row < num_rows;
  float total = 0.f;
  if (is_row) {
    const int64_t row_offset = row * pool.pixels;
    const int begin = static_cast<int>(part % plan.chunks) * plan.chunk_len, end = min(begin + plan.chunk_len, pool.pixels);
    const float bias = pool.bias_at<T>(static_cast<int>(row % pool.channels));
    const float* shares = pool.shares + row * pool.outputs;
    const float share = kGlobal ? shares[0] : 0.f;
    const auto address = reinterpret_cast<uintptr_t>(static_cast<const T*>(pool.input) + row_offset + begin);
    const int to_boundary = static_cast<int>((kVec - address / sizeof(T) % kVec) % kVec), wide_begin = min(begin + to_boundary, end);
    const int wide_end = wide_begin + (end - wide_begin) / kVec * kVec, step = plan.lanes * kVec;
    if (begin + lane < wide_begin) {
      total += gradient_of_elements<T, kTanh, kGlobal, 1, 1>(pool, shares, share, row_offset, begin + lane, 0, wide_begin, bias);
    }
    for (int pixel = wide_begin + lane * kVec; pixel < wide_end; pixel += step * kInFlight) {
      total += gradient_of_elements<T, kTanh, kGlobal, kVec, kInFlight>(pool, shares, share, row_offset, pixel, step, wide_end, bias);
    }
    if (wide_end + lane < end) total += gradient_of_elements<T, kTanh, kGlobal, 1, 1>(pool, shares, share, row_offset, wide_end + lane, 0, end, bias);
  }
  if (!pool.parts) return;
  total = is_warps ? warp_sum(total) : block_sum(total, scratch);
  if (is_row && lane == 0) pool.parts[part] = total;
}

// channels_last: a block takes a chunk of a sample's pixels and a tile of columns of kVec channels; a thread keeps its column.
template <typename T, bool kTanh, bool kGlobal, int kVec>
__global__ void __launch_bounds__(kThreads, 4) gradient_columns_kernel(const __grid_constant__ PoolGradient pool, const GradientPlan plan) {
  constexpr int kInFlight = 2;
  extern __shared__ __align__(16) float scratch[];
  const int tile = blockIdx.x % plan.tiles, chunk = blockIdx.x / plan.tiles % plan.chunks;
  const int64_t n = blockIdx.x / plan.tiles / plan.chunks;
  const int lane = threadIdx.x / plan.columns, channel = (tile * plan.columns + static_cast<int>(threadIdx.x) % plan.columns) * kVec;
  const int begin = chunk * plan.chunk_len, end = min(begin + plan.chunk_len, pool.pixels);
  const int64_t first = n * pool.pixels * pool.channels + channel;
  const T* input = static_cast<const T*>(pool.input) + first;
  T* of_input = static_cast<T*>(pool.of_input) + first;
  const bool is_column = lane < plan.lanes && channel < pool.channels;
  float total[kVec] = {}, bias[kVec] = {}, g[kVec] = {};
  if (is_column) {
    const float* shares = pool.shares + n * pool.outputs * pool.channels + channel;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      bias[j] = pool.bias_at<T>(channel + j);
      if constexpr (kGlobal) g[j] = shares[j];
    }
    for (int pixel = begin + lane; pixel < end; pixel += plan.lanes * kInFlight) {
      Vec<T, kVec> raw[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (pixel + u * plan.lanes < end) raw[u].load_streaming(input + static_cast<int64_t>(pixel + u * plan.lanes) * pool.channels);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int own = pixel + u * plan.lanes;
        if (own >= end) break;
        if constexpr (!kGlobal) {
          const int3 at = pool.position(own);
          pool.add_windows(shares, pool.channels, pool.d.windows_of(at.x), pool.h.windows_of(at.y), pool.w.windows_of(at.z), g);
        }
        Vec<T, kVec> out;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const float value = g[j] * gelu_derivative<kTanh ? Gelu::Tanh : Gelu::Accurate>(raw[u][j] + bias[j]);
          total[j] += value;
          out.value[j] = from_float<T>(value);
        }
        out.store(of_input + static_cast<int64_t>(own) * pool.channels);
      }
    }
  }
  if (!pool.parts) return;
  // [lanes][columns * kVec], added over lanes in their order.
  const int row_size = plan.columns * kVec;
  if (lane < plan.lanes) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) scratch[threadIdx.x * kVec + j] = total[j];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < row_size && tile * row_size + i < pool.channels; i += kThreads) {
    float sum = 0.f;
    for (int other = 0; other < plan.lanes; ++other) sum += scratch[other * row_size + i];
    pool.parts[(n * plan.chunks + chunk) * pool.channels + tile * row_size + i] = sum;
  }
}

}  // namespace fxfuse::gelu_pool
