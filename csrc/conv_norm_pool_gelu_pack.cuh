// conv_norm_pool_gelu: weights in the order in which warps consume them, so that a stage of the ring is one run of memory and a fragment
// one 16-byte load a lane.
//
// packed[block of output channels][kernel d][kernel h][chunk of input channels]        <- a stage:
//       [tap along W, in the order of WidthTaps][tile of 16 output channels][lane][4 words]
#pragma once

#include "conv_norm_pool_gelu_operand.cuh"
#include "conv_norm_pool_gelu_plan.cuh"

namespace fxfuse::conv_norm_pool_gelu {

struct Weight {
  const void* data;
  int64_t stride[5];  // output channel, input channel, kernel d, h, w
  int taps_w, taps_h, taps_d, num_chunks, tiles_per_block, num_blocks;
  int kernel_w[kMaxKernel];
  int in_channels, out_channels;

  __host__ __device__ int num_words() const {
    return num_blocks * taps_d * taps_h * num_chunks * taps_w * tiles_per_block * kFragmentBytes / 4;
  }
};

constexpr int kPackThreads = 256;

template <Operand operand>
__global__ void __launch_bounds__(kPackThreads) pack_weight_kernel(const __grid_constant__ Weight w, uint32_t* packed) {
  using T = DataOf<operand>;
  const int num_words = w.num_words();
  for (int i = blockIdx.x * kPackThreads + threadIdx.x; i < num_words; i += gridDim.x * kPackThreads) {
    const int word = i % 4, lane = i / 4 % kWarpSize;
    int rest = i / 128;
    const auto next = [&](int size) {
      const int index = rest % size;
      rest /= size;
      return index;
    };
    const int tile = next(w.tiles_per_block), kernel_w = w.kernel_w[next(w.taps_w)], chunk = next(w.num_chunks), kernel_h = next(w.taps_h),
              kernel_d = next(w.taps_d), block = rest;
    // Words 0 and 1 are rows g and g + 8 at the first K slot of the quad's lane, words 2 and 3 the same rows at the second.
    const int out_channel = (block * w.tiles_per_block + tile) * 16 + lane / 4 + 8 * (word & 1);
    constexpr int kPerWord = 4 / sizeof(T);
    const int in_channel = chunk * kRecordChannels<operand> + (lane % 4 * 2 + word / 2) * kPerWord;
    T value[2] = {from_float<T>(0.f), from_float<T>(0.f)};
    const T* from = static_cast<const T*>(w.data) + out_channel * w.stride[0] + in_channel * w.stride[1] + kernel_d * w.stride[2] +
                    kernel_h * w.stride[3] + kernel_w * w.stride[4];
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      if (out_channel < w.out_channels && in_channel + j < w.in_channels) value[j] = from[j * w.stride[1]];
    }
    packed[i] = operand_word<operand>(value[0], value[1]);
  }
}

}  // namespace fxfuse::conv_norm_pool_gelu
