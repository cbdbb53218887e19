// The second step of sums that must come out the same in every run: blocks leave partial sums in a workspace, and this kernel adds them in
// a fixed order. No atomics.
#pragma once

#include <algorithm>

#include "common/cuda.cuh"

namespace fxfuse {

constexpr int kPartialSumsThreads = 512;

// out[o, i] = sum over p of parts[o, p, i]. `items` of the o * inner + i a block, kPartialSumsThreads / items threads an item: neighbouring
// threads read neighbouring addresses, along i where inner is large and along p where it is 1.
struct PartialSums {
  const float* parts;
  float* out;
  int64_t outer, num_parts, inner;
  int items;
};

static __global__ void __launch_bounds__(kPartialSumsThreads) sum_parts_kernel(const PartialSums s) {
  extern __shared__ __align__(16) float sums[];
  const int lanes = kPartialSumsThreads / s.items;
  const int item = s.inner == 1 ? threadIdx.x / lanes : threadIdx.x % s.items, lane = s.inner == 1 ? threadIdx.x % lanes : threadIdx.x / s.items;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * s.items + item;
  const bool is_item = index < s.outer * s.inner;
  float total = 0.f;
  if (is_item) {
    const float* from = s.parts + index / s.inner * s.num_parts * s.inner + index % s.inner;
#pragma unroll 4
    for (int64_t part = lane; part < s.num_parts; part += lanes) total += from[part * s.inner];
  }
  sums[item * lanes + lane] = total;
  for (int width = lanes / 2; width > 0; width /= 2) {
    __syncthreads();
    if (lane < width) sums[item * lanes + lane] += sums[item * lanes + lane + width];
  }
  if (is_item && lane == 0) s.out[index] = sums[item * lanes];
}

// parts: fp32 [outer, num_parts, inner]. out: fp32 [outer, inner].
inline void sum_parts(const Tensor& on, const float* parts, float* out, int64_t outer, int64_t num_parts, int64_t inner) {
  // Threads of an item: no more than parts, and at most 64, so that there are blocks enough where the parts are many.
  int items = kPartialSumsThreads / 64;
  while (items < kPartialSumsThreads && kPartialSumsThreads / items > num_parts) items *= 2;
  const int64_t blocks = (outer * inner + items - 1) / items;
  const PartialSums sums{parts, out, outer, num_parts, inner, items};
  launch(on, {blocks, kPartialSumsThreads, kPartialSumsThreads * sizeof(float)}, sum_parts_kernel, sums);
}

}  // namespace fxfuse
