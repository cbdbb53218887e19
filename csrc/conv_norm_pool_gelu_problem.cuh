// conv_norm_pool_gelu: what is computed. Plain values, which kernels take as a parameter and the host makes plans from.
//
// A transposed convolution and a plain one are one thing here: output o and kernel index k meet at one input, or at none.
// Plain, stride s: at o s - p + k. Transposed: at (o + p - k) / s where that is whole, so each k belongs to exactly one residue
// ("phase") of o modulo s, and no product with an inserted zero is ever made: a stride-2 transposed convolution in 3 dimensions is 8 small
// convolutions with all the taps of the kernel between them.
#pragma once

#include "common/cuda.cuh"

namespace fxfuse::conv_norm_pool_gelu {

constexpr int kMaxKernel = 5, kMaxPool = 4, kMaxWidth = 256;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ __device__ __forceinline__ int floor_div2(int a, int b) { return b == 1 ? a : a >> 1; }  // b is 1 or 2, a any int

constexpr int kNoInput = -1;

struct Axis {
  int input, output, kernel, stride, padding;
  int pool, pooled;  // window size, number of windows

  // Whether output o takes kernel index k, inside the input or not.
  __device__ __forceinline__ bool takes(int o, int k, bool transposed) const {
    return !transposed || stride == 1 || (o + padding - k) % 2 == 0;
  }
  // The input at which output o and kernel index k meet.
  __device__ __forceinline__ int input_at(int o, int k, bool transposed) const {
    const int i = transposed ? floor_div2(o + padding - k, stride) : o * stride - padding + k;
    return takes(o, k, transposed) && static_cast<unsigned>(i) < static_cast<unsigned>(input) ? i : kNoInput;
  }
  // The lowest input that output o touches; outputs beyond o touch none below it.
  __host__ __device__ int first_input(int o, bool transposed) const {
    return transposed ? floor_div2(o + padding - kernel + stride, stride) : o * stride - padding;
  }
  // The most inputs between the first and the last that n adjacent outputs touch.
  int most_inputs(int n, bool transposed) const { return transposed ? (n + kernel - 2) / stride + 1 : (n - 1) * stride + kernel; }
};

struct Problem {
  const void* input;
  int64_t input_stride[5];  // n, c, d, h, w
  bool reads_records;       // channels are innermost, and every record of them is whole and 16-byte aligned
  void* output;             // dense [n, output channel, pooled d, h, w]
  const void* grad;         // of the output and as it is, for kernels that make gradients
  int64_t num_n;
  int in_channels, out_channels;
  Axis d, h, w;
  bool transposed;

  Param bias, addend;  // addend: one value (stride 0) or one for each output channel
  int64_t addend_stride;
  float addend_scale, addend_value;
  Param norm_weight, norm_bias;
  float eps, inverse_width;
  bool gelu_is_tanh, output_is_float;

  __host__ __device__ int w_phases() const { return transposed ? w.stride : 1; }
  __host__ __device__ int w_step() const { return transposed ? 1 : w.stride; }  // pixels that neighbouring columns of a phase lie apart
};

// The taps along W, sorted by input offset and then by phase: column j of phase r is output w_phases * j + r and reads pixel
// w_step * j + offset. Pixels at one offset feed every phase that has a tap there, so they are loaded once for all of them.
struct WidthTaps {
  int num_offsets, first_offset;
  uint32_t has_tap;         // bit 2 * (offset - first_offset) + phase
  int kernel[kMaxKernel];   // kernel index of each tap in that order

  explicit WidthTaps(const Problem& p) : num_offsets(0), first_offset(0), has_tap(0), kernel{} {
    const auto kernel_at = [&](int offset, int phase) {
      return p.transposed ? phase + p.w.padding - offset * p.w.stride : offset + p.w.padding;
    };
    const int least = p.w.first_input(0, p.transposed);
    int found = 0;
    for (int offset = least; offset < least + kMaxKernel; ++offset) {
      for (int phase = 0; phase < p.w_phases(); ++phase) {
        const int k = kernel_at(offset, phase);
        if (k < 0 || k >= p.w.kernel) continue;
        if (found == 0) first_offset = offset;
        num_offsets = offset - first_offset + 1;
        has_tap |= 1u << (2 * (offset - first_offset) + phase);
        kernel[found++] = k;
      }
    }
  }
};

}  // namespace fxfuse::conv_norm_pool_gelu
