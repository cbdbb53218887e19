// conv_gelu_pool: the input's box in shared memory, as the tensor cores read it.
//
// A box is a grid of samples of one image, with its halo, and some channels: [split][chunk][sample][16 bytes]. Every input value that
// a tile needs is read from global memory once per box, by neighbouring lanes along W where W is innermost, and every tap of every
// output pixel is then a row address in shared memory: no im2col. 16-byte stores of neighbouring samples have no bank conflicts.
// Samples in the padding are zeros, and so are the channels that fill up the last chunk.
#pragma once

#include "conv_gelu_pool_problem.cuh"

namespace fxfuse::conv_gelu_pool {

struct BoxMap {
  int samples;       // of the box
  int plane;         // chunks (uint4) from one channel chunk to the next
  int chunks;
  int step[3];       // input pixels from one sample to the next
  FastDiv width, height;
};

// One chunk's channels on their way through registers.
template <typename T, int kLen = kChunkBytes / static_cast<int>(sizeof(T))>
struct RawChunk {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, unsigned short>;
  Bits bits[kLen];

  // The first `len` of the channels, which are `stride` elements apart; zeros where not is_inside.
  __device__ __forceinline__ void load(const T* from, int64_t stride, bool is_inside, int len = kLen) {
#pragma unroll
    for (int i = 0; i < kLen; ++i) {
      bits[i] = is_inside && i < len ? __ldg(reinterpret_cast<const Bits*>(from + i * stride)) : Bits{0};
    }
  }
  __device__ __forceinline__ void keep(int len) {
#pragma unroll
    for (int i = 0; i < kLen; ++i) bits[i] = i < len ? bits[i] : Bits{0};
  }
  __device__ __forceinline__ void load_wide(const T* from, bool is_inside) {
    unpack(is_inside ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{});
  }

  __device__ __forceinline__ uint4 pack() const {
    if constexpr (kLen == 4) return {bits[0], bits[1], bits[2], bits[3]};
    else return {pair(0), pair(1), pair(2), pair(3)};
  }

 private:
  __device__ __forceinline__ uint32_t pair(int i) const { return bits[2 * i] | static_cast<uint32_t>(bits[2 * i + 1]) << 16; }
  __device__ __forceinline__ void unpack(const uint4& words) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < kLen; ++i) bits[i] = static_cast<Bits>(kLen == 4 ? word[i % 4] : word[i / 2] >> 16 * (i % 2));
  }
};

// A chunk as the tensor cores take it, in parts where it is a sum of bf16; Fp32's second part is its cross chunk (see common/mma.cuh).
template <Product product>
struct RoundedChunk {
  uint4 parts[Operand<product>::kSplits];

  // The tensor cores ignore the lower 13 bits of what they take as TF32.
  __device__ __forceinline__ explicit RoundedChunk(RawChunk<typename Operand<product>::Element, kChunkLen<product>> raw) {
    if constexpr (kIsSumOfBf16<product>) {
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(raw.bits[i]);
      split_bf16(x, parts);
      return;
    } else if constexpr (product == Product::Tf32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Half of TF32's last place more: as round_tf32 in 2 instructions of 4, which keep inf and nan.
        const float power = __uint_as_float(raw.bits[i] & 0xff800000u);
        raw.bits[i] = __float_as_uint(fmaf(power, 0x1p-11f, __uint_as_float(raw.bits[i])));
      }
    } else if constexpr (product == Product::Fp32) {
      parts[1] = split(raw);
    }
    parts[0] = raw.pack();
  }

  // Each further part goes `pitch` chunks behind the one before.
  __device__ __forceinline__ void store(uint4* to, int pitch) const {
#pragma unroll
    for (int part = 0; part < Operand<product>::kSplits; ++part) to[part * pitch] = parts[part];
  }

 private:
  // As split_tf32, with cheaper rounding where no value is so large or so special that it would go wrong.
  static __device__ __forceinline__ uint4 split(RawChunk<float>& raw) {
    constexpr float kLarge = 0x1p126f;
    float x[4], high[4], low[4], magnitude = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = __uint_as_float(raw.bits[i]);
      high[i] = __uint_as_float(raw.bits[i] + 0x1000u & 0xffffe000u), low[i] = x[i] - high[i];
      magnitude += fabsf(x[i]);
    }
    if (!(magnitude < kLarge)) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < 4; ++i) split_tf32(x[i], high[i], low[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) raw.bits[i] = __float_as_uint(high[i]);
    return cross_chunk<CrossOrder::HighFirst>(high, low);
  }
};

// The whole block calls it, between barriers. `image` is the first channel of the stage, `origin` the input pixel of sample 0 (it may
// lie in the padding), channels_left those from `image` on, kLoads the loads that a thread has in flight.
template <Product product, int kThreads, int kLoads>
__device__ __forceinline__ void stage_box(uint4* box, const BoxMap& map, const View& input, const int (&size)[3],
                                          const typename Operand<product>::Element* image, const int (&origin)[3],
                                          int channels_left) {
  using T = typename Operand<product>::Element;
  constexpr int kLen = kChunkLen<product>, kBatch = kLoads / kLen;
  const uint32_t stride[3] = {static_cast<uint32_t>(input.pixel[0]), static_cast<uint32_t>(input.pixel[1]),
                              static_cast<uint32_t>(input.pixel[2])};
  for (int first = threadIdx.x; first < map.samples; first += kThreads * kBatch) {
    const T* from[kBatch];
    bool is_inside[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int sample = first + b * kThreads;
      uint32_t x, y;
      const uint32_t row = map.width.divide(sample, x);
      const int d = origin[0] + static_cast<int>(map.height.divide(row, y)) * map.step[0];
      const int h = origin[1] + static_cast<int>(y) * map.step[1], w = origin[2] + static_cast<int>(x) * map.step[2];
      is_inside[b] = sample < map.samples && static_cast<unsigned>(d) < static_cast<unsigned>(size[0]) &&
                     static_cast<unsigned>(h) < static_cast<unsigned>(size[1]) &&
                     static_cast<unsigned>(w) < static_cast<unsigned>(size[2]);
      // 32 bits: the op refuses images of 2^31 elements. What wraps lies outside, and is not read.
      from[b] = image + (d * stride[0] + h * stride[1] + w * stride[2]);
    }
    for (int chunk = 0; chunk < map.chunks; ++chunk) {
      const int left = channels_left - chunk * kLen;
      const int64_t offset = chunk * kLen * input.channel;
      RawChunk<T> raw[kBatch];
      if (left < kLen) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) raw[b].load(from[b] + offset, input.channel, is_inside[b], left);
      } else if (input.is_wide) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) raw[b].load_wide(from[b] + offset, is_inside[b]);
      } else {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) raw[b].load(from[b] + offset, input.channel, is_inside[b]);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int sample = first + b * kThreads;
        if (sample < map.samples) {
          RoundedChunk<product>(raw[b]).store(box + chunk * map.plane + sample, map.chunks * map.plane);
        }
      }
    }
  }
}

}  // namespace fxfuse::conv_gelu_pool
