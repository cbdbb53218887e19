// gelu_pool: what its kernels get, and where an output and its window lie.
#pragma once

#include <type_traits>

#include "common/cuda.cuh"
#include "gelu_pool_plan.cuh"

namespace fxfuse::gelu_pool {

// What every kernel gets. partials: [chunks][outputs] sums when the plan has several chunks, else null.
struct PoolData {
  const void* input;
  Param bias;
  void* out;
  bool out_is_float;
  float* partials;

  template <typename T>
  __device__ __forceinline__ float bias_at(int64_t channel) const {
    return bias ? bias.at<T>(channel) : 0.0f;
  }
  template <typename T>
  __device__ __forceinline__ void store(int64_t offset, float value) const {
    if (out_is_float) static_cast<float*>(out)[offset] = value;
    else static_cast<T*>(out)[offset] = from_float<T>(value);
  }
};

struct WideDiv {
  int64_t divisor = 1;

  WideDiv() = default;
  explicit WideDiv(int64_t d) : divisor(d) {}
  __device__ __forceinline__ int64_t divide(int64_t dividend, int64_t& remainder) const {
    const int64_t quotient = dividend / divisor;
    remainder = dividend - quotient * divisor;
    return quotient;
  }
};

template <typename Index>
struct Window {
  Index begin[3], len[3];
  Index image, channel, out_offset;

  __device__ __forceinline__ Index pixels() const { return len[0] * len[1] * len[2]; }
};

// In stores of up to 16 bytes; `to` is as aligned as they are, for C is a multiple of kLen and the buffer is a fresh one.
template <typename T, int kLen>
__device__ __forceinline__ void store_vec(T* to, const float (&values)[kLen]) {
  constexpr int kStep = kLen < kVecLen<T> ? kLen : kVecLen<T>;
#pragma unroll
  for (int first = 0; first < kLen; first += kStep) {
    Vec<T, kStep> vec;
#pragma unroll
    for (int i = 0; i < kStep; ++i) vec.value[i] = from_float<T>(values[first + i]);
    vec.store(to + first);
  }
}

// From the number of an output, or of vec_len outputs in neighbouring channels, to its window. They are numbered in the order of the
// input's memory (w or channels fastest), so that neighbouring lanes read neighbouring bytes. Index is uint32_t where every size
// and offset stays below 2^31 (fits_narrow), else int64_t.
template <typename Index>
struct OutputMap {
  using Div = std::conditional_t<std::is_same_v<Index, uint32_t>, FastDiv, WideDiv>;
  Div by_channels, by_out[3];
  Index in[3], out[3];
  Index in_stride[5], out_stride[5];  // n, c, d, h, w
  Index vec_len;
  int64_t count;
  bool channels_last;

  explicit OutputMap(const PoolShape& shape, int vec_len = 1)
      : by_channels(shape.channels / vec_len), vec_len(vec_len), count(shape.outputs() / vec_len), channels_last(shape.channels_last) {
    for (int i = 0; i < 3; ++i) {
      by_out[i] = Div(shape.out[i]);
      in[i] = static_cast<Index>(shape.in[i]);
      out[i] = static_cast<Index>(shape.out[i]);
    }
    const auto in_strides = dense_strides(shape.channels, shape.in, shape.channels_last);
    const auto out_strides = dense_strides(shape.channels, shape.out, shape.out_channels_last);
    for (int i = 0; i < 5; ++i) {
      in_stride[i] = static_cast<Index>(in_strides[i]);
      out_stride[i] = static_cast<Index>(out_strides[i]);
    }
  }

  static bool fits_narrow(const PoolShape& shape) {
    constexpr int64_t kMost = INT32_MAX - kThreads;
    bool fits = shape.outputs() < kMost && shape.batch * shape.channels * shape.in_pixels() < kMost;
    for (int i = 0; i < 3; ++i) fits = fits && (shape.in[i] + 1) * (shape.out[i] + 1) < kMost;
    return fits;
  }

  __device__ __forceinline__ Window<Index> window(int64_t number) const {
    Window<Index> window;
    Index rest = static_cast<Index>(number), at[3], unused;
    if (channels_last) rest = by_channels.divide(rest, window.channel);
#pragma unroll
    for (int i = 2; i >= 0; --i) rest = by_out[i].divide(rest, at[i]);
    if (!channels_last) rest = by_channels.divide(rest, window.channel);
    window.channel *= vec_len;
    window.image = rest;
    window.out_offset = rest * out_stride[0] + window.channel * out_stride[1];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      window.begin[i] = by_out[i].divide(at[i] * in[i], unused);
      window.len[i] = by_out[i].divide((at[i] + 1) * in[i] + out[i] - 1, unused) - window.begin[i];
      window.out_offset += at[i] * out_stride[2 + i];
    }
    return window;
  }

  __device__ __forceinline__ Index first_pixel(const Window<Index>& window) const {
    return window.image * in_stride[0] + window.channel * in_stride[1] + window.begin[0] * in_stride[2] +
           window.begin[1] * in_stride[3] + window.begin[2] * in_stride[4];
  }

  // sums: of the window's values, one a channel. To the output, or to the chunk's part of the workspace.
  template <typename T, int kLen>
  __device__ __forceinline__ void store(const PoolData& pool, const Window<Index>& window, float (&sums)[kLen], int64_t number,
                                        int64_t chunk) const {
    if (pool.partials != nullptr) return store_vec(pool.partials + (chunk * count + number) * kLen, sums);
    const float scale = 1.0f / static_cast<float>(window.pixels());
#pragma unroll
    for (int i = 0; i < kLen; ++i) sums[i] *= scale;
    if (kLen > 1 && out_stride[1] == 1) {
      if (pool.out_is_float) store_vec(static_cast<float*>(pool.out) + window.out_offset, sums);
      else store_vec(static_cast<T*>(pool.out) + window.out_offset, sums);
      return;
    }
#pragma unroll
    for (int i = 0; i < kLen; ++i) pool.store<T>(window.out_offset + i * out_stride[1], sums[i]);
  }
};

}  // namespace fxfuse::gelu_pool
