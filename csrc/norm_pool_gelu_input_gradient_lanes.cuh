// norm_pool_gelu_input_gradient on contiguous input: rows of a window in the registers of 2^k lanes, read and normalised.
#pragma once

#include "norm_pool_gelu_rows.cuh"

namespace fxfuse::norm_pool_gelu {

// Where a lane's values of a row lie: value j of vector v at (v * lanes + lane) * kVec + j.
template <int kVec, int kVecs, bool kExact>
struct LaneOfRow {
  int first_w, vec_stride, width;

  __device__ __forceinline__ int w(int v) const { return v * vec_stride + first_w; }
  __device__ __forceinline__ bool holds(int v) const { return kExact || w(v) < width; }
};

// The next kRows rows of a window, normalised; values that the lane does not hold are 0, and so are rows past the window's end.
template <typename T, int kVec, int kVecs, int kRows, bool kExact, bool kAddend>
struct NormalisedRows {
  float xhat[kRows][kVecs][kVec], rstd[kRows];
  const T* from[kRows];  // null: past the end

  // kTwice: the rows are read again. meanwhile(): other loads, which go out behind the rows' and before anything waits for those.
  template <bool kTwice, typename F>
  __device__ __forceinline__ void load(const Problem& p, const LaneOfRow<kVec, kVecs, kExact>& lane, WindowRows<T>& at, int num_rows,
                                       const Channel& channel, const F& meanwhile) {
    Vec<T, kVec> raw[kRows][kVecs];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      from[u] = u < num_rows ? at.row : nullptr;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        raw[u][v].zero();
        const bool is_read = from[u] && lane.holds(v);
        if (is_read && kTwice) raw[u][v].load(at.row + v * lane.vec_stride);
        if (is_read && !kTwice) raw[u][v].load_streaming(at.row + v * lane.vec_stride);
#pragma unroll
        for (int j = 0; kAddend && j < kVec; ++j) {
          xhat[u][v][j] = is_read ? channel.constant + element_addend<T>(p, channel.n, channel.c, at.d, at.h, lane.w(v) + j) : 0.f;
        }
      }
      at.next(p);
    }
    meanwhile();
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) xhat[u][v][j] = kAddend ? xhat[u][v][j] + raw[u][v][j] : raw[u][v][j];
      }
    }
  }

  // poison: 0, or nan where what joins the channel is inf or nan. lanes: of a row.
  __device__ __forceinline__ void normalise(const Problem& p, const LaneOfRow<kVec, kVecs, kExact>& lane, uint32_t lanes, float poison) {
    float mean[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if constexpr (std::is_same_v<T, float>) {
        // The row less its first element: the mean of what is left is small, and so is its rounding error (1e-3 at mean 1e4).
        const float pivot = __shfl_sync(0xffffffffu, xhat[u][0][0], 0, lanes);
        for_each(lane, [&](int v, int j) { return xhat[u][v][j] - pivot; }, xhat[u]);
      }
      mean[u] = 0.f;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) mean[u] = fmaf(xhat[u][v][j], p.inverse_group_size, mean[u]);
      }
    }
    sum_over_lanes(mean, lanes);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      for_each(lane, [&](int v, int j) { return xhat[u][v][j] - mean[u]; }, xhat[u]);
      rstd[u] = 0.f;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) rstd[u] = fmaf(xhat[u][v][j], xhat[u][v][j], rstd[u]);
      }
    }
    sum_over_lanes(rstd, lanes);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      rstd[u] = from[u] ? rsqrtf(fmaf(rstd[u], p.inverse_group_size, p.eps)) + poison : 0.f;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) xhat[u][v][j] *= rstd[u];
      }
    }
  }

 private:
  template <typename F>
  __device__ __forceinline__ static void for_each(const LaneOfRow<kVec, kVecs, kExact>& lane, const F& f, float (&row)[kVecs][kVec]) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) row[v][j] = lane.holds(v) ? f(v, j) : 0.f;
    }
  }
};

}  // namespace fxfuse::norm_pool_gelu
