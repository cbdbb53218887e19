// conv_norm_pool_gelu, portable path: from a row of the convolution in a warp's registers to its part of the pooled row.
//
// A lane (g, q) = (lane / 4, lane % 4) holds channels 16m + g and 16m + g + 8 and columns 8n + 2q and 8n + 2q + 1 of each phase, so a
// statistic is a sum over the lane's own values and two shuffles inside its quad. The rows of a pool window come one after another; their
// normalised values add up in shared memory that belongs to the warp alone (with a pool of 2 or 4 along W, as pairs of neighbours, which
// lie in one lane).
#pragma once

#include "conv_norm_pool_gelu_params.cuh"
#include "conv_norm_pool_gelu_plan.cuh"

namespace fxfuse::conv_norm_pool_gelu {

template <int kPhases, int kColumns, int kTiles>
struct Row {
  float value[kPhases][kTiles][kColumns][4];

  __device__ __forceinline__ void zero() {
    for_each([](float& x, int, int) { x = 0.f; });
  }
  // f(value, phase, column)
  template <typename F>
  __device__ __forceinline__ void for_each(const F& f) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) for_each_of<0>(m, f), for_each_of<1>(m, f);
  }
  // The values of channel 16 m + 8 half + g.
  template <int kHalf, typename F>
  __device__ __forceinline__ void for_each_of(int m, const F& f) {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) f(value[phase][m][n][2 * kHalf + e], phase, 8 * n + 2 * q + e);
      }
    }
  }
};

// sums += scale * x for `kLen` adjacent floats, an access each way.
template <int kLen>
__device__ __forceinline__ void add_to(float* sums, float scale, const float (&x)[kLen], bool is_first) {
  Vec<float, kLen> sum;
  if (is_first) sum.zero();
  else sum.load(sums);
#pragma unroll
  for (int i = 0; i < kLen; ++i) sum.value[i] = fmaf(scale, x[i], sum.value[i]);
  sum.store(sums);
}

// (value - mean) * rstd * norm_weight of one channel's row, added to the sums of the window. `width`: outputs of the row that exist;
// `poison`: 0, or nan where bias or addend make every value of the row nan. Both are constant along W and else drop out of the norm.
template <int kHalf, int kPhases, int kColumns, int kTiles>
__device__ __forceinline__ void add_normalised(Row<kPhases, kColumns, kTiles>& row, int m, const Problem& p, float poison,
                                               const float* norm_weight, float* sums, bool in_pairs, bool is_first) {
  const int width = p.w.output;
  const bool is_padded = width != kPhases * kColumns * 8;
  const auto clear_padding = [&] {
    if (!is_padded) return;
    row.template for_each_of<kHalf>(m, [&](float& x, int phase, int column) {
      if (column * kPhases + phase >= width) x = 0.f;
    });
  };
  clear_padding();
  float sum = 0.f, squares = 0.f;
  row.template for_each_of<kHalf>(m, [&](float& x, int, int) { sum += x; });
  const float mean = fmaf(warp_sum(sum, 4), p.inverse_width, poison);
  row.template for_each_of<kHalf>(m, [&](float& x, int, int) { x -= mean; });
  clear_padding();
  row.template for_each_of<kHalf>(m, [&](float& x, int, int) { squares = fmaf(x, x, squares); });
  const float rstd = rsqrtf(fmaf(warp_sum(squares, 4), p.inverse_width, p.eps));

  const int q = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    float x[2 * kPhases];  // in the order of the output
    Vec<float, 2 * kPhases> weight;
    const int first = (8 * n + 2 * q) * kPhases;
    weight.load(norm_weight + first);
#pragma unroll
    for (int i = 0; i < 2 * kPhases; ++i) x[i] = row.value[i % kPhases][m][n][2 * kHalf + i / kPhases];
    if (in_pairs) {
      float pair[kPhases];
#pragma unroll
      for (int i = 0; i < kPhases; ++i) pair[i] = fmaf(x[2 * i + 1], weight.value[2 * i + 1], x[2 * i] * weight.value[2 * i]);
      add_to(sums + first / 2, rstd, pair, is_first);
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kPhases; ++i) x[i] *= weight.value[i];
      add_to(sums + first, rstd, x, is_first);
    }
  }
}

// Pools a warp's sums along W and writes the outputs; `pooled_bias` is norm_bias averaged over each window.
template <Operand operand>
__device__ __forceinline__ void store_pooled(const Problem& p, const float* sums, int sums_pitch, const float* pooled_bias,
                                             int num_channels, const FastDiv& pooled_w, int64_t first_output, int64_t channel_size) {
  const bool in_pairs = p.w.pool % 2 == 0;
  const int sums_per_window = in_pairs ? p.w.pool / 2 : p.w.pool;
  const float inverse_size = 1.f / (p.d.pool * p.h.pool * p.w.pool);
#pragma unroll 2
  for (int i = threadIdx.x % kWarpSize; i < num_channels * p.w.pooled; i += kWarpSize) {
    uint32_t w;
    const uint32_t channel = pooled_w.divide(i, w);
    const float* window = sums + channel * sums_pitch + w * sums_per_window;
    float sum = window[0];
    for (int j = 1; j < sums_per_window; ++j) sum += window[j];
    const float pooled = fmaf(sum, inverse_size, pooled_bias[w]);
    const float y = p.gelu_is_tanh ? gelu<Gelu::Tanh>(pooled) : gelu<kExactGelu<operand>>(pooled);
    const int64_t output = first_output + channel * channel_size + w;
    if (p.output_is_float) static_cast<float*>(p.output)[output] = y;
    else static_cast<DataOf<operand>*>(p.output)[output] = from_float<DataOf<operand>>(y);
  }
}

}  // namespace fxfuse::conv_norm_pool_gelu
