// norm_pool_gelu: what is computed, as one struct that every kernel of the op takes, and the arithmetic they share.
#pragma once

#include "common/cuda.cuh"
#include "common/gelu.cuh"

namespace fxfuse::norm_pool_gelu {

// One pooled axis. Sizes stay below 2^30 (checked on the host), so that int positions cannot wrap.
struct Axis {
  int input = 1, output = 1, kernel = 1, stride = 1, padding = 0;

  // The positions of window `o` inside the input, and its length with padding, which is the one torch divides by under
  // count_include_pad (a window that ceil_mode lets start inside and end beyond the padding counts up to the padding's end).
  struct Window {
    int begin, end, padded_len;
    __host__ __device__ int len() const { return end - begin; }
  };
  __host__ __device__ Window window(int o) const {
    const int start = o * stride - padding;
    const int stop = start + kernel < input + padding ? start + kernel : input + padding;
    return {start > 0 ? start : 0, stop < input ? stop : input, stop - start};
  }
  bool every_window_is_whole() const {
    return padding == 0 && static_cast<int64_t>(output - 1) * stride + kernel <= input;
  }
};

// An offset that is linear in the five coordinates: strides, the index of a norm group, the index of a norm parameter.
struct Affine {
  int64_t n = 0, c = 0, d = 0, h = 0, w = 0;

  __host__ __device__ int64_t at(int64_t in, int64_t ic, int64_t id, int64_t ih, int64_t iw) const {
    return in * n + ic * c + id * d + ih * h + iw * w;
  }
};

struct Problem {
  const void* input = nullptr;
  void* output = nullptr;
  int64_t num_n = 1;
  int num_channels = 1;
  Axis d, h, w;

  Param bias, addend, norm_weight, norm_bias;
  Affine addend_strides;
  bool addend_is_per_channel = true;  // constant over d, h and w, so that it joins the bias
  bool has_constant = false;          // a bias or an addend per channel
  float addend_scale = 1.f, addend_value = 0.f, eps = 0.f;

  int norm_ndim = 1;
  bool channels_last = false;
  bool channels_are_aligned = false;  // channels_last: every position is to 16 bytes
  float inverse_group_size = 1.f;     // 1 / number of elements that share a mean
  bool whole_windows = true;          // no window is cut off by an edge, so that all share one divisor
  float inverse_divisor = 1.f;        // of whole windows
  bool count_include_pad = true;
  float divisor_override = 0.f;       // 0: none
  bool gelu_is_tanh = false;
  bool output_is_float = false;

  int64_t volume_size = 1;  // D * H * W of the input
  int64_t next_row = 1;     // elements from a row to the next one in the same plane
  int64_t next_plane = 1;   // from a window's last row in one plane to its first row in the next

