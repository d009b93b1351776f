// Recurrences over time whose channels don't mix: an author writes one step of one channel.
//
//   struct Cell {                                             // h = z h + (1 - z) x, with z = sigmoid(gate + weight h)
//     static constexpr int kStates = 1, kInputs = 2, kWeights = 1;
//
//     EXTENSION_CPP_INLINE auto operator()(auto h, auto x, auto gate, auto weight) const {
//       const auto z = sigmoid(gate + weight * h);
//       return z * h + (1 - z) * x;
//     }
//   };
//
// A cell takes the states, the inputs of the step and the weights, in this order, and returns the new states: several
// as states(h, c). Products over channels, as those of gates with a matrix, are done for all steps before: they are
// the inputs. A cell is made of + - * / and of the functions in dual.h; `auto` is what lets it be its own derivative.
//
// The tensors of an operator are
//   forward:   inputs (B, T, H), weights (H,), initial states (B, H) -> states after each step (B, T, H)
//   backward:  gradients of these states, these states, and the arguments of forward
//              -> gradients of the inputs, of the weights, which are sums over B and T, and of the initial states
// with any strides. A state is rounded to the dtype before it is used on: it is what the result holds, so that a
// sequence that is cut in two goes on where it stopped, bit by bit, and backward needs nothing else. All else is in
// float32, or float64 for float64. Sums are in an order that depends on the sizes alone.
#pragma once

#include <array>
#include <tuple>

#include "dual.h"
#include "rowwise.h"

namespace extension_cpp {

template <class... E>
struct States {};
template <class First, class... Rest>
struct States<First, Rest...> {
  First first;
  States<Rest...> rest;
};

EXTENSION_CPP_INLINE States<> states() {
  return {};
}
template <class First, class... Rest>
EXTENSION_CPP_INLINE States<First, Rest...> states(const First& first, const Rest&... rest) {
  return {first, states(rest...)};
}

namespace detail {

template <int kState, class State>
EXTENSION_CPP_INLINE const auto& state_at(const State& state) {
  if constexpr (requires { state.value; }) {
    return state;
  } else if constexpr (kState == 0) {
    return state.first;
  } else {
    return state_at<kState - 1>(state.rest);
  }
}

// A step of one channel. Variables are states, inputs and weights.
template <class Cell>
struct Step {
  static constexpr int kStates = Cell::kStates, kInputs = Cell::kInputs, kWeights = Cell::kWeights;
  static constexpr int kVariables = kStates + kInputs + kWeights;
  static_assert(kVariables <= kMostVariables);
  using Variables = std::make_index_sequence<kVariables>;
  using All = std::make_index_sequence<kStates>;

  template <class V, size_t... I, size_t... S>
  EXTENSION_CPP_INLINE static void next(
      const Cell& cell, const V* at, V* to, std::index_sequence<I...>, std::index_sequence<S...>) {
    const auto after = cell(Dual<V, 0>{at[I]}...);
    ((to[S] = state_at<S>(after).value), ...);
  }
  template <class V>
  EXTENSION_CPP_INLINE static void next(const Cell& cell, const V* at, V* to) {
    next(cell, at, to, Variables(), All());
  }

  template <int kVariable, class V, class After, size_t... S>
  EXTENSION_CPP_INLINE static V gradient(const After& after, const V* grads, std::index_sequence<S...>) {
    return (V(0) + ... + (state_at<S>(after).template slope<kVariable>() * grads[S]));
  }
  template <class V, size_t... I>
  EXTENSION_CPP_INLINE static void back(
      const Cell& cell, const V* at, const V* grads, V* to, std::index_sequence<I...>) {
    const auto after = cell(Dual<V, 1u << I>{at[I], {V(1)}}...);
    ((to[I] = gradient<I>(after, grads, All())), ...);
  }
  // The gradients of the variables for those of the new states.
  template <class V>
  EXTENSION_CPP_INLINE static void back(const Cell& cell, const V* at, const V* grads, V* to) {
    back(cell, at, grads, to, Variables());
  }
};

// A tensor by batch, time and channel; what it lacks of these has stride 0.
struct Sequence {
  Sequence() = default;
  explicit Sequence(const View& t) : data(t.tensor->const_data_ptr()) {
    channel = t.strides[t.ndim - 1];
    if (t.ndim > 1) batch = t.strides[0];
    if (t.ndim > 2) time = t.strides[1];
  }

  template <class T>
  EXTENSION_CPP_INLINE const T* at(int64_t b, int64_t t, int64_t h) const {
    return static_cast<const T*>(data) + b * batch + t * time + h * channel;
  }

  const void* data = nullptr;
  int64_t batch = 0, time = 0, channel = 0;
};

// A call: the variables in the order of the cell, and results in the order that `place` says.
template <class Cell>
struct Sequences {
  using S = Step<Cell>;

  // `before` are the gradients and the states, of backward.
  template <size_t K>
  Sequences(const Call<K>& call, int before) : batch(call["B"]), steps(call["T"]), width(call["H"]) {
    for (int k = 0; k < S::kVariables; ++k) variables[place(k)] = Sequence(call.views[before + k]);
    for (int k = 0; k < before; ++k) (k < S::kStates ? grads[k] : states[k - S::kStates]) = Sequence(call.views[k]);
  }

  // The variable that the k-th argument is, which are inputs, weights and initial states.
  static constexpr int place(int k) { return (k + S::kStates) % S::kVariables; }

  int64_t batch, steps, width;
  Sequence variables[S::kVariables], grads[S::kStates], states[S::kStates];
  void* results[S::kVariables];  // of forward: of each state; of backward: of each variable
};

}  // namespace detail
}  // namespace extension_cpp

#if defined(__CUDACC__)
#include "recurrence.cuh"
#else
#include "recurrence_cpu.h"
#endif

namespace extension_cpp {
namespace detail {

template <bool kBackward, class Cell, class... Tensors>
auto run_recurrence(const Operator& op, const Cell& cell, const Tensors&... tensors) {
  using S = Step<Cell>;
  constexpr int kBefore = kBackward ? 2 * S::kStates : 0, kOut = kBackward ? S::kVariables : S::kStates;
  static_assert(sizeof...(Tensors) == kBefore + S::kVariables, "as many tensors as the cell has variables");
  const Call<sizeof...(Tensors)> call(op, {&tensors...});
  call.check_dtypes();
  const auto results = allocate_results<kOut>(call);
  Sequences<Cell> p(call, kBefore);
  for (int k = 0; k < kOut; ++k) {
    call.check_result(k, results[k], call.views[0].dtype);
    p.results[kBackward ? p.place(k) : k] = results[k].mutable_data_ptr();
  }
  dispatch(Floating(), op.name(), call.views[0].dtype, [&]<class T>(T) {
    run_steps<kBackward, T>(op.name(), call.views[0], cell, p);
  });
  return returned(results);
}

}  // namespace detail

// The states after each step, contiguous: a tensor, or a tuple of them.
template <class Cell, class... Tensors>
auto recurrence(const Operator& op, const Cell& cell, const Tensors&... tensors) {
  return detail::run_recurrence<false>(op, cell, tensors...);
}

// The gradients of all arguments of forward.
template <class Cell, class... Tensors>
auto recurrence_backward(const Operator& op, const Cell& cell, const Tensors&... tensors) {
  return detail::run_recurrence<true>(op, cell, tensors...);
}

}  // namespace extension_cpp
