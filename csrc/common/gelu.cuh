// GELU on the device. Every CUDA op takes its GELU from here, so that its error and cost are stated once.
//
// Eight forms, all in fp32. "instr" is SASS instructions a value on sm_90a. The rest was measured on an H200 against fp64: "error" is
// the largest on [-12, 12], rounding of the result included (half an ulp is 2.4e-7 there); "tail" is relative, at x = -5, where
// gelu(x) = -1.4e-6 and eager's own formula is off by 1.4e-2 in the mean and 9e-2 at worst. Of the three for means, instr includes the
// addition to the sum, and the error is the fit's and ex2.approx's.
//
//   form      instr  error    tail     what it is for
//   Erf        26    4.9e-7   9e-2     eager's formula
//   Accurate   16    2.5e-7   6e-5     fp32 values
//   Fast       10    2.6e-7   2e-4     bf16 and fp16 values that are stored one by one
//   MeanFine   11    1.1e-7   -        means of fp32-accurate values, whose tails are guarded: see add_sums_of_gelu
//   Mean        9    7e-7     -        means of products of TF32, likewise
//   MeanCoarse  8    1.9e-5   -        means of products of 16 bits, likewise
//   Coarse      8    1.5e-5   4e-3     sums of many bf16 or fp16 values: relative error 2e-4 above -3.5, fp16 rounds to 5e-4
//   Tanh        7    5.2e-7   -        approximate="tanh" only: it is another function, up to 4.7e-4 away from the exact one
//
// All but Erf and Tanh write gelu(x) = relu(x) - |x| * Phi(-|x|) with Phi(-a) = 2^P(a): one polynomial, one ex2.approx, no
// branch, no division, no cancellation for negative x. |x| is free: SASS takes it as an operand modifier.
//
// Coefficients: own minimax fits of log2 Phi(-a) (Lawson's algorithm in fp64 against 40-digit values), rounded to fp32 one by one
// from the highest with the rest refitted. P falls monotonically, as far as 2^P is not 0, and stays there (checked on 700,000 points up
// to FLT_MAX): leading ones are negative, so that no clamp is needed, or have one that is free.
#pragma once

#include <string_view>

#include "common/cuda.cuh"