  __host__ __device__ int64_t output_spatial() const { return static_cast<int64_t>(d.output) * h.output * w.output; }
  int64_t output_rows() const { return static_cast<int64_t>(d.output) * h.output; }
  // Elements that share a mean.
  int64_t group_size() const {
    const int64_t sizes[] = {w.input, h.input, d.input, num_channels, num_n};
    int64_t size = 1;
    for (int i = 0; i < norm_ndim; ++i) size *= sizes[i];
    return size;
  }
  __host__ __device__ int window_rows() const { return d.kernel * h.kernel; }
  // Every window takes two positions along w, side by side, so that a thread can pool what it holds.
  bool pools_pairs() const { return whole_windows && w.kernel == 2 && w.stride == 2 && addend_is_per_channel; }
};

// What is added to every element of channel c of sample n. Where a norm group lies in one channel it drops out of the result, unless
// it is inf or nan: then all is nan.
template <typename T>
__device__ __forceinline__ float channel_constant(const Problem& p, int64_t n, int c) {
  float constant = p.addend_value;
  if (!p.has_constant) return constant;
  if (p.bias) constant += p.bias.at<T>(c);
  if (p.addend && p.addend_is_per_channel) {
    constant += p.addend_scale * p.addend.at<T>(n * p.addend_strides.n + c * p.addend_strides.c);
  }
  return constant;
}

// What is added to one element on top of that, where the addend varies within a channel.
template <typename T>
__device__ __forceinline__ float element_addend(const Problem& p, int64_t n, int c, int d, int h, int w) {
  return p.addend_scale * p.addend.at<T>(p.addend_strides.at(n, c, d, h, w));
}

// The affine part of the norm at kLen consecutive elements of a norm group, from a multiple of kLen. Kernels that pool in registers apply it
// to the sum of a window's rows: an infinite weight then gives inf where eager, which adds inf and -inf, may give nan.
template <typename T, int kLen>
__device__ __forceinline__ void load_norm_params(const Problem& p, int64_t index, float (&weight)[kLen], float (&bias)[kLen]) {
#pragma unroll
  for (int j = 0; j < kLen; ++j) weight[j] = 1.f, bias[j] = 0.f;
  if (p.norm_weight) p.norm_weight.load<T>(index, weight);
  if (p.norm_bias) p.norm_bias.load<T>(index, bias);
}

// The same for a norm over W, staged by a block in shared memory as two arrays of W floats. With `pairs`, a pooled value is
// weight[w] * z[w] + weight[w + 1] * z[w + 1] + bias[w / 2] of the summed rows z: divisor and number of rows are folded in.
template <typename T>
__device__ __forceinline__ void stage_norm_params(const Problem& p, bool pairs, float* weight, float* bias) {
  const auto bias_at = [&](int w) { return p.norm_bias ? p.norm_bias.at<T>(w) : 0.f; };
#pragma unroll 1
  for (int w = threadIdx.x; w < p.w.input; w += blockDim.x) {
    const float at_w = p.norm_weight ? p.norm_weight.at<T>(w) : 1.f;
    weight[w] = pairs ? at_w * p.inverse_divisor : at_w;
    if (!pairs) bias[w] = bias_at(w);
    else if (w % 2 == 0 && w + 1 < p.w.input) bias[w / 2] = (bias_at(w) + bias_at(w + 1)) * (p.window_rows() * p.inverse_divisor);
  }
}

// kLen values from shared memory, aligned to the widest access that divides them.
template <int kLen>
__device__ __forceinline__ void load_staged(const float* from, float (&values)[kLen]) {
  constexpr int kStep = kLen < kVecLen<float> ? kLen : kVecLen<float>;
#pragma unroll
  for (int j = 0; j < kLen; j += kStep) {
    Vec<float, kStep> vec;
    vec.load(from + j);
#pragma unroll
    for (int k = 0; k < kStep; ++k) values[j + k] = vec[k];
  }
}

__device__ __forceinline__ float divisor(const Problem& p, Axis::Window d, Axis::Window h, Axis::Window w) {
  if (p.divisor_override != 0.f) return p.divisor_override;
  if (p.count_include_pad) return static_cast<float>(d.padded_len) * h.padded_len * w.padded_len;
  return static_cast<float>(d.len()) * h.len() * w.len();
}

// What d and h contribute to the divisor of a window.
__device__ __forceinline__ float rows_divisor(const Problem& p, int od, int oh) {
  const Axis::Window d = p.d.window(od), h = p.h.window(oh);
  return p.count_include_pad ? static_cast<float>(d.padded_len) * h.padded_len : static_cast<float>(d.len()) * h.len();
}

// Pools along w a row that is already summed over the window's d and h.
__device__ __forceinline__ float pool_row(const Problem& p, const float* row, float rows_divisor, int ow) {
  float sum = 0.f;
  if (p.whole_windows) {
    const float* window = row + ow * p.w.stride;
#pragma unroll 1
    for (int i = 0; i < p.w.kernel; ++i) sum += window[i];
    return sum * p.inverse_divisor;
  }
  const Axis::Window window = p.w.window(ow);
#pragma unroll 1
  for (int w = window.begin; w < window.end; ++w) sum += row[w];
  if (p.divisor_override != 0.f) return sum / p.divisor_override;
  return sum / (rows_divisor * (p.count_include_pad ? window.padded_len : window.len()));
}

// 16-bit results round 1e-3 away; for them the cheap form is exact.
template <typename T, int kLen>
__device__ __forceinline__ void apply_gelu(const Problem& p, float (&x)[kLen]) {
  constexpr Gelu kExact = std::is_same_v<T, float> ? Gelu::Accurate : Gelu::Fast;
  if (p.gelu_is_tanh) {
#pragma unroll
    for (int i = 0; i < kLen; ++i) x[i] = gelu<Gelu::Tanh>(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kLen; ++i) x[i] = gelu<kExact>(x[i]);
  }
}

// Stores kLen consecutive outputs at `index` of `output`, which is of the output's dtype; aligned to their size, or to 16 bytes.
template <typename Out, int kLen>
__device__ __forceinline__ void store_as(Out* output, const float (&out)[kLen]) {
  constexpr int kStep = kLen < kVecLen<Out> ? kLen : kVecLen<Out>;
#pragma unroll
  for (int i = 0; i < kLen; i += kStep) {
    Vec<Out, kStep> vec;
#pragma unroll
    for (int k = 0; k < kStep; ++k) vec.value[k] = from_float<Out>(out[i + k]);
    vec.store(output + i);
  }
}

template <typename T, int kLen>
__device__ __forceinline__ void store_output(const Problem& p, void* output, int64_t index, const float (&out)[kLen]) {
  if (std::is_same_v<T, float> || p.output_is_float) store_as(static_cast<float*>(output) + index, out);
  else store_as(static_cast<T*>(output) + index, out);
}

template <typename T>
__device__ __forceinline__ void store_gelu(const Problem& p, int64_t index, float pooled) {
  float out[1] = {pooled};
  apply_gelu<T>(p, out);
  store_output<T>(p, p.output, index, out);
}

// Walks the rows of a window in order, positions outside the input included: the lanes of a warp sit in different windows and must
// take the same number of steps.
template <typename T>
struct WindowRows {
  int d, h, last_h;
  const T* row;

  // volume: where the walker's thread starts in row (0, 0).
  __device__ __forceinline__ WindowRows(const Problem& p, const T* volume, int od, int oh)
      : d(od * p.d.stride - p.d.padding),
        h(oh * p.h.stride - p.h.padding),
        last_h(h + p.h.kernel - 1),
        row(volume + (static_cast<int64_t>(d) * p.h.input + h) * p.next_row) {}
  __device__ __forceinline__ bool inside(const Problem& p) const {
    return static_cast<unsigned>(d) < static_cast<unsigned>(p.d.input) &&
           static_cast<unsigned>(h) < static_cast<unsigned>(p.h.input);
  }
  __device__ __forceinline__ void next(const Problem& p) {
    const bool wraps = h == last_h;
    h += wraps ? 1 - p.h.kernel : 1;
    d += wraps;
    row += wraps ? p.next_plane : p.next_row;
  }
};

}  // namespace fxfuse::norm_pool_gelu
