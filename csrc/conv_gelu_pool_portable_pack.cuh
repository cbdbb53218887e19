// conv_gelu_pool, portable path: the weights in the order that the kernel reads them, [16 rows][stage][K step][split][lane], a uint4 each:
// what one lane hands to mma.sync as the fragment of 16 output channels x one K step. Channels and rows that only fill up are zeros.
#pragma once

#include "conv_gelu_pool_plan.cuh"

namespace fxfuse::conv_gelu_pool {

// In uint4.
inline int64_t packed_weights(const ConvShape& shape, const Tiling& t, int splits) {
  return int64_t{ceil_div(shape.channels_out, t.rows())} * t.rows() / 16 * t.stages() * t.k_steps * splits * kWarpSize;
}

template <Product product>
__global__ void pack_portable(View weight, Tiling t, int channels_in, int channels_out, int64_t lanes, uint4* packed) {
  using T = typename Operand<product>::Element;
  constexpr int kLen = kChunkLen<product>, kSplits = Operand<product>::kSplits, kPerRegister = kLen / 4;
  const int64_t thread = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (thread >= lanes) return;
  const int lane = thread % kWarpSize, stages = t.stages();
  int64_t rest = thread / kWarpSize;
  const int k_step = rest % t.k_steps;
  rest /= t.k_steps;
  int stage = rest % stages;
  const int rows16 = static_cast<int>(rest / stages);
  const int channel_stage = stage % t.channel_stages;
  stage /= t.channel_stages;
  const int first_tap[3] = {stage / t.tap_stages[2] / t.tap_stages[1] * t.taps[0],
                            stage / t.tap_stages[2] % t.tap_stages[1] * t.taps[1], stage % t.tap_stages[2] * t.taps[2]};
  uint32_t words[4], cross[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = rows16 * 16 + lane / 4 + i % 2 * 8, pair = k_step * 2 + i / 2;
    const int chunk = pair / t.stage_taps(), tap = pair % t.stage_taps();
    const int w = first_tap[2] + tap % t.taps[2], h = first_tap[1] + tap / t.taps[2] % t.taps[1];
    const int d = first_tap[0] + tap / t.taps[2] / t.taps[1];
    const int channel = (channel_stage * t.chunks + chunk) * kLen;
    const T* from = static_cast<const T*>(weight.data) + row * weight.outer + channel * weight.channel + d * weight.pixel[0] +
                    h * weight.pixel[1] + w * weight.pixel[2];
    const auto value = [&](int c) {
      const bool is_real = row < channels_out && chunk < t.chunks && channel + c < channels_in;
      return is_real ? from[c * weight.channel] : from_float<T>(0.f);
    };
    const int first = lane % 4 * kPerRegister;
    if constexpr (product == Product::Tf32) {
      words[i] = round_tf32(value(first));
    } else if constexpr (product == Product::Fp32) {
      float high[kLen], low[kLen];
      for (int c = 0; c < kLen; ++c) split_tf32(value(c), high[c], low[c]);
      const uint4 chunk_words = cross_chunk<CrossOrder::LowFirst>(high, low);
      words[i] = __float_as_uint(high[lane % 4]);
      cross[i] = reinterpret_cast<const uint32_t*>(&chunk_words)[lane % 4];
    } else {
      const T both[2] = {value(first), value(first + 1)};
      memcpy(&words[i], both, sizeof(uint32_t));
    }
  }
  uint4* to = packed + thread / kWarpSize * kSplits * kWarpSize + lane;
  to[0] = {words[0], words[1], words[2], words[3]};
  if constexpr (kSplits == 2) to[kWarpSize] = {cross[0], cross[1], cross[2], cross[3]};
}

}  // namespace fxfuse::conv_gelu_pool
