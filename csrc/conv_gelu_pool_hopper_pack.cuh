// conv_gelu_pool, Hopper path: the weights in the order of shared memory, [64 rows][split][K step][half][row][16 bytes]. Each 8 rows
// of a half are a core matrix of wgmma. Channels and rows that only fill up are zeros; a spare chunk of K holds the bias.
#pragma once

#include "conv_gelu_pool_hopper_plan.cuh"

namespace fxfuse::conv_gelu_pool {

inline int64_t packed_weights(const ConvShape& shape, const HopperTiling& t, int splits) {
  return int64_t{ceil_div(shape.channels_out, kHopperRows)} * t.k_steps * splits * (kStepBytes / kChunkBytes);
}

// The bias as a spare chunk of weights, and the samples that it is multiplied with. One value of 8 or 11 bits cannot hold an fp32 bias:
// each slot takes what the ones before left. fp16 needs slots of other scales for what is too large or too small for it.
template <Product product>
__device__ __forceinline__ float bias_scale(int slot) {
  if constexpr (product == Product::Fp16) {
    constexpr float kScale[] = {32768.f, 1.f, 1.f, 0x1p-12f, 0x1p-24f};
    return slot < 5 ? kScale[slot] : 0.f;
  }
  if constexpr (Operand<product>::kSplits > 1) return 0.f;  // no bias in K: the row is one of zeros
  return slot < 3 ? 1.f : 0.f;
}

template <Product product>
__device__ __forceinline__ uint4 pack_chunk(const float (&value)[kChunkLen<product>]) {
  uint4 packed;
  if constexpr (kChunkLen<product> == 4) {
    packed = {round_tf32(value[0]), round_tf32(value[1]), round_tf32(value[2]), round_tf32(value[3])};
  } else {
    typename Operand<product>::Mma narrow[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) narrow[i] = from_float<typename Operand<product>::Mma>(value[i]);
    memcpy(&packed, narrow, sizeof packed);
  }
  return packed;
}

template <Product product>
__device__ __forceinline__ float rounded(float x) {
  using T = typename Operand<product>::Element;
  if constexpr (sizeof(T) == 4) return __uint_as_float(round_tf32(x));
  else return to_float(from_float<T>(x));
}

template <Product product>
__device__ __forceinline__ void split_bias(float rest, float (&value)[kChunkLen<product>]) {
  constexpr float kLargest = 60000.f;
  const bool is_special = !is_finite(rest);
#pragma unroll
  for (int slot = 0; slot < kChunkLen<product>; ++slot) {
    const float scale = bias_scale<product>(slot);
    const bool is_used = scale != 0.f && (scale <= 1.f || fabsf(rest) > kLargest) && (!is_special || slot == 1);
    value[slot] = is_used ? rounded<product>(rest / scale) : 0.f;
    if (!is_special) rest -= value[slot] * scale;
  }
}

template <Product product>
__global__ void pack_hopper(View weight, Param bias, ConvShape shape, int chunks, int k_steps, int64_t rows_x_halves, uint4* packed) {
  using T = typename Operand<product>::Element;
  constexpr int kLen = kChunkLen<product>, kSplits = Operand<product>::kSplits;
  const int64_t thread = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  let_next_kernel_start();
  if (thread >= rows_x_halves) return;
  const int64_t row_tile = thread / (2 * k_steps * kHopperRows);
  const int within = thread % (2 * k_steps * kHopperRows);
  const int64_t row = row_tile * kHopperRows + within % kHopperRows;
  const auto [chunk, h, d, w] = Half(shape, chunks, within / kHopperRows);
  const T* from = static_cast<const T*>(weight.data) + row * weight.outer + chunk * kLen * weight.channel + d * weight.pixel[0] +
                  h * weight.pixel[1] + w * weight.pixel[2];
  float value[kLen] = {};
  if (row < shape.channels_out && chunk < chunks) {
    for (int i = 0; i < kLen && chunk * kLen + i < shape.channels_in; ++i) value[i] = to_float(from[i * weight.channel]);
  } else if (row < shape.channels_out && kSplits == 1 && bias) {
    split_bias<product>(bias.at<T>(row), value);
  }
  uint4* to = packed + row_tile * kSplits * 2 * k_steps * kHopperRows + within;
  if constexpr (kSplits == 1) {
    *to = pack_chunk<product>(value);
  } else if constexpr (kIsSumOfBf16<product>) {
    uint4 parts[kSplits];
    split_bf16(value, parts);
    for (int part = 0; part < kSplits; ++part) to[part * 2 * k_steps * kHopperRows] = parts[part];
  } else {
    float high[4], low[4];
    for (int i = 0; i < 4; ++i) split_tf32(value[i], high[i], low[i]);
    to[0] = {__float_as_uint(high[0]), __float_as_uint(high[1]), __float_as_uint(high[2]), __float_as_uint(high[3])};
    to[2 * k_steps * kHopperRows] = cross_chunk<CrossOrder::LowFirst>(high, low);
  }
}

}  // namespace fxfuse::conv_gelu_pool
