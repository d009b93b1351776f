// Dual numbers: a value with its slopes in the variables that it depends on, so that an expression of them computes its
// own derivative. Which variables these are is part of the type: nothing is computed for the others, and a number
// without any is as fast as V.
#pragma once

#include <bit>
#include <type_traits>
#include <utility>

#include "functions.h"

namespace extension_cpp {

// kVariables has a bit for each; the slopes lie in the order of the bits.
template <class V, unsigned kVariables>
struct Dual {
  static constexpr int kSlopes = std::popcount(kVariables);
  template <int kVariable>
  static constexpr bool depends = kVariables >> kVariable & 1;
  template <int kVariable>
  static constexpr int place = std::popcount(kVariables & ((1u << kVariable) - 1));

  template <int kVariable>
  EXTENSION_CPP_INLINE V slope() const {
    if constexpr (depends<kVariable>) {
      return slopes[place<kVariable>];
    } else {
      return V(0);
    }
  }

  V value;
  V slopes[kSlopes > 0 ? kSlopes : 1] = {};
};

namespace detail {

constexpr int kMostVariables = 32;
constexpr auto kVariablesSequence = std::make_index_sequence<kMostVariables>();

template <class C>
concept Number = std::is_arithmetic_v<C>;

template <int kVariable, class V, unsigned A, unsigned B>
EXTENSION_CPP_INLINE void set_slope(Dual<V, A | B>& to, const Dual<V, A>& a, V da, const Dual<V, B>& b, V db) {
  using To = Dual<V, A | B>;
  if constexpr ((A & B) >> kVariable & 1) {
    to.slopes[To::template place<kVariable>] = a.template slope<kVariable>() * da + b.template slope<kVariable>() * db;
  } else if constexpr (A >> kVariable & 1) {
    to.slopes[To::template place<kVariable>] = a.template slope<kVariable>() * da;
  } else if constexpr (B >> kVariable & 1) {
    to.slopes[To::template place<kVariable>] = b.template slope<kVariable>() * db;
  }
}

// A function of a and b, by its value and its slopes in both: the chain rule.
template <class V, unsigned A, unsigned B, size_t... I>
EXTENSION_CPP_INLINE Dual<V, A | B> chain(
    V value, const Dual<V, A>& a, V da, const Dual<V, B>& b, V db, std::index_sequence<I...>) {
  Dual<V, A | B> to{value};
  (set_slope<static_cast<int>(I)>(to, a, da, b, db), ...);
  return to;
}
template <class V, unsigned A, unsigned B>
EXTENSION_CPP_INLINE Dual<V, A | B> chain(V value, const Dual<V, A>& a, V da, const Dual<V, B>& b, V db) {
  return chain(value, a, da, b, db, kVariablesSequence);
}
template <class V, unsigned A>
EXTENSION_CPP_INLINE Dual<V, A> chain(V value, const Dual<V, A>& a, V da) {
  return chain(value, a, da, Dual<V, 0>{}, V(0));
}

}  // namespace detail

template <class V, unsigned A, unsigned B>
EXTENSION_CPP_INLINE auto operator+(const Dual<V, A>& a, const Dual<V, B>& b) {
  return detail::chain(a.value + b.value, a, V(1), b, V(1));
}
template <class V, unsigned A, unsigned B>
EXTENSION_CPP_INLINE auto operator-(const Dual<V, A>& a, const Dual<V, B>& b) {
  return detail::chain(a.value - b.value, a, V(1), b, V(-1));
}
template <class V, unsigned A, unsigned B>
EXTENSION_CPP_INLINE auto operator*(const Dual<V, A>& a, const Dual<V, B>& b) {
  return detail::chain(a.value * b.value, a, b.value, b, a.value);
}
template <class V, unsigned A, unsigned B>
EXTENSION_CPP_INLINE auto operator/(const Dual<V, A>& a, const Dual<V, B>& b) {
  const V value = a.value / b.value;
  return detail::chain(value, a, 1 / b.value, b, -value / b.value);
}
template <class V, unsigned A>
EXTENSION_CPP_INLINE auto operator-(const Dual<V, A>& a) {
  return detail::chain(-a.value, a, V(-1));
}

// With numbers, which are rounded to V.
template <class V, unsigned A, detail::Number C>
EXTENSION_CPP_INLINE auto operator+(const Dual<V, A>& a, C c) {
  return a + Dual<V, 0>{static_cast<V>(c)};
}
template <class V, unsigned A, detail::Number C>
EXTENSION_CPP_INLINE auto operator-(const Dual<V, A>& a, C c) {
  return a - Dual<V, 0>{static_cast<V>(c)};
}
template <class V, unsigned A, detail::Number C>
EXTENSION_CPP_INLINE auto operator*(const Dual<V, A>& a, C c) {
  return a * Dual<V, 0>{static_cast<V>(c)};
}
template <class V, unsigned A, detail::Number C>
EXTENSION_CPP_INLINE auto operator/(const Dual<V, A>& a, C c) {
  return a / Dual<V, 0>{static_cast<V>(c)};
}
template <class V, unsigned A, detail::Number C>
EXTENSION_CPP_INLINE auto operator+(C c, const Dual<V, A>& a) {
  return Dual<V, 0>{static_cast<V>(c)} + a;
}
template <class V, unsigned A, detail::Number C>
EXTENSION_CPP_INLINE auto operator-(C c, const Dual<V, A>& a) {
  return Dual<V, 0>{static_cast<V>(c)} - a;
}
template <class V, unsigned A, detail::Number C>
EXTENSION_CPP_INLINE auto operator*(C c, const Dual<V, A>& a) {
  return Dual<V, 0>{static_cast<V>(c)} * a;
}
template <class V, unsigned A, detail::Number C>
EXTENSION_CPP_INLINE auto operator/(C c, const Dual<V, A>& a) {
  return Dual<V, 0>{static_cast<V>(c)} / a;
}

template <class V, unsigned A>
EXTENSION_CPP_INLINE auto exponential(const Dual<V, A>& a) {
  const V value = exponential(a.value);
  return detail::chain(value, a, value);
}
template <class V, unsigned A>
EXTENSION_CPP_INLINE auto sigmoid(const Dual<V, A>& a) {
  const V value = sigmoid(a.value);
  return detail::chain(value, a, value * (1 - value));
}
template <class V, unsigned A>
EXTENSION_CPP_INLINE auto hyperbolic_tangent(const Dual<V, A>& a) {
  const V value = hyperbolic_tangent(a.value);
  return detail::chain(value, a, (1 - value) * (1 + value));
}
template <class V, unsigned A>
EXTENSION_CPP_INLINE auto square_root(const Dual<V, A>& a) {
  const V value = std::sqrt(a.value);
  return detail::chain(value, a, V(0.5) / value);
}
// The larger of a and 0, as torch.relu.
template <class V, unsigned A>
EXTENSION_CPP_INLINE auto relu(const Dual<V, A>& a) {
  return detail::chain(a.value < 0 ? V(0) : a.value, a, a.value > 0 ? V(1) : V(0));
}

}  // namespace extension_cpp
