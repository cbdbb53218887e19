// conv_gelu_pool, Hopper path: the ring of input rows in shared memory, filled through registers while products run.
#pragma once

#include "common/hopper.cuh"
#include "conv_gelu_pool_hopper_plan.cuh"
#include "conv_gelu_pool_load.cuh"
#include "conv_gelu_pool_shares.cuh"

namespace fxfuse::conv_gelu_pool {

struct HopperJob {
  ConvShape shape;
  HopperTiling tiling;
  ConvData data;
  FastDiv width, depth;  // of the box
  int64_t first_image;
  Shares shares;
  FastDiv row_tiles, steps;  // steps: of an image
};

// The shared memory of a block, in this order.
struct HopperMemory {
  uint4 *ring, *ones, *weights, *masks;  // ring: [split][chunk][sample], and samples that only columns without a pixel read
  Source* sources;                       // of each sample of a step
  float* sums;                           // of a gradient

  __device__ HopperMemory(uint4* memory, const HopperTiling& t, int splits)
      : ring(memory), ones(ring + t.ring_samples(splits)), weights(ones + t.ones_bytes() / kChunkBytes),
        masks(weights + t.k_steps * splits * (kStepBytes / kChunkBytes)),
        sources(reinterpret_cast<Source*>(masks + t.lines * t.line_runs)), sums(reinterpret_cast<float*>(sources + t.step_samples())) {}
};

// The weights of 64 output channels.
__device__ __forceinline__ const uint4* packed_row_tile(const HopperJob& job, uint32_t row_tile, int splits) {
  return job.data.weights + int64_t{row_tile} * job.tiling.k_steps * splits * (kStepBytes / kChunkBytes);
}

// What a sample in the padding is read from, with a channel pitch of 0: selecting an address takes fewer instructions than zeroing values.
static __device__ const uint4 hopper_zeros[2] = {};

// How a batch lies in memory: its two samples are neighbours along W, and a load brings one channel of both; a load brings 16 bytes of
// one sample's channels; any other way.
enum class BatchLayout { Pairs, Wide, Any };

// Brings the rows of a step in, in batches of two samples a thread: next_step; load and store by turns, a batch each; end_step.
template <Product product>
class HopperLoader {
  using T = typename Operand<product>::Element;
  static constexpr int kLen = kChunkLen<product>, kBatchChannels = 8, kChunks = kBatchChannels / kLen;
  static constexpr int kFarAway = -(1 << 30);  // from every row: 2^30 and less

  const HopperJob& job_;
  const HopperMemory& memory_;
  int sample_, chunk_;      // of the batch
  int row_, at_;            // input row of the step's first, and its place in the ring
  unsigned turn_ = 0;       // so that another warp takes the odd samples in each step
  int64_t from_step_;       // elements from a source's address to its row of this step
  int64_t from_batch_;      // the same, to the batch's first channel
  // As loaded, so that nothing waits for the loads before the products. Pairs: both samples of each channel side by side, 16 bits in one
  // word. Else 8 words a sample: a channel each, but Wide and 16 bits two.
  uint32_t raw_[2 * kBatchChannels];

 public:
  __device__ HopperLoader(const HopperJob& job, const HopperMemory& memory) : job_(job), memory_(memory) {}

  // For a new strip of an image, whose box starts at input pixels `depth` and `width`, maybe in the padding.
  __device__ __forceinline__ void find_sources(const T* image, int depth, int width) {
    const View& input = job_.data.input;
    for (int sample = threadIdx.x; sample < job_.tiling.step_samples(); sample += kHopperThreads) {
      uint32_t x, z;
      const int y = job_.depth.divide(job_.width.divide(sample, x), z);
      const int d = depth + static_cast<int>(z), w = width - job_.tiling.shift + static_cast<int>(x);
      const bool is_inside = static_cast<unsigned>(d) < static_cast<unsigned>(job_.shape.in[0]) &&
                             static_cast<unsigned>(w) < static_cast<unsigned>(job_.shape.in[2]);
      const T* const from = image + (d * input.pixel[0] + y * input.pixel[1] + w * input.pixel[2]);
      memory_.sources[sample] = {reinterpret_cast<const char*>(from), is_inside ? y : kFarAway};
    }
  }

