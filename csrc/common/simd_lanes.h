// Values that move between lanes, for *.simd.cpp files: sums over lanes, sums in double, transposition.
#pragma once

#include "common/simd.h"

namespace fxfuse::FXFUSE_ISA {
namespace {

typedef float HalfVec __attribute__((vector_size(kLanes * 2)));     // one half of a Vec
typedef double DoubleVec __attribute__((vector_size(kLanes * 4)));  // holds one half of a Vec's lanes

template <size_t... I>
FXFUSE_INLINE HalfVec half_of(Vec x, std::index_sequence<I...>, std::integral_constant<size_t, 0>) { return __builtin_shufflevector(x, x, I...); }
template <size_t... I>
FXFUSE_INLINE HalfVec half_of(Vec x, std::index_sequence<I...>, std::integral_constant<size_t, 1>) {
  return __builtin_shufflevector(x, x, (I + kLanes / 2)...);
}
using HalfLanes = std::make_index_sequence<kLanes / 2>;
FXFUSE_INLINE HalfVec low_half(Vec x) { return half_of(x, HalfLanes{}, std::integral_constant<size_t, 0>{}); }
FXFUSE_INLINE HalfVec high_half(Vec x) { return half_of(x, HalfLanes{}, std::integral_constant<size_t, 1>{}); }

// A sum of vectors in double.
struct DoubleSum {
  DoubleVec low{}, high{};

  __attribute__((always_inline)) void operator+=(Vec x) {
    low += __builtin_convertvector(low_half(x), DoubleVec);
    high += __builtin_convertvector(high_half(x), DoubleVec);
  }
  __attribute__((always_inline)) Vec rounded() const { return join(HalfLanes{}); }
  __attribute__((always_inline)) double of_lanes() const {
    const DoubleVec both = low + high;
    double sum = 0.;
    for (int i = 0; i < kLanes / 2; ++i) sum += both[i];
    return sum;
  }

 private:
  template <size_t... I>
  __attribute__((always_inline)) Vec join(std::index_sequence<I...>) const {
    return __builtin_shufflevector(__builtin_convertvector(low, HalfVec), __builtin_convertvector(high, HalfVec), I..., (I + kLanes / 2)...);
  }
};

// Lanes first, first + 2, first + 4, ... of the 2 * kLanes values a, b; first is 0 or 1.
template <int first, size_t... I>
FXFUSE_INLINE Vec every_other(Vec a, Vec b, std::index_sequence<I...>) { return __builtin_shufflevector(a, b, (2 * I + first)...); }
template <int first>
FXFUSE_INLINE Vec every_other(Vec a, Vec b) { return every_other<first>(a, b, std::make_index_sequence<kLanes>{}); }

// Lane i takes lane i ^ distance.
template <int distance, size_t... I>
FXFUSE_INLINE Vec swap_lanes(Vec x, std::index_sequence<I...>) { return __builtin_shufflevector(x, x, (I ^ distance)...); }

// The sum of all lanes in every lane, by halving: the order is fixed.
template <int width = kLanes>
FXFUSE_INLINE Vec sum_lanes(Vec x) {
  if constexpr (width == 1) return x;
  else return sum_lanes<width / 2>(x + swap_lanes<width / 2>(x, std::make_index_sequence<kLanes>{}));
}

// a and b consist of parts of 2 * width lanes; the result of their parts folded to width lanes, a's first.
template <int width, size_t... I>
FXFUSE_INLINE Vec fold_parts(Vec a, Vec b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (I / width * 2 * width + I % width)...) +
         __builtin_shufflevector(a, b, (I / width * 2 * width + I % width + width)...);
}

// Lane r of the result is the sum of all lanes of rows[r]; a third of the work of kLanes single sums, and one latency instead of kLanes.
template <int num_rows = kLanes>
FXFUSE_INLINE Vec sum_each(const Vec* rows) {
  if constexpr (num_rows == 1) return rows[0];
  else return fold_parts<kLanes / num_rows>(sum_each<num_rows / 2>(rows), sum_each<num_rows / 2>(rows + num_rows / 2), std::make_index_sequence<kLanes>{});
}

// kLanes x kLanes: row i lane j <-> row j lane i, by exchanging ever larger blocks off the diagonal.
template <int distance, size_t... I>
FXFUSE_INLINE void exchange_blocks(Vec& a, Vec& b, std::index_sequence<I...>) {
  const Vec low = __builtin_shufflevector(a, b, (I & distance ? I - distance + kLanes : I)...);
  b = __builtin_shufflevector(a, b, (I & distance ? I + kLanes : I + distance)...);
  a = low;
}

template <int distance = 1>
FXFUSE_INLINE void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (!(i & distance)) exchange_blocks<distance>(rows[i], rows[i + distance], std::make_index_sequence<kLanes>{});
  }
  if constexpr (2 * distance < kLanes) transpose<2 * distance>(rows);
}

}  // namespace
}  // namespace fxfuse::FXFUSE_ISA
