// conv_gelu_pool: what both code paths are told. Every convolution is 3-d here: 1-d and 2-d have leading dims of size 1, no batch is
// a batch of 1.
#pragma once

#include <compare>
#include <cstdint>

#include "common/cuda.cuh"
#include "common/gelu.cuh"
#include "common/mma.cuh"

namespace fxfuse::conv_gelu_pool {

// What the tensor cores multiply. Fp32 is as accurate as fp32: operands in two parts, a product of TF32 and one of bf16 (common/mma.cuh).
// Bf16Pair, Bf16Triple, for gradients, whose operands must be of 16 bits: fp32 operands as sums of two or three bf16 values, of whose products
// the three or six large ones are taken. That leaves 2^-16 or 2^-24 of a product; TF32 leaves 2^-11.
enum class Product { Tf32, Fp32, Bf16, Fp16, Bf16Pair, Bf16Triple };

template <Product product>
constexpr bool kIsSumOfBf16 = product == Product::Bf16Pair || product == Product::Bf16Triple;
constexpr int num_splits(Product product) {
  return product == Product::Bf16Triple ? 3 : product == Product::Fp32 || product == Product::Bf16Pair ? 2 : 1;
}

template <Product product>
struct Operand {
  using Element = float;  // in memory
  using Mma = std::conditional_t<kIsSumOfBf16<product>, __nv_bfloat16, Tf32>;
  static constexpr int kSplits = num_splits(product);
};
template <>
struct Operand<Product::Bf16> {
  using Element = __nv_bfloat16;
  using Mma = __nv_bfloat16;
  static constexpr int kSplits = 1;
};
template <>
struct Operand<Product::Fp16> {
  using Element = __half;
  using Mma = __half;
  static constexpr int kSplits = 1;
};

// Channels that one 16-byte chunk of a pixel holds.
constexpr int chunk_len(Product product) { return product == Product::Tf32 || product == Product::Fp32 ? 4 : 8; }
template <Product product>
constexpr int kChunkLen = chunk_len(product);

// GELU's own error must vanish beside the operands' rounding, 5e-4 in TF32 and 5e-7 in Fp32, or the result's, 2e-4 and more in 16 bits.
template <Product product>
constexpr Gelu kExactForm = product == Product::Fp32 ? Gelu::MeanFine : product == Product::Tf32 ? Gelu::Mean : Gelu::MeanCoarse;

struct ConvShape {
  int64_t batch;
  int channels_in, channels_out;
  int in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];  // depth, height, width

  int64_t out_pixels() const { return int64_t{out[0]} * out[1] * out[2]; }
  int64_t taps() const { return int64_t{kernel[0]} * kernel[1] * kernel[2]; }
  auto operator<=>(const ConvShape&) const = default;
};

// A tensor as it lies in memory, in elements: any strides are read in place. Of a weight, `outer` runs over output channels.
struct View {
  const void* data;
  int64_t outer, channel, pixel[3];
  bool is_wide = false;  // channels are adjacent, and every chunk of a pixel is 16 bytes aligned and whole
};

// Operands and results of a launch; the packed weights are in the order that the path asks for.
struct ConvData {
  View input;
  const uint4* weights;
  Param bias;
  float* partials;  // [images, most pieces, channels_out]: sums over the pixels of a piece
};

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace fxfuse::conv_gelu_pool
