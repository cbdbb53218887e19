// norm_pool_gelu on contiguous input, norm groups (W, H * W or D * H * W elements) of up to 8192 or 16384: a block holds one in registers.
//
// A block makes all outputs that come from the same norm groups: a row, a plane or a volume of them. It reads those groups (the
// kernel's d * h rows, its d planes, or the one volume) one or two at a time, takes their statistics by block reductions and adds the
// normalised values to its accumulators. The sum goes through shared memory once, where the rest of the window is a plain loop.
#pragma once

#include "norm_pool_gelu_problem.cuh"

namespace fxfuse::norm_pool_gelu {

constexpr int kBlockRegisters = 64;  // blocks have up to 1024 threads

struct BlockGrid {
  int group_size, outputs;  // elements of a norm group, outputs of a block
  FastDiv by_oh, by_od, by_c, by_out_h, by_out_w, by_h, by_w;
};

// Sums kRows values a thread over the block. scratch: kRows * kWarpSize floats that the block's last call did not use.
template <int kRows>
__device__ __forceinline__ void sum_over_block(float (&x)[kRows], float* scratch) {
  const int num_warps = blockDim.x / kWarpSize, warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    x[u] = warp_sum(x[u]);
    if (lane == 0) scratch[u * kWarpSize + warp] = x[u];
  }
  __syncthreads();
#pragma unroll
  for (int u = 0; u < kRows; ++u) x[u] = warp_sum(lane < num_warps ? scratch[u * kWarpSize + lane] : 0.f);
}

// Sums the rest of an output's window: over w, over h too where a norm group is a plane, over d too where it is a volume.
__device__ __forceinline__ float pool_group(const Problem& p, const float* group, int od, int oh, int ow) {
  const Axis::Window d = p.d.window(od), h = p.h.window(oh), w = p.w.window(ow);
  const int d_begin = p.norm_ndim >= 3 ? d.begin : 0, d_end = p.norm_ndim >= 3 ? d.end : 1;
  const int h_begin = p.norm_ndim >= 2 ? h.begin : 0, h_end = p.norm_ndim >= 2 ? h.end : 1;
  float sum = 0.f;
#pragma unroll 1
  for (int id = d_begin; id < d_end; ++id) {
#pragma unroll 1
    for (int ih = h_begin; ih < h_end; ++ih) {
      const float* row = group + (id * p.h.input + ih) * p.w.input;
#pragma unroll 1
      for (int iw = w.begin; iw < w.end; ++iw) sum += row[iw];
    }
  }
  return sum / divisor(p, d, h, w);
}

// Element (v * threads + thread) * kVec + j of a group is value j of vector v of its thread. kRows groups are loaded before the first is
// used. kAddend: the addend varies within a channel.
template <typename T, int kVec, int kVecs, int kRows, bool kAddend>
__global__ void __maxnreg__(kBlockRegisters)
    block_kernel(const __grid_constant__ Problem p, const __grid_constant__ BlockGrid grid) {
  extern __shared__ __align__(16) float pooled_group[];
  __shared__ float scratch[2][kRows * kWarpSize];
  const int first = threadIdx.x * kVec, vec_stride = blockDim.x * kVec;

  uint32_t c, od = 0, oh = 0, rest = blockIdx.x;
  if (p.norm_ndim == 1) rest = grid.by_oh.divide(rest, oh);
  if (p.norm_ndim <= 2) rest = grid.by_od.divide(rest, od);
  const int64_t n = grid.by_c.divide(rest, c);
  const float constant = kAddend ? channel_constant<T>(p, n, c) : 0.f;
  const T* volume = static_cast<const T*>(p.input) + (n * p.num_channels + c) * p.volume_size;
  const Axis::Window d_window = p.d.window(od), h_window = p.h.window(oh);
  const int d_begin = p.norm_ndim <= 2 ? d_window.begin : 0, h_begin = p.norm_ndim == 1 ? h_window.begin : 0;
  const int h_len = p.norm_ndim == 1 ? h_window.len() : 1, num_groups = (p.norm_ndim <= 2 ? d_window.len() : 1) * h_len;

  float sum[kVecs][kVec] = {};
  int d = d_begin, h = h_begin;
  for (int r = 0; r < num_groups; r += kRows) {
    float y[kRows][kVecs][kVec], mean[kRows], square[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const T* group = volume + (static_cast<int64_t>(d) * p.h.input + h) * p.w.input;
      const bool inside = r + u < num_groups;
      const auto added = [&](int i) {
        uint32_t in_w, in_h;
        const uint32_t in_d = grid.by_h.divide(grid.by_w.divide(i, in_w), in_h);
        return constant + element_addend<T>(p, n, c, d + in_d, h + in_h, in_w);
      };
      // The group less its first element: the mean of what is left is small, and so is its rounding error.
      const float pivot = inside ? to_float(group[0]) + (kAddend ? added(0) : 0.f) : 0.f;
      mean[u] = 0.f;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        const int i = v * vec_stride + first;
        const bool holds = inside && i < grid.group_size;
        Vec<T, kVec> raw;
        raw.zero();
        if (holds) raw.load_streaming(group + i);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          y[u][v][j] = holds ? raw[j] + (kAddend ? added(i + j) : 0.f) - pivot : 0.f;
        }
      }
      h = h == h_begin + h_len - 1 ? h_begin : h + 1;
      d += h == h_begin;
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) mean[u] = fmaf(y[u][v][j], p.inverse_group_size, mean[u]);
      }
    }
    sum_over_block(mean, scratch[0]);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      square[u] = 0.f;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        const bool holds = v * vec_stride + first < grid.group_size;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          y[u][v][j] = holds ? y[u][v][j] - mean[u] : 0.f;
          square[u] = fmaf(y[u][v][j], y[u][v][j], square[u]);
        }
      }
    }
    sum_over_block(square, scratch[1]);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (r + u >= num_groups) continue;
      const float rstd = rsqrtf(fmaf(square[u], p.inverse_group_size, p.eps));
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[v][j] = fmaf(y[u][v][j], rstd, sum[v][j]);
      }
    }
  }

  // A constant that is inf or nan makes all nan; any other dropped out.
  const bool suspect = !kAddend && threadIdx.x == 0 && !isfinite(channel_constant<T>(p, n, c));
  const float poison = __syncthreads_or(suspect) ? __int_as_float(0x7fffffff) : 0.f;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int i = v * vec_stride + first;
    if (i >= grid.group_size) continue;
    float weight[kVec], bias[kVec];
    load_norm_params<T>(p, i, weight, bias);
#pragma unroll
    for (int j = 0; j < kVec; ++j) pooled_group[i + j] = fmaf(sum[v][j] + poison, weight[j], num_groups * bias[j]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < grid.outputs; i += blockDim.x) {
    uint32_t ow, in_oh, in_od = grid.by_out_h.divide(grid.by_out_w.divide(i, ow), in_oh);
    const float pooled = pool_group(p, pooled_group, od + in_od, oh + in_oh, ow);
    store_gelu<T>(p, static_cast<int64_t>(blockIdx.x) * grid.outputs + i, pooled);
  }
}

}  // namespace fxfuse::norm_pool_gelu