  // All rows that step `y`, the first of a strip, needs: those before its own come in as if there had been steps before.
  __device__ __forceinline__ void load_ahead(int y) {
    const HopperTiling& t = job_.tiling;
    const int64_t pitch = job_.data.input.pixel[1];
    row_ = (y - t.lead()) * t.rows + t.halo - job_.shape.padding[1], from_step_ = row_ * pitch;
    at_ = ((t.slots - t.lead()) % t.slots * t.rows + t.halo) * t.row;
    if (at_ >= t.ring_end) at_ -= t.ring;
    for (int ahead = t.lead();; --ahead) {
      begin_batches(max(0, ahead * t.rows - t.halo) * t.row);
      finish();
      if (ahead == 0) return;
      move_on();
    }
  }

  // The rows that the next step needs beyond those of this one; none if it starts a new strip.
  __device__ __forceinline__ void next_step(bool is_needed) {
    move_on();
    begin_batches(is_needed ? 0 : job_.tiling.step_samples());
  }

  // Reads without conditions, zeros where the sample lies outside, and in nested branches: registers that a branch may have left
  // untouched would make the second sample's loads wait for the first one's.
  __device__ __forceinline__ void load() {
    if (sample_ >= job_.tiling.step_samples()) return;
    dispatch_batch([&]<BatchLayout layout>(int left) {
      const int first = first_sample<layout>(), samples = job_.tiling.step_samples();
      if (first >= samples) return;
      if constexpr (layout == BatchLayout::Pairs) load_pair(first, left);
      else {
        load_sample<layout>(first, 0, left);
        if (first + kHopperThreads < samples) load_sample<layout>(first + kHopperThreads, 1, left);
      }
    });
  }

  __device__ __forceinline__ void store() {
    if (sample_ >= job_.tiling.step_samples()) return;
    dispatch_batch([&]<BatchLayout layout>(int left) {
      constexpr int kSecond = layout == BatchLayout::Pairs ? 1 : kHopperThreads;
      const int first = first_sample<layout>(), samples = job_.tiling.step_samples();
      if (first >= samples) return;
      store_sample<layout>(first, 0, left);
      if (kSecond == 1 || first + kSecond < samples) store_sample<layout>(first + kSecond, 1, left);
    });
    chunk_ += kChunks, from_batch_ += kBatchChannels * job_.data.input.channel;
    if (chunk_ >= job_.tiling.chunks) sample_ += kBatchSamples, chunk_ = 0, from_batch_ = from_step_;
  }

  // The batches that are left.
  __device__ __forceinline__ void finish() {
    while (sample_ < job_.tiling.step_samples()) load(), store();
  }

  // The barrier behind which all see what was stored, and nobody reads the step's window any more.
  __device__ __forceinline__ void end_step() {
    fence_async_proxy();
    __syncthreads();
  }

 private:
  __device__ __forceinline__ void move_on() {
    const HopperTiling& t = job_.tiling;
    row_ += t.rows, from_step_ += t.rows * job_.data.input.pixel[1], at_ += t.step_samples();
    if (at_ >= t.ring_end) at_ -= t.ring;
  }

  __device__ __forceinline__ void begin_batches(int sample) {
    sample_ = sample, chunk_ = 0, from_batch_ = from_step_;
    turn_ += kWarpSize;
  }

  // Calls f.operator()<layout>(channels of the batch), the number known where the batch is whole.
  template <typename F>
  __device__ __forceinline__ void dispatch_batch(F&& f) {
    const int left = job_.shape.channels_in - chunk_ * kLen;
    if (job_.tiling.has_pairs) {
      if (left < kBatchChannels) f.template operator()<BatchLayout::Pairs>(left);
      else f.template operator()<BatchLayout::Pairs>(kBatchChannels);
    } else if (left < kBatchChannels) {
      f.template operator()<BatchLayout::Any>(left);
    } else if (job_.data.input.is_wide) {
      f.template operator()<BatchLayout::Wide>(kBatchChannels);
    } else {
      f.template operator()<BatchLayout::Any>(kBatchChannels);
    }
  }

  template <BatchLayout layout>
  __device__ __forceinline__ int first_sample() const {
    return sample_ + (threadIdx.x + turn_) % kHopperThreads * (layout == BatchLayout::Pairs ? 2 : 1);
  }

