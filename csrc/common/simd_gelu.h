// GELU on fp32 vectors, for *.simd.cpp files.
//
// On kVecs vectors at once, step by step: one vector's chain of dependent instructions takes some 75 cycles, and schedulers look ahead
// over fewer instructions than it would take to fill them with the next vector's.
#pragma once

#include "common/simd.h"

namespace fxfuse::FXFUSE_ISA {
namespace {

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

#if defined(__AVX512F__)

// Phi(-a) around a = n / 5, as a polynomial in 5 * a - n, by power and n: 1e-8 in a * Phi(-a), 4e-5 relative, exactly 1/2 at 0. Registers
// hold the table and a permutation looks it up, which takes two thirds of the time of an exponential. 0 from a = 6.1 on, where
// 1 + erf(-a / sqrt(2)) has long been 0.
alignas(64) constexpr float kPhi[5][32] = {
    {0.5f, 0.420740277f, 0.344578266f, 0.27425313f, 0.211855397f, 0.158655256f, 0.115069672f, 0.0807566568f,
     0.0547992922f, 0.0359303206f, 0.0227501318f, 0.0139034474f, 0.00819753576f, 0.004661188f, 0.00255513005f, 0.00134989782f,
     0.00068713777f, 0.000336929137f, 0.000159108487f, 7.23479752e-05f, 3.16711994e-05f, 1.33457252e-05f, 5.41253075e-06f, 2.11244787e-06f,
     7.93324716e-07f, 2.86649964e-07f, 9.96435503e-08f, 3.33201484e-08f, 1.07174687e-08f, 3.31569949e-09f, 9.86570603e-10f, 0.f},
    {-0.0797884539f, -0.0782084838f, -0.0736539885f, -0.066644907f, -0.057938315f, -0.0483941697f, -0.0388372466f, -0.0299455319f,
     -0.0221842006f, -0.0157900564f, -0.0107982075f, -0.00709492341f, -0.00447890442f, -0.00271658832f, -0.0015830833f, -0.000886362977f,
     -0.000476812071f, -0.000246439682f, -0.000122377533f, -5.83875626e-05f, -2.67649593e-05f, -1.17880045e-05f, -4.9881719e-06f, -2.02800879e-06f,
     -7.92183016e-07f, -2.97309214e-07f, -1.07205814e-07f, -3.71411453e-08f, -1.23628663e-08f, -3.95375643e-09f, -1.21486332e-09f, 0.f},
    {-9.92944891e-08f, 0.00156418234f, 0.00294616562f, 0.00399869122f, 0.00463505276f, 0.00483939564f, 0.00466044294f, 0.00419234717f,
     0.00354944821f, 0.002842193f, 0.00215963251f, 0.00156088162f, 0.00107494136f, 0.000706320861f, 0.000443272555f, 0.00026591777f,
     0.00015258741f, 8.37952975e-05f, 4.40600379e-05f, 2.21900045e-05f, 1.07076739e-05f, 4.95194672e-06f, 2.19533695e-06f, 9.33165666e-07f,
     3.80386723e-07f, 1.48719622e-07f, 5.57759563e-08f, 2.00684713e-08f, 6.92814783e-09f, 2.29507924e-09f, 7.2961498e-10f, 0.f},
    {0.00053291698f, 0.000499636168f, 0.000411829562f, 0.000284082547f, 0.000139154421f, 4.0131269e-07f, -0.000113347829f, -0.000191040031f,
     -0.000230180842f, -0.000235408399f, -0.000215739652f, -0.000181552619f, -0.000142160017f, -0.000104408216f, -7.23026169e-05f, -4.73826512e-05f,
     -2.94631573e-05f, -1.74179168e-05f, -9.80473396e-06f, -5.26167059e-06f, -2.69452948e-06f, -1.31783133e-06f, -6.15944316e-07f, -2.75276363e-07f,
     -1.17691982e-07f, -4.81560072e-08f, -1.88638829e-08f, -7.07653092e-09f, -2.54292587e-09f, -8.75533146e-10f, -2.88886415e-10f, 0.f},
    {-3.18454727e-06f, -1.54555546e-05f, -2.7867567e-05f, -3.51250928e-05f, -3.6370242e-05f, -3.21572261e-05f, -2.41324324e-05f, -1.44488668e-05f,
     -5.14705152e-06f, 2.30422643e-06f, 7.2036396e-06f, 9.55889573e-06f, 9.86318719e-06f, 8.82155746e-06f, 7.12124256e-06f, 5.29227327e-06f,
     3.66193512e-06f, 2.37604536e-06f, 1.45267086e-06f, 8.39728671e-07f, 4.60124767e-07f, 2.39454636e-07f, 1.18534928e-07f, 5.58827438e-08f,
     2.51161119e-08f, 1.07703784e-08f, 4.40977033e-09f, 1.72490211e-09f, 6.44906406e-10f, 2.30570202e-10f, 7.88587806e-11f, 0.f},
};

template <int kVecs>
FXFUSE_INLINE void lower_phi(const Vec (&a)[kVecs], Vec (&phi)[kVecs]) {
  constexpr float kMagic = 0x1.8p23f;  // rounds to an integer in the low bits, where the permutation takes its index from
  Vec f[kVecs];
  IntVec n[kVecs];
  each<kVecs>([&](int k) { f[k] = min(a[k], splat(6.2f)); });
  each<kVecs>([&](int k) {
    const Vec biased = f[k] * 5.f + kMagic;
    n[k] = reinterpret_cast<IntVec>(biased);
    f[k] = f[k] * 5.f - (biased - kMagic);
  });
  const auto look_up = [&](int power, int k) {
    return reinterpret_cast<Vec>(_mm512_permutex2var_ps(load(kPhi[power]), reinterpret_cast<__m512i>(n[k]), load(kPhi[power] + 16)));
  };
  each<kVecs>([&](int k) { phi[k] = look_up(4, k); });
  for (int power = 3; power >= 0; --power) each<kVecs>([&](int k) { phi[k] = phi[k] * f[k] + look_up(power, k); });
}

#else

// Phi(-a) = 2^(P(a) - 1), P of degree 8, P(0) = 0, minimax on [0, 5.2]: 3.5e-8 in a * Phi(-a), 7e-4 relative, 3.5e-7 relative in the
// even part of gelu (the mean over small, zero-mean values). Past 5.2 it falls monotonically to -inf.
template <int kVecs>
FXFUSE_INLINE void lower_phi(const Vec (&a)[kVecs], Vec (&phi)[kVecs]) {
  polynomial(a, phi, -1.843986183303059e-6f, 2.8796497645089403e-5f, -1.4307870878838003e-4f, -2.206925128120929e-4f,
             7.1416073478758335e-3f, -5.252526327967644e-2f, -4.5920753479003906e-1f, -1.15110445022583f);
  each<kVecs>([&](int k) { phi[k] *= a[k]; });
  exp2_shifted<1>(phi);
}

#endif

// x * Phi(x), from Phi(-|x|): negative tails keep their relative accuracy, where 1 + erf cancels. -inf gives nan, as eager's -inf * 0.
template <int kVecs>
FXFUSE_INLINE void gelu_erf(Vec (&x)[kVecs]) {
  Vec a[kVecs], phi[kVecs];
  each<kVecs>([&](int k) { a[k] = from_bits(bits_of(x[k]) & 0x7fffffff); });
  lower_phi(a, phi);
  each<kVecs>([&](int k) { x[k] *= x[k] > 0.f ? 1.f - phi[k] : phi[k]; });
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
