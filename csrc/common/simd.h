// fp32 vectors of the widest registers of the instruction set that a *.simd.cpp is compiled for, and GELU on them.
//
// A *.simd.cpp is compiled once per instruction set, with -DFXFUSE_ISA=baseline|avx2|avx512 and that set's flags, and everything
// here has internal linkage: an inline function with external linkage would exist once per instruction set under one name, and
// the linker could give the AVX-512 copy to a machine without it. For the same reason those files use no std:: containers.
// The vectors are the compiler's own (vector_size), so that any architecture works; x86 intrinsics are used, guarded, for what
// compilers do not find by themselves: masked loads, min/max, fp16.
#pragma once

#include "common/kernel_types.h"

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FXFUSE_INLINE static inline __attribute__((always_inline))

namespace fxfuse::FXFUSE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t BitVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfBits __attribute__((vector_size(kLanes * 2)));
typedef float HalfVec __attribute__((vector_size(kLanes * 2)));     // one half of a Vec
typedef double DoubleVec __attribute__((vector_size(kLanes * 4)));  // holds one half of a Vec's lanes

// The storage types; arithmetic is always in fp32.
struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

FXFUSE_INLINE Vec splat(float x) { return x - Vec{}; }
FXFUSE_INLINE BitVec bits_of(Vec x) { return reinterpret_cast<BitVec>(x); }
FXFUSE_INLINE Vec from_bits(BitVec x) { return reinterpret_cast<Vec>(x); }

// nan in a gives b, as x86 defines it; a compare and a blend elsewhere.
FXFUSE_INLINE Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX__)
  return _mm256_max_ps(a, b);
#elif defined(__x86_64__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

FXFUSE_INLINE Vec min(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX__)
  return _mm256_min_ps(a, b);
#elif defined(__x86_64__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

FXFUSE_INLINE Vec sqrt(Vec x) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(x);
#elif defined(__AVX__)
  return _mm256_sqrt_ps(x);
#elif defined(__x86_64__)
  return _mm_sqrt_ps(x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// ---- lanes -------------------------------------------------------------------------------------------------------

template <size_t... I>
FXFUSE_INLINE IntVec lane_indices(std::index_sequence<I...>) { return IntVec{static_cast<int32_t>(I)...}; }

// All ones in the first n lanes.
FXFUSE_INLINE IntVec first_lanes(int64_t n) {
  return lane_indices(std::make_index_sequence<kLanes>{}) < static_cast<int32_t>(n < kLanes ? n : kLanes);
}

FXFUSE_INLINE Vec keep(Vec x, IntVec lanes) { return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(x) & lanes); }

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

// ---- 16-bit formats ----------------------------------------------------------------------------------------------

FXFUSE_INLINE Vec widen(HalfBits x, BFloat16) { return from_bits(__builtin_convertvector(x, BitVec) << 16); }

FXFUSE_INLINE Vec widen(HalfBits x, Float16) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(reinterpret_cast<__m256i>(x));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(x));
#else
  const BitVec bits = __builtin_convertvector(x, BitVec), magnitude = bits & 0x7fff;
  // Multiplying by 2^112 moves the exponent's bias from 15 to 127 and makes subnormals normal; inf and nan need the top exponent.
  const BitVec finite = bits_of(from_bits(magnitude << 13) * 0x1p112f);
  const BitVec special = magnitude >= 0x7c00 ? BitVec{} + 0x7f800000 : BitVec{};
  return from_bits(finite | special | (bits & 0x8000) << 16);
#endif
}

FXFUSE_INLINE HalfBits narrow(Vec x, BFloat16) {
  const BitVec bits = bits_of(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : BitVec{} + 0x7fc0, HalfBits);
}

FXFUSE_INLINE HalfBits narrow(Vec x, Float16) {
#if defined(__AVX512F__)
  return reinterpret_cast<HalfBits>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return reinterpret_cast<HalfBits>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const BitVec magnitude = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 31 << 15;
  // Below 2^-14 the FPU rounds: 0.5 has an ulp of 2^-24, fp16's subnormal step.
  const BitVec subnormal = bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000;
  const BitVec normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
  const BitVec finite = magnitude < 0x38800000 ? subnormal : magnitude < 0x477ff000 ? normal : BitVec{} + 0x7c00;
  return __builtin_convertvector((magnitude > 0x7f800000 ? BitVec{} + 0x7e00 : finite) | sign, HalfBits);
#endif
}

