// conv_gelu_pool, Hopper path: the ring of input rows in shared memory, filled through registers while products run.
#pragma once

#include "common/hopper.cuh"
#include "conv_gelu_pool_hopper_plan.cuh"
#include "conv_gelu_pool_load.cuh"

namespace fxfuse::conv_gelu_pool {

struct HopperJob {
  ConvShape shape;
  HopperTiling tiling;
  ConvData data;
  FastDiv width, depth;  // of the box
  int64_t first_image;
  int parts, row_tiles;
};

// The shared memory of a block, in this order.
struct HopperMemory {
  uint4 *ring, *ones, *weights, *masks;  // ring: [split][chunk][sample]
  Source* sources;                       // of each sample of a step

  __device__ HopperMemory(uint4* memory, const HopperTiling& t, int splits)
      : ring(memory), ones(ring + t.plane * t.chunks * splits), weights(ones + t.ones_bytes(splits) / kChunkBytes),
        masks(weights + t.k_steps * splits * (kStepBytes / kChunkBytes)),
        sources(reinterpret_cast<Source*>(masks + t.lines * t.line_runs)) {}
};

// Brings the rows of a step in, in batches of two samples a thread: begin_step; load and store by turns, a batch each; end_step.
template <Product product>
class HopperLoader {
  using T = typename Operand<product>::Element;
  static constexpr int kLen = kChunkLen<product>, kChunks = 8 / kLen;  // with two samples 16 values in flight a thread
  static constexpr int kFarAway = -(1 << 30);  // from every row: 2^30 and less

  const HopperJob& job_;
  const HopperMemory& memory_;
  const T* const image_;
  int sample_, chunk_;       // of the batch
  int row_, at_;             // input row of the step's first, and its place in the ring
  unsigned turn_ = 0;        // so that another warp takes the odd samples in each step
  int mirror_;               // samples from there on go a second time to that many samples before
  int64_t from_step_;        // bytes from a source's address to its row of this step
  bool met_special_ = false;
  int special_steps_ = 0;    // for which the window holds inf or nan
  RawChunk<T> raw_[2][kChunks];
  bool is_inside_[2];

 public:
  __device__ HopperLoader(const HopperJob& job, const HopperMemory& memory, const T* image) : job_(job), memory_(memory), image_(image) {}

  // For a new strip, whose box starts at input pixels `depth` and `width`, maybe in the padding.
  __device__ __forceinline__ void find_sources(int depth, int width) {
    const View& input = job_.data.input;
    for (int sample = threadIdx.x; sample < job_.tiling.step_samples(); sample += kHopperThreads) {
      uint32_t x, z;
      const int y = job_.depth.divide(job_.width.divide(sample, x), z);
      const int d = depth + static_cast<int>(z), w = width + static_cast<int>(x);
      const bool is_inside = static_cast<unsigned>(d) < static_cast<unsigned>(job_.shape.in[0]) &&
                             static_cast<unsigned>(w) < static_cast<unsigned>(job_.shape.in[2]);
      const T* const from = image_ + (d * input.pixel[0] + y * input.pixel[1] + w * input.pixel[2]);
      memory_.sources[sample] = {reinterpret_cast<const char*>(from), is_inside ? y : kFarAway};
    }
  }

  // The rows that step `y` needs beyond those of the step before, from `sample` on, into `slot`.
  __device__ __forceinline__ void begin_step(int y, int slot, int sample) {
    const HopperTiling& t = job_.tiling;
    row_ = y * t.rows + t.halo - job_.shape.padding[1];
    at_ = (slot * t.rows + t.halo) * t.row;
    mirror_ = t.slots * t.step_samples();
    if (t.phases > 1) at_ = at_ >= mirror_ ? at_ - mirror_ : at_, mirror_ = INT32_MAX;
    from_step_ = row_ * job_.data.input.pixel[1] * static_cast<int64_t>(sizeof(T));
    sample_ = sample, chunk_ = 0;
    turn_ += kWarpSize;
  }

  // All rows that step `y`, the first of a strip, needs: those before its own come in as if there had been steps before.
  __device__ __forceinline__ void load_ahead(int y) {
    const HopperTiling& t = job_.tiling;
    for (int ahead = t.lead(); ahead >= 0; --ahead) {
      begin_step(y - ahead, ahead == 0 ? 0 : t.slots - ahead, max(0, ahead * t.rows - t.halo) * t.row);
      finish();
    }
    special_steps_ = 0;
  }

