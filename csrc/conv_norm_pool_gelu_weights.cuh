// conv_norm_pool_gelu, portable path: the ring through which packed weights reach shared memory ahead of their use.
//
// A block of the headline's shape reads 221 KB of weights in fp32, which each of its warps would fetch anew: pages and sums leave L1
// too small to hold what warps a few steps apart share. One copy a block with cp.async, a stage ahead, costs one barrier a stage.
#pragma once

#include "conv_norm_pool_gelu_plan.cuh"

namespace fxfuse::conv_norm_pool_gelu {

// Everything here is uniform over the block. Stages come in the order (window d, window h, kernel d, page of chunks, kernel h, chunks),
// those that meet no input along D, or no row of the block along H, left out.
class WeightRing {
 public:
  __device__ __forceinline__ WeightRing(const Problem& p, const PortablePlan& plan, int first_d, int first_h, const char* packed,
                                        char* stages)
      : p_(p), plan_(plan), first_d_(first_d), first_h_(first_h), packed_(packed), stages_(stages) {
    while (!is_done() && !exists()) advance();
  }

  // Whether any row of the block takes kernel_h in row window_h of its window: all do or none does, unless windows of odd size begin at
  // both phases of a transposed stride.
  __device__ __forceinline__ bool uses(int window_h, int kernel_h) const {
    return p_.h.pool % 2 == 1 || p_.h.takes(first_h_ + window_h, kernel_h, p_.transposed);
  }

  __device__ __forceinline__ void fill() {
    for (int i = 0; i < kWeightStages - 1; ++i) fetch(i);
  }

  // The next stage, complete and visible to every thread of the block, as is all that threads wrote before the call. The one that the last
  // call gave is free from here on.
  __device__ __forceinline__ const char* next() {
    cp_async_wait<kWeightStages - 2>();
    __syncthreads();
    fetch(slot_ == 0 ? kWeightStages - 1 : slot_ - 1);
    const char* stage = stages_ + slot_ * plan_.stage_bytes();
    slot_ = slot_ == kWeightStages - 1 ? 0 : slot_ + 1;
    return stage;
  }

 private:
  __device__ __forceinline__ bool is_done() const { return window_d_ == p_.d.pool; }
  __device__ __forceinline__ bool exists() const {
    return p_.d.input_at(first_d_ + window_d_, kernel_d_, p_.transposed) != kNoInput && uses(window_h_, kernel_h_);
  }

  __device__ __forceinline__ void fetch(int slot) {
    if (!is_done()) {
      const int page_end = min(page_chunk_ + plan_.page_chunks, plan_.num_chunks);
      const int bytes = min(plan_.stage_chunks, page_end - chunk_) * plan_.weight_bytes;
      const int64_t index = (kernel_d_ * p_.h.kernel + kernel_h_) * plan_.num_chunks + chunk_;
      const char* from = packed_ + index * plan_.weight_bytes;
      const uint32_t to = shared_address(stages_ + slot * plan_.stage_bytes());
      for (int i = threadIdx.x * kChunkBytes; i < bytes; i += blockDim.x * kChunkBytes) cp_async_16(to + i, from + i);
      chunk_ += plan_.stage_chunks;
      if (chunk_ >= page_end) {
        do advance();
        while (!is_done() && !exists());
      }
    }
    cp_async_commit();
  }

  // To the first chunk of the next (window d, window h, kernel d, page, kernel h).
  __device__ __forceinline__ void advance() {
    chunk_ = page_chunk_;
    if (++kernel_h_ < p_.h.kernel) return;
    kernel_h_ = 0;
    chunk_ = page_chunk_ += plan_.page_chunks;
    if (page_chunk_ < plan_.num_chunks) return;
    chunk_ = page_chunk_ = 0;
    if (++kernel_d_ < p_.d.kernel) return;
    kernel_d_ = 0;
    if (++window_h_ < p_.h.pool) return;
    window_h_ = 0;
    ++window_d_;
  }

  const Problem& p_;
  const PortablePlan& plan_;
  const int first_d_, first_h_;
  const char* const packed_;
  char* const stages_;
  int slot_ = 0, window_d_ = 0, window_h_ = 0, kernel_d_ = 0, page_chunk_ = 0, kernel_h_ = 0, chunk_ = 0;
};

}  // namespace fxfuse::conv_norm_pool_gelu