// ---- memory ------------------------------------------------------------------------------------------------------

FXFUSE_INLINE Vec load(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
template <typename T>
FXFUSE_INLINE Vec load(const T* from) {
  HalfBits x;
  std::memcpy(&x, from, sizeof x);
  return widen(x, T{});
}

FXFUSE_INLINE void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }
template <typename T>
FXFUSE_INLINE void store(T* to, Vec x) {
  const HalfBits y = narrow(x, T{});
  std::memcpy(to, &y, sizeof y);
}

// n < kLanes elements and zeros behind them; touches no byte past them.
template <typename T>
FXFUSE_INLINE Vec load_first(const T* from, int64_t n) {
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>((1u << n) - 1);
  if constexpr (sizeof(T) == 4) return _mm512_maskz_loadu_ps(mask, from);
  else return widen(reinterpret_cast<HalfBits>(_mm256_maskz_loadu_epi16(mask, from)), T{});
#else
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_maskload_ps(from, reinterpret_cast<__m256i>(first_lanes(n)));
#endif
  T padded[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) padded[i] = from[i];
  return load(padded);
#endif
}

template <typename T>
FXFUSE_INLINE void store_first(T* to, Vec x, int64_t n) {
  T padded[kLanes];
  store(padded, x);
  for (int64_t i = 0; i < n; ++i) to[i] = padded[i];
}

// What one step of a loop over n elements works on: kVecs whole vectors, or the n < kLanes elements behind the last one.
template <int kCount>
struct Whole {
  static constexpr int kVecs = kCount;
  template <typename T>
  __attribute__((always_inline)) Vec load(const T* from, int k) const { return FXFUSE_ISA::load(from + k * kLanes); }
  template <typename T>
  __attribute__((always_inline)) void store(T* to, int k, Vec x) const { FXFUSE_ISA::store(to + k * kLanes, x); }
  __attribute__((always_inline)) Vec keep(Vec x) const { return x; }
};
struct Part {
  static constexpr int kVecs = 1;
  int64_t n;
  template <typename T>
  __attribute__((always_inline)) Vec load(const T* from, int) const { return load_first(from, n); }
  template <typename T>
  __attribute__((always_inline)) void store(T* to, int, Vec x) const { store_first(to, x, n); }
  __attribute__((always_inline)) Vec keep(Vec x) const { return FXFUSE_ISA::keep(x, first_lanes(n)); }
};

// f(i, step) for steps of 4 vectors, then of one, then of what is left.
template <typename F>
FXFUSE_INLINE void for_each_step(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) f(i, Whole<4>{});
  for (; i + kLanes <= n; i += kLanes) f(i, Whole<1>{});
  if (i < n) f(i, Part{n - i});
}

// Asks for n elements that are needed soon, while there is something else to do.
template <typename T>
FXFUSE_INLINE void prefetch(const T* from, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(from + i);
}

// As many of n elements as a vector holds.
template <typename T>
FXFUSE_INLINE Vec load_up_to(const T* from, int64_t n) { return n >= kLanes ? load(from) : load_first(from, n); }
template <typename T>
FXFUSE_INLINE void store_up_to(T* to, Vec x, int64_t n) { n >= kLanes ? store(to, x) : store_first(to, x, n); }

// Calls f with a value of the storage type.
template <typename F>
FXFUSE_INLINE void with_type(DType dtype, F&& f) {
  if (dtype == DType::kFloat32) f(float{});
  else if (dtype == DType::kBFloat16) f(BFloat16{});
  else f(Float16{});
}

// One element of an array whose dtype is known at run time.
FXFUSE_INLINE float load_one(DType dtype, const void* from, int64_t index) {
  float x = 0.f;
  with_type(dtype, [&]<typename T>(T) { x = load_first(static_cast<const T*>(from) + index, 1)[0]; });
  return x;
}

// As many of n elements as a vector holds, to element `index` of an array whose dtype is known at run time.
FXFUSE_INLINE void store_as(DType dtype, void* to, int64_t index, Vec x, int64_t n) {
  with_type(dtype, [&]<typename T>(T) { store_up_to(static_cast<T*>(to) + index, x, n); });
}

