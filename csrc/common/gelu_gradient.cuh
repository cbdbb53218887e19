// The derivative of GELU on the device. Every backward kernel takes it from here, so that its error and cost are stated once.
//
// "instr" is SASS instructions a value on sm_90a. "error" is the largest against fp64 on [-12, 12], in an fp32 emulation with ex2.approx and
// rcp.approx off by up to their bounds.
//
//   form      instr  error    what it is for
//   Accurate   18    2.2e-7   gradients that are stored one by one, and sums of fp32-accurate products
//   Fast       14    4.4e-6   at results of products of TF32 or 16 bits, and factors of such: good to 2^-16 and less
//   Tanh       13    3.5e-7   approximate="tanh" only
//
// All are 0 below and 1 above for large finite x, FLT_MAX included, and nan for nan and +-inf, as eager's 1 + inf * 0 is. The last takes no
// instruction: values are clamped where they would overflow, but for one factor of a product whose other factor is 0 by then.
#pragma once

#include "common/cuda.cuh"
#include "common/gelu.cuh"

namespace fxfuse {

// Phi(-a) - a * phi(a) = 2^(-a^2 / 2 * log2(e)) * Q(a), a = |x|, is the derivative at -a; at a it is 1 minus that. Q(a) = 1/2 + a * q(a):
// own minimax fits on [0, 5.5] of the product (Lawson's algorithm in fp64), degree 11 5.5e-8 with coefficients rounded to fp32 and 7e-5
// relative at -5, degree 7 4.4e-6, on average over [0, 5.5] 5.6e-7. Gradients are summed over whole planes, where a fit's own error does not
// average out. Beyond 5.5 the last step goes on along a straight line.
__device__ __forceinline__ float gelu_derivative_of(float x, float q) {
  const float below = fmaf(q, fabsf(x), 0.5f) * exp2_approx(x * (x * -0.72134752f));
  return x > 0.0f ? 1.0f - below : below;
}

__device__ __forceinline__ float gelu_derivative_accurate(float x) {
  const float near = fminf(fabsf(x), 5.5f);
  float q = fmaf(-1.97314733e-07f, near, 5.31358728e-06f);
  q = fmaf(q, near, -6.42404557e-05f);
  q = fmaf(q, near, 4.66384750e-04f);
  q = fmaf(q, near, -2.31083878e-03f);
  q = fmaf(q, near, 8.50271154e-03f);
  q = fmaf(q, near, -2.49121096e-02f);
  q = fmaf(q, near, 6.15487024e-02f);
  q = fmaf(q, near, -1.32666320e-01f);
  q = fmaf(q, near, 2.49948204e-01f);
  return gelu_derivative_of(x, fmaf(q, near, -7.97881603e-01f));
}

__device__ __forceinline__ float gelu_derivative_fast(float x) {
  const float near = fminf(fabsf(x), 5.5f);
  float q = fmaf(-1.75008274e-04f, near, 2.38753017e-03f);
  q = fmaf(q, near, -1.42052034e-02f);
  q = fmaf(q, near, 5.05106188e-02f);
  q = fmaf(q, near, -1.26424551e-01f);
  q = fmaf(q, near, 2.48268783e-01f);
  return gelu_derivative_of(x, fmaf(q, near, -7.97729790e-01f));
}

// s + x * s * (1 - s) * (2u)' with s = sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3). With e = exp(-2u), 1 - s is e * s: no cancellation
// where s is almost 1. At the clamps 2^126.6 is finite, and its inverse is flushed to 0.
__device__ __forceinline__ float gelu_derivative_tanh(float x) {
  const float near = fminf(fmaxf(x, -10.02f), 10.02f), square = near * near;
  const float e = exp2_approx(near * fmaf(-0.10294324f, square, -2.3022082f));
  const float s = rcp_approx(1.0f + e);
  return fmaf(x * s, e * s * fmaf(0.21406445f, square, 1.5957691f), s);
}

template <Gelu kind>
__device__ __forceinline__ float gelu_derivative(float x) {
  static_assert(kind == Gelu::Accurate || kind == Gelu::Fast || kind == Gelu::Tanh, "the derivative has three forms");
  if constexpr (kind == Gelu::Tanh) return gelu_derivative_tanh(x);
  else if constexpr (kind == Gelu::Fast) return gelu_derivative_fast(x);
  else return gelu_derivative_accurate(x);
}

}  // namespace fxfuse