namespace fxfuse {

enum class Gelu { Erf, Accurate, Fast, MeanFine, Mean, MeanCoarse, Coarse, Tanh };

// True for the tanh form, false for the exact one.
inline bool gelu_is_tanh(std::string_view approximate) {
  check(approximate == "none" || approximate == "tanh", "approximate is '", approximate,
        "'; 'none' (exact) and 'tanh' are supported");
  return approximate == "tanh";
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Eager's formula. Right for every x, inf and nan included.
__device__ __forceinline__ float gelu_erf(float x) {
  return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
}

// The next three: x, and below_inf, which is x, or x with +inf made finite (see gelu()).

// Degree 8 on [0.25, 6]: 1.8e-8 in a * Phi(-a), and 1.8e-4 relative where that is looser. Below 0.25 Phi(-a) = 1/2 - a * S(a^2)
// instead (S: 2.3e-8 relative): ex2.approx has errors of one sign over a whole table segment, and over a plane of small, zero-mean
// values, where sum(x) / 2 cancels, such a bias of 2e-8 |x| would be all that is left. Measured so: 9e-11 |x|.
__device__ __forceinline__ float gelu_accurate(float x, float below_inf) {
  const float a = fabsf(below_inf);
  float p = fmaf(-4.3933400e-07f, a, 6.9244143e-06f);
  p = fmaf(p, a, -7.4293462e-06f);
  p = fmaf(p, a, -6.5592630e-04f);
  p = fmaf(p, a, 7.9247672e-03f);
  p = fmaf(p, a, -5.3324778e-02f);
  p = fmaf(p, a, -4.5876181e-01f);
  p = fmaf(p, a, -1.1512270e+00f);
  p = fmaf(p, a, -9.9998724e-01f);
  const float square = a * a;
  float s = fmaf(9.86297e-03f, square, -6.6487790e-02f);
  s = fmaf(s, square, 3.9894227e-01f);
  float q = exp2_approx(p);
  // q = a < 0.25 ? 0.5 - a * s : q. As C++ the compiler makes it a branch around the other form, and warps diverge at every value.
  asm("{\n.reg .pred near;\nsetp.lt.f32 near, %1, 0f3E800000;\n@near fma.rn.f32 %0, %2, %3, 0f3F000000;\n}"
      : "+f"(q) : "f"(a), "f"(-a), "f"(s));
  return fmaf(-a, q, fmaxf(x, 0.0f));
}

// Degree 7 on [0, 6] with P(0) = -1: 1.5e-7 in a * Phi(-a), and 1.5e-4 relative where that is looser.
__device__ __forceinline__ float gelu_fast(float x, float below_inf) {
  const float a = fabsf(below_inf);
  float p = fmaf(-8.7278136e-07f, a, 4.5073157e-05f);
  p = fmaf(p, a, -8.2383992e-04f);
  p = fmaf(p, a, 8.1835957e-03f);
  p = fmaf(p, a, -5.3479604e-02f);
  p = fmaf(p, a, -4.5878819e-01f);
  p = fmaf(p, a, -1.1511703e+00f);
  p = fmaf(p, a, -1.0f);
  return fmaf(-a, exp2_approx(p), fmaxf(x, 0.0f));
}

// Degree 5 on [0, 5.3] with P(0) = -1, weighted by what 16 bits resolve: 1.8e-4 relative up to 3.5, and less near 0 (so that small
// zero-mean planes keep their digits); then 2e-8 in a * Phi(-a), a third of fp16's smallest step. Over N(0, 1) the mean is off by 1.2e-5.
__device__ __forceinline__ float gelu_coarse(float x, float below_inf) {
  const float a = fabsf(below_inf);
  float p = fmaf(-3.6151035e-04f, a, 6.3044359e-03f);
  p = fmaf(p, a, -5.0165534e-02f);
  p = fmaf(p, a, -4.6097890e-01f);
  p = fmaf(p, a, -1.1508999e+00f);
  p = fmaf(p, a, -1.0f);
  return fmaf(-a, exp2_approx(p), fmaxf(x, 0.0f));
}

// x * y + z, kept between 0 and 1 by the instruction's own saturation, which costs nothing: a positive leading coefficient would let P rise
// again for large a, but so what it makes of the next one never changes its sign.
__device__ __forceinline__ float fma_from_0_to_1(float x, float y, float z) {
  float result;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(x), "f"(y), "f"(z));
  return result;
}

// Phi(-a) for means over many x. The error in a * Phi(-a) is at most eps * min(a^2, m): near 0, where a zero-mean plane leaves
// sum(x^2) * 0.4 of its GELU, the mean keeps its digits as well. Only where all x are far below 0 is it nothing beside such an error.
// Degree 7, eps = 3.6e-7, m = 0.25; beside it ex2.approx' own 2e-8.
__device__ __forceinline__ float gelu_tail_7(float a) {
  float p = fmaf(-fma_from_0_to_1(-7.9133351e-06f, a, 5.1345087e-05f), a, -4.1847778e-04f);
  p = fmaf(p, a, 7.3590134e-03f);
  p = fmaf(p, a, -5.2638579e-02f);
  p = fmaf(p, a, -4.5918563e-01f);
  p = fmaf(p, a, -1.1511052e+00f);
  p = fmaf(p, a, -1.0f);
  return exp2_approx(p);
}

// Degree 5, eps = 2.8e-6, m = 0.25. The mean over N(m, s) is off by at most 6e-6 for m > -1.5 and any s.
__device__ __forceinline__ float gelu_tail_5(float a) {
  float p = fmaf(-5.0616434e-04f, a, 7.3247968e-03f);
  p = fmaf(p, a, -5.2450482e-02f);
  p = fmaf(p, a, -4.5930061e-01f);
  p = fmaf(p, a, -1.1510960e+00f);
  p = fmaf(p, a, -1.0f);
  return exp2_approx(p);
}

// Degree 4, eps = 3.8e-5, m = 0.5. The mean over N(m, s) is off by at most 1e-4 for m > -1.5 and any s.
__device__ __forceinline__ float gelu_tail_4(float a) {
  float p = fmaf(-fma_from_0_to_1(-4.8225988e-03f, a, 4.8716623e-02f), a, -4.6100634e-01f);
  p = fmaf(p, a, -1.1509917e+00f);
  p = fmaf(p, a, -1.0f);
  return exp2_approx(p);
}

template <Gelu form>
__device__ __forceinline__ float gelu_tail(float a) {
  if constexpr (form == Gelu::MeanFine) return gelu_tail_7(a);
  if constexpr (form == Gelu::Mean) return gelu_tail_5(a);
  if constexpr (form == Gelu::MeanCoarse) return gelu_tail_4(a);
}

// x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3): the same function as 0.5 x (1 + tanh(u)) without its cancellation for
// negative x. The factor -2 log2(e) is in the coefficients. Right for every x: -inf gives nan (as eager's -inf * 0), +inf gives inf.
__device__ __forceinline__ float gelu_tanh(float x) {
  const float t = fmaf(-0.10294324f, x * x, -2.3022082f);
  return x * rcp_approx(1.0f + exp2_approx(x * t));
}

// For sums that look for +inf afterwards: x = +inf gives nan here (inf * 0) where eager gives inf; everything else is as eager's,
// -inf (nan) and nan included. A sum over unguarded values that comes out finite is right; one that does not must be redone
// with gelu<form>. That moves the guard out of the inner loop.
template <Gelu form>
__device__ __forceinline__ float gelu_unguarded(float x) {
  if constexpr (form == Gelu::Erf) return gelu_erf(x);
  if constexpr (form == Gelu::Accurate) return gelu_accurate(x, x);
  if constexpr (form == Gelu::Fast) return gelu_fast(x, x);
  if constexpr (form == Gelu::Coarse) return gelu_coarse(x, x);
  if constexpr (form == Gelu::Tanh) return gelu_tanh(x);
}

// Right for every x. The guard is one instruction: in the product, +inf becomes FLT_MAX, times Phi = 0; -inf and nan stay.
template <Gelu form>
__device__ __forceinline__ float gelu(float x) {
  if constexpr (form == Gelu::Erf || form == Gelu::Tanh) return gelu_unguarded<form>(x);
  float below_inf;
  asm("min.NaN.f32 %0, %1, 0f7F7FFFFF;" : "=f"(below_inf) : "f"(x));
  if constexpr (form == Gelu::Accurate) return gelu_accurate(x, below_inf);
  if constexpr (form == Gelu::Fast) return gelu_fast(x, below_inf);
  if constexpr (form == Gelu::Coarse) return gelu_coarse(x, below_inf);
}

}  // namespace fxfuse