// ---- GELU --------------------------------------------------------------------------------------------------------
//
// On kVecs vectors at once, step by step: one vector's chain of about 16 multiply-adds takes some 75 cycles, and schedulers look
// ahead over fewer instructions than it would take to fill them with the next vector's.

// f(k) for each vector.
template <int kVecs, typename F>
FXFUSE_INLINE void each(F&& f) {
#pragma GCC unroll 8
  for (int k = 0; k < kVecs; ++k) f(k);
}

// p = (((c0 * x + c1) * x + c2) ...
template <int kVecs, typename... Coefficients>
FXFUSE_INLINE void polynomial(const Vec (&x)[kVecs], Vec (&p)[kVecs], float first, Coefficients... rest) {
  each<kVecs>([&](int k) { p[k] = splat(first); });
  const auto step = [&](float c) { each<kVecs>([&](int k) { p[k] = p[k] * x[k] + c; }); };
  (step(rest), ...);
}

// x = 2^(x - shift) for x - shift <= 128, relative error 1.5e-7 (and exact at 0: gelu's slope there is what a mean of small values is
// made of); 0 from -127 down, inf at 128; nan gives any value.
// x + magic rounds x to an integer in the low bits of the sum; those bits go straight into the exponent, and the shift is free.
template <int shift, int kVecs>
FXFUSE_INLINE void exp2_shifted(Vec (&x)[kVecs]) {
  constexpr float kMagic = 0x1.8p23f - shift;
  Vec biased[kVecs], p[kVecs];
  each<kVecs>([&](int k) { x[k] = max(x[k], splat(shift - 127.f)); });
  each<kVecs>([&](int k) { biased[k] = x[k] + kMagic; });
  each<kVecs>([&](int k) { x[k] -= biased[k] - kMagic; });
  polynomial(x, p, 1.335588051006198e-3f, 9.667206555604935e-3f, 5.550432577729225e-2f, 2.4022334814071655e-1f, 6.931471824645996e-1f, 1.f);
  each<kVecs>([&](int k) { x[k] = from_bits(bits_of(p[k]) + (bits_of(biased[k]) << 23)); });
}

// x * Phi(x) with Phi(-a) = 2^(P(a) - 1), so that negative tails keep their relative accuracy, where 1 + erf cancels. P of degree 8,
// P(0) = 0, minimax on [0, 5.2]: 3.5e-8 in a * Phi(-a), 7e-4 relative, 3.5e-7 relative in the even part of gelu (the mean over
// small, zero-mean values). Past 5.2 it falls monotonically to -inf. -inf gives nan, as eager's -inf * 0.
template <int kVecs>
FXFUSE_INLINE void gelu_erf(Vec (&x)[kVecs]) {
  Vec a[kVecs], p[kVecs];
  each<kVecs>([&](int k) { a[k] = from_bits(bits_of(x[k]) & 0x7fffffff); });
  polynomial(a, p, -1.843986183303059e-6f, 2.8796497645089403e-5f, -1.4307870878838003e-4f, -2.206925128120929e-4f,
             7.1416073478758335e-3f, -5.252526327967644e-2f, -4.5920753479003906e-1f, -1.15110445022583f);
  each<kVecs>([&](int k) { p[k] *= a[k]; });
  exp2_shifted<1>(p);
  each<kVecs>([&](int k) { x[k] *= x[k] > 0.f ? 1.f - p[k] : p[k]; });
}

// x * sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 x^3): 0.5 x (1 + tanh(u)) without its cancellation for negative x.
template <int kVecs>
FXFUSE_INLINE void gelu_tanh(Vec (&x)[kVecs]) {
  Vec p[kVecs];
  each<kVecs>([&](int k) { p[k] = min(x[k] * (x[k] * x[k] * -0.10294324f + -2.3022082f), splat(128.f)); });
  exp2_shifted<0>(p);
  each<kVecs>([&](int k) { x[k] *= 1.f / (1.f + p[k]); });
}

template <bool tanh_form, int kVecs>
FXFUSE_INLINE void gelu(Vec (&x)[kVecs]) {
  if constexpr (tanh_form) gelu_tanh(x);
  else gelu_erf(x);
}

}  // namespace
}  // namespace fxfuse::FXFUSE_ISA