  // Reads without conditions, from the image's first pixel where the sample lies outside, and in nested branches: registers that a
  // branch may have left untouched would make the second sample's loads wait for the first one's.
  __device__ __forceinline__ void load() {
    if (sample_ >= job_.tiling.step_samples()) return;
    const View& input = job_.data.input;
    const uint32_t stride = static_cast<uint32_t>(input.channel);
    const int left = job_.shape.channels_in - chunk_ * kLen;
    if (left < kChunks * kLen) {
      load_as([&](int k, RawChunk<T>& raw, const T* from) {
        if (k == 0 || k * kLen < left) raw.load_any(from, stride, left - k * kLen);
      });
    } else if (input.is_wide) {
      load_as([](int, RawChunk<T>& raw, const T* from) { raw.load_wide(from, true); });
    } else {
      load_as([&](int, RawChunk<T>& raw, const T* from) { raw.load_any(from, stride, kLen); });
    }
  }

  __device__ __forceinline__ void store() {
    if (sample_ >= job_.tiling.step_samples()) return;
    const int left = job_.shape.channels_in - chunk_ * kLen;
    const int sample = first_sample(), samples = job_.tiling.step_samples();
    if (sample < samples) {
      store_sample(sample, 0, left);
      if (sample + kHopperThreads < samples) store_sample(sample + kHopperThreads, 1, left);
    }
    chunk_ += kChunks;
    if (chunk_ >= job_.tiling.chunks) sample_ += kBatchSamples, chunk_ = 0;
  }

  // The batches that are left.
  __device__ __forceinline__ void finish() {
    while (sample_ < job_.tiling.step_samples()) load(), store();
  }

  // The barrier behind which all see what was stored, and nobody reads the step's window any more.
  __device__ __forceinline__ void end_step() {
    fence_async_proxy();
    if constexpr (product == Product::Tf32x3) {
      special_steps_ = __syncthreads_or(met_special_) ? 1 + job_.tiling.lead() : max(special_steps_ - 1, 0);
      met_special_ = false;
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ bool has_special() const { return product == Product::Tf32x3 && special_steps_ > 0; }

 private:
  __device__ __forceinline__ int first_sample() const { return sample_ + (threadIdx.x + turn_) % kHopperThreads; }

  template <typename F>
  __device__ __forceinline__ void load_as(F&& load) {
    const View& input = job_.data.input;
    const uint32_t stride = static_cast<uint32_t>(input.channel);  // an image has less than 2^31 elements
    const int sample = first_sample(), samples = job_.tiling.step_samples();
    const auto load_sample = [&](int at, int i) {
      const uint4 source = *reinterpret_cast<const uint4*>(memory_.sources + at);
      is_inside_[i] = static_cast<unsigned>(row_) + source.z < static_cast<unsigned>(job_.shape.in[1]);
      const T* from = reinterpret_cast<const T*>((static_cast<uint64_t>(source.y) << 32 | source.x) + from_step_);
      from = (is_inside_[i] ? from : image_) + chunk_ * kLen * stride;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) load(k, raw_[i][k], from + k * kLen * stride);
    };
    if (sample < samples) {
      load_sample(sample, 0);
      if (sample + kHopperThreads < samples) load_sample(sample + kHopperThreads, 1);
    }
  }

  __device__ __forceinline__ void store_sample(int sample, int i, int left) {
    const HopperTiling& t = job_.tiling;
    const int low_offset = t.chunks * t.plane;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (k > 0 && k * kLen >= left) break;
      if (left < (k + 1) * kLen) raw_[i][k].keep(left - k * kLen);
      if (!is_inside_[i]) raw_[i][k].keep(0);
      const RoundedChunk<product> rounded(raw_[i][k]);
      met_special_ |= rounded.is_special;
      uint4* const to = memory_.ring + (chunk_ + k) * t.plane + at_ + sample;
      rounded.store(to, low_offset);
      if (at_ + sample >= mirror_) rounded.store(to - mirror_, low_offset);
    }
  }
};

}  // namespace fxfuse::conv_gelu_pool
