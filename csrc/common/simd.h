// fp32 vectors of the widest registers of the instruction set that a *.simd.cpp is compiled for.
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

// f(k) for each of kVecs vectors.
template <int kVecs, typename F>
FXFUSE_INLINE void each(F&& f) {
#pragma GCC unroll 8
  for (int k = 0; k < kVecs; ++k) f(k);
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

}  // namespace
}  // namespace fxfuse::FXFUSE_ISA