  // The batch's first channel at a sample, and bytes from there to the next.
  __device__ __forceinline__ const char* source_of(int sample, uint64_t& pitch) const {
    const uint4 source = *reinterpret_cast<const uint4*>(memory_.sources + sample);
    const bool is_inside = static_cast<unsigned>(row_) + source.z < static_cast<unsigned>(job_.shape.in[1]);
    const T* const from = reinterpret_cast<const T*>(static_cast<uint64_t>(source.y) << 32 | source.x) + from_batch_;
    pitch = is_inside ? job_.data.input.channel * sizeof(T) : 0;
    return reinterpret_cast<const char*>(is_inside ? from : reinterpret_cast<const T*>(hopper_zeros));
  }

  // Of the channels that do not exist the last one that does is read instead.
  __device__ __forceinline__ void load_pair(int sample, int left) {
    uint64_t pitch;
    const char* const from = source_of(sample, pitch);
#pragma unroll
    for (int i = 0; i < kBatchChannels; ++i) {
      const char* const channel = from + uint64_t{static_cast<uint32_t>(pitch)} * static_cast<uint32_t>(min(i, left - 1));
      if constexpr (sizeof(T) == 4) {
        const uint2 pair = __ldg(reinterpret_cast<const uint2*>(channel));
        raw_[2 * i] = pair.x, raw_[2 * i + 1] = pair.y;
      } else {
        raw_[i] = __ldg(reinterpret_cast<const uint32_t*>(channel));
      }
    }
  }

  template <BatchLayout layout>
  __device__ __forceinline__ void load_sample(int sample, int i, int left) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, unsigned short>;
    uint64_t pitch;
    const char* const from = source_of(sample, pitch);
    uint32_t* const words = raw_ + i * kBatchChannels;
    if constexpr (layout == BatchLayout::Wide) {
#pragma unroll
      for (int k = 0; k < kBatchChannels * static_cast<int>(sizeof(T)) / kChunkBytes; ++k) {
        const uint4 chunk = __ldg(reinterpret_cast<const uint4*>(from) + k);
        words[4 * k] = chunk.x, words[4 * k + 1] = chunk.y, words[4 * k + 2] = chunk.z, words[4 * k + 3] = chunk.w;
      }
    } else {
#pragma unroll
      for (int c = 0; c < kBatchChannels; ++c) {
        words[c] = __ldg(reinterpret_cast<const Bits*>(from + pitch * static_cast<uint32_t>(min(c, left - 1))));
      }
    }
  }

  // Chunk k of sample i from the words of the batch.
  template <BatchLayout layout>
  __device__ __forceinline__ RawChunk<T, kLen> raw_chunk(int i, int k) const {
    RawChunk<T, kLen> chunk;
#pragma unroll
    for (int j = 0; j < kLen; ++j) {
      constexpr bool kIsWide = layout == BatchLayout::Wide && sizeof(T) == 2;
      if constexpr (layout == BatchLayout::Pairs && sizeof(T) == 4) chunk.bits[j] = raw_[2 * (k * kLen + j) + i];
      else if constexpr (layout == BatchLayout::Pairs) chunk.bits[j] = static_cast<unsigned short>(raw_[j] >> 16 * i);
      else if constexpr (kIsWide) chunk.bits[j] = static_cast<unsigned short>(raw_[i * kBatchChannels + j / 2] >> 16 * (j % 2));
      else chunk.bits[j] = raw_[i * kBatchChannels + k * kLen + j];
    }
    return chunk;
  }

  template <BatchLayout layout>
  __device__ __forceinline__ void store_sample(int sample, int i, int left) {
    const HopperTiling& t = job_.tiling;
    const int part_pitch = t.chunks * t.plane;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (k > 0 && k * kLen >= left) break;
      RawChunk<T, kLen> raw = raw_chunk<layout>(i, k);
      if (left < (k + 1) * kLen) raw.keep(left - k * kLen);
      const RoundedChunk<product> rounded(raw);
      uint4* const to = memory_.ring + (chunk_ + k) * t.plane + at_ + sample;
      rounded.store(to, part_pitch);
      if (at_ + sample >= t.mirror) rounded.store(to - t.ring, part_pitch);
    }
  }
};

}  // namespace fxfuse::conv_gelu_pool
