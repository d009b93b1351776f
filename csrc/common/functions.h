// Functions of one number that both compilers compile. On the CPU they have no branch and no call, so that a loop over
// them becomes vectors; on CUDA they are CUDA's own, or quicker ones.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "check.h"

namespace extension_cpp {
namespace detail {

template <class V>
struct Format;
template <>
struct Format<float> {
  using Bits = uint32_t;
  static constexpr int kFraction = 23;
  static constexpr float kLog2High = 0x1.62e4p-1f, kLog2Low = 0x1.7f7d1cp-20f;
};
template <>
struct Format<double> {
  using Bits = uint64_t;
  static constexpr int kFraction = 52;
  static constexpr double kLog2High = 0x1.62e42fee00000p-1, kLog2Low = 0x1.a39ef35793c76p-33;
};

// exp(x) = power * exp(rest), where power is 2^n and rest that of x from n log 2. For x whose exp is a normal number.
template <class V>
struct Reduced {
  EXTENSION_CPP_INLINE explicit Reduced(V x) {
    using F = Format<V>;
    using Bits = typename F::Bits;
    constexpr V kShift = V(3) * (Bits{1} << (F::kFraction - 1));
    const V shifted = x * V(1.4426950408889634) + kShift;  // n is in its low bits.
    const V n = shifted - kShift;
    rest = (x - n * F::kLog2High) - n * F::kLog2Low;
    power = std::bit_cast<V>((std::bit_cast<Bits>(shifted) << F::kFraction) + std::bit_cast<Bits>(V(1)));
  }

  V rest, power;
};

// The sum of r^i / (i + first)! for i from 0 to kTerms - first: a part of the Taylor series of exp.
template <int kFirst, int kTerms, class V>
EXTENSION_CPP_INLINE V exponential_series(V r) {
  V inverse_factorials[kTerms + 1] = {1};
  for (int i = 1; i <= kTerms; ++i) inverse_factorials[i] = inverse_factorials[i - 1] / V(i);
  V sum = inverse_factorials[kTerms];
  for (int i = kTerms - 1; i >= kFirst; --i) sum = sum * r + inverse_factorials[i];
  return sum;
}

}  // namespace detail

// At most 2 units in the last place off on the CPU, where what is below the smallest normal number is 0.
template <class V>
EXTENSION_CPP_INLINE V exponential(V x) {
#if defined(__CUDA_ARCH__)
  return exp(x);
#else
  constexpr bool kSingle = std::is_same_v<V, float>;
  constexpr V kLeast = kSingle ? V(-87.3) : V(-708.3), kMost = kSingle ? V(88.3) : V(709.4);
  const detail::Reduced<V> reduced(x);
  const V result = detail::exponential_series<0, kSingle ? 7 : 13>(reduced.rest) * reduced.power;
  const V within = x < kLeast ? V(0) : result;
  return x > kMost ? std::numeric_limits<V>::infinity() : within;
#endif
}

// exp(x) of an x that isn't above 0, for a sum whose largest term is about 1: of float at most 2^-21 off, while
// `exponential` is right to the last places of what is tiny. On CUDA a fourth of the instructions.
template <class V>
EXTENSION_CPP_INLINE V exponential_term(V x) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<V, float>) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.4426950408889634f));
    return power;
  }
#endif
  return exponential(x);
}

// x / y, for 2^-126 < |y| < 2^126: of float at most 2 units in the last place off on CUDA, in a fourth of the
// instructions.
template <class V>
EXTENSION_CPP_INLINE V quotient(V x, V y) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<V, float>) return __fdividef(x, y);
#endif
  return x / y;
}

template <class V>
EXTENSION_CPP_INLINE V sigmoid(V x) {
  return 1 / (1 + exponential(-x));
}

// On the CPU m / (m + 2) with m = exp(2|x|) - 1, which is computed without the 1 as far as it cancels out: at most 2
// units in the last place off. On CUDA, for float, an odd polynomial of small numbers and 1 - 2 / (exp(2x) + 1) of
// others: at most 2.5 units, without a branch, so that several don't wait for each other.
template <class V>
EXTENSION_CPP_INLINE V hyperbolic_tangent(V x) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<V, float>) {
    constexpr float kSmall = 0.55f, kTwiceLog2E = 2.885390082f;
    float large = fabsf(x) * kTwiceLog2E;
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(large));
    const float square = x * x;
    float small = fmaf(0x1.0d502ap-6f, square, -0x1.af7ccap-5f);
    large = fmaf(large, 0.5f, 0.5f);
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(large));
    small = fmaf(small, square, 0x1.10cef6p-3f);
    small = fmaf(small, square, -0x1.555452p-2f);
    small = fmaf(small * square, x, x);
    // The sign and the choice don't wait for the quotient, as what uses the result waits for all of it.
    const bool is_large = fabsf(x) > kSmall;
    const float one = copysignf(1, x);
    return fmaf(large, is_large ? -one : -0.0f, is_large ? one : small);
  } else {
    return tanh(x);
  }
#else
  constexpr bool kSingle = std::is_same_v<V, float>;
  constexpr V kMost = kSingle ? 20 : 40;
  V twice = 2 * std::abs(x);
  twice = kMost < twice ? kMost : twice;  // NaN stays.
  const detail::Reduced<V> reduced(twice);
  const V r = reduced.rest, q = detail::exponential_series<2, kSingle ? 8 : 13>(r) * (r * r) + r;
  const V m = reduced.power * q + (reduced.power - 1);
  return std::copysign(m / (m + 2), x);
#endif
}

}  // namespace extension_cpp
