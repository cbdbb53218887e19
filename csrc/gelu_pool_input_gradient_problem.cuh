// gelu_pool_input_gradient: what its kernels get, and which windows contain a position. Gradient of an element x = input + bias[c]: gelu'(x)
// times the sum, over the windows that contain it, of grad / (elements of the window).
#pragma once

#include <string>

#include "common/cuda.cuh"
#include "common/gelu_gradient.cuh"
#include "gelu_pool_plan.cuh"

namespace fxfuse::gelu_pool {

// A pooled axis. Products of a position and a size stay below 2^31 (checked on the host).
struct PooledAxis {
  int in = 1, out = 1;
  FastDiv by_in, by_out;

  PooledAxis() = default;
  PooledAxis(int64_t in, int64_t out) : in(static_cast<int>(in)), out(static_cast<int>(out)), by_in(in), by_out(out) {}

  // The windows that contain position i: [begin, end). Mostly one, two where windows overlap, more where out > in.
  struct Span {
    int begin, end;
    __device__ __forceinline__ bool operator==(const Span& other) const { return begin == other.begin && end == other.end; }
  };
  __device__ __forceinline__ Span windows_of(int i) const {
    uint32_t rest;
    return {static_cast<int>(by_in.divide(i * out, rest)), static_cast<int>(by_in.divide((i + 1) * out + in - 1, rest))};
  }
  __device__ __forceinline__ int window_size(int o) const {
    uint32_t rest;
    return static_cast<int>(by_out.divide((o + 1) * in + out - 1, rest) - by_out.divide(o * in, rest));
  }
};

// shares: fp32 grad / (elements of the window), [N, C, outputs] for contiguous input and [N, outputs, C] for channels_last.
// parts: partial sums for of_channels, or null: [N * C, chunks], or [N, chunks, C] in channels_last.
struct PoolGradient {
  const void* input;
  void* of_input;
  Param grad, bias;
  float *shares, *parts;
  int64_t batch;
  int channels, pixels, outputs;  // of a channel
  PooledAxis d, h, w;
  bool channels_last;

  __device__ __forceinline__ int3 position(int pixel) const {
    uint32_t at_w, at_h;
    const uint32_t at_d = h.by_in.divide(w.by_in.divide(pixel, at_w), at_h);
    return make_int3(at_d, at_h, at_w);
  }
  template <typename T>
  __device__ __forceinline__ float bias_at(int channel) const {
    return bias ? bias.at<T>(channel) : 0.f;
  }

  // Adds up kLen neighbouring shares of every window in three spans; `stride` shares from one window to the next.
  template <int kLen>
  __device__ __forceinline__ void add_windows(const float* from, int stride, PooledAxis::Span in_d, PooledAxis::Span in_h, PooledAxis::Span in_w,
                                              float (&sum)[kLen]) const {
#pragma unroll
    for (int j = 0; j < kLen; ++j) sum[j] = 0.f;
#pragma unroll 1
    for (int od = in_d.begin; od < in_d.end; ++od) {
#pragma unroll 1
      for (int oh = in_h.begin; oh < in_h.end; ++oh) {
#pragma unroll 1
        for (int ow = in_w.begin; ow < in_w.end; ++ow) {
          const float* shares_at = from + static_cast<int64_t>((od * h.out + oh) * w.out + ow) * stride;
          constexpr int kStep = kLen < kVecLen<float> ? kLen : kVecLen<float>;
#pragma unroll
          for (int first = 0; first < kLen; first += kStep) {
            Vec<float, kStep> vec;
            vec.load(shares_at + first);
#pragma unroll
            for (int k = 0; k < kStep; ++k) sum[first + k] += vec[k];
          }
        }
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) share_kernel(const __grid_constant__ PoolGradient pool) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= pool.batch * pool.channels * pool.outputs) return;
  const int output = static_cast<int>(index % pool.outputs);
  const int64_t row = index / pool.outputs, n = row / pool.channels, c = row % pool.channels;
  const int ow = output % pool.w.out, oh = output / pool.w.out % pool.h.out, od = output / pool.w.out / pool.h.out;
  const int64_t size = int64_t{pool.d.window_size(od)} * pool.h.window_size(oh) * pool.w.window_size(ow);
  const int64_t at = pool.channels_last ? (n * pool.outputs + output) * pool.channels + c : index;
  pool.shares[at] = pool.grad.at<T>(index) / static_cast<float>(size);
}

}  // namespace fxfuse::gelu_pool
