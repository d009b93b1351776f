// Elementwise operators: a formula of scalars is all that an author writes.
//
//   struct Lerp {
//     double weight;
//     template <class V>
//     EXTENSION_CPP_INLINE V operator()(V a, V b) const { return fused_multiply_add(b - a, static_cast<V>(weight), a);
//     }
//   };
//   Tensor lerp(const Tensor& a, const Tensor& b, double weight) { return elementwise(kLerp, Lerp{weight}, a, b); }
//
// V is float for float16, bfloat16 and float32, and double for float64. Shapes broadcast, strides are any. The same
// file is compiled for the CPU and, included in a .cu file, for CUDA.
#pragma once

#include <cmath>
#include <tuple>

#include "loop.h"
#include "register.h"
#include "signature.h"

#if defined(__CUDACC__)
#include "elementwise.cuh"
#else
#include "elementwise_cpu.h"
#endif

namespace extension_cpp {

// What a formula with several results returns.
template <class V, int N>
struct Values {
  V at[N];
};

// x * y + z, rounded once on every device.
EXTENSION_CPP_INLINE float fused_multiply_add(float x, float y, float z) {
  return fmaf(x, y, z);
}
EXTENSION_CPP_INLINE double fused_multiply_add(double x, double y, double z) {
  return fma(x, y, z);
}

namespace detail {

template <class Result>
constexpr size_t kResults = 1;
template <class V, int N>
constexpr size_t kResults<Values<V, N>> = N;

// A formula as the loops call it: on the inputs' values, for the outputs' values.
template <class Formula, size_t kIn>
struct OnArrays {
  Formula formula;

  template <class V, size_t... I>
  EXTENSION_CPP_INLINE auto call(const V (&in)[kIn], std::index_sequence<I...>) const {
    return formula(in[I]...);
  }

  template <class V, size_t kOut>
  EXTENSION_CPP_INLINE void operator()(const V (&in)[kIn], V (&out)[kOut]) const {
    const auto result = call(in, std::make_index_sequence<kIn>());
    if constexpr (std::is_same_v<decltype(result), const V>) {
      out[0] = result;
    } else {
      for (size_t k = 0; k < kOut; ++k) out[k] = result.at[k];
    }
  }
};

// What an operator returns: its result, or a tuple of several.
template <size_t N>
auto returned(const std::array<Tensor, N>& results) {
  if constexpr (N == 1) {
    return results[0];
  } else {
    return std::tuple_cat(results);
  }
}

// Results are allocated, and written, in the dtype of the inputs: a formula has one type for all.
inline void refuse_other_results(const Operator& op, const View& first) {
  for (const Result& result : op.results) {
    if (result.dtype < 0 || result.dtype == first.dtype) continue;
    const std::string want = dtypes::name(first.dtype), got = dtypes::name(result.dtype);
    fail(
        op.name(), "its signature must give the result of an elementwise formula the dtype of its inputs, ", want,
        ", got ", got);
  }
}

template <class Formula, size_t... I>
constexpr size_t results_of(std::index_sequence<I...>) {
  return kResults<decltype(std::declval<const Formula&>()((static_cast<void>(I), 0.0f)...))>;
}

}  // namespace detail

// One pass over the elements of the inputs, for the results of the formula, which are allocated. Tensors are in the
// order of the operator's signature. Types other than `Floating` are those of dtypes that the signature allows beyond
// these.
template <class Kernels = Floating, class Formula, class... Inputs>
auto elementwise(const Operator& op, const Formula& formula, const Inputs&... inputs) {
  constexpr size_t kIn = sizeof...(Inputs);
  constexpr size_t kOut = detail::results_of<Formula>(std::make_index_sequence<kIn>());
  const Call<kIn> call(op, {&inputs...});
  call.check_dtypes();
  detail::refuse_other_results(op, call.views[0]);
  Loop<kOut + kIn> loop;
  const auto outputs = allocate_outputs<kOut, kIn>(op.name(), call.views, loop);
  [&]<size_t... O>(std::index_sequence<O...>) {
    run_elementwise<Kernels, kOut, kIn>(
        op.name(), call.views[0], loop, {&outputs[O]..., &inputs...}, detail::OnArrays<Formula, kIn>{formula});
  }(std::make_index_sequence<kOut>());
  return detail::returned(outputs);
}

// The same into the last tensor, which the operator writes; the formula takes the others.
template <class Kernels = Floating, class Formula, class... Tensors>
void elementwise_out(const Operator& op, const Formula& formula, const Tensors&... tensors) {
  constexpr size_t kIn = sizeof...(Tensors) - 1;
  const Call<kIn + 1> call(op, {&tensors...});
  call.check_dtypes();
  [&]<size_t... I>(std::index_sequence<I...>) {
    const std::array<const Tensor*, kIn + 1> given{&tensors...};
    Loop<kIn + 1> loop;
    loop_over<kIn + 1>({call.views[kIn], call.views[I]...}, loop);
    run_elementwise<Kernels, 1, kIn>(
        op.name(), call.views[0], loop, {given[kIn], given[I]...}, detail::OnArrays<Formula, kIn>{formula});
  }(std::make_index_sequence<kIn>());
}

// The same into the first tensor, which the operator writes; the formula takes all.
template <class Kernels = Floating, class Formula, class... Tensors>
void elementwise_in_place(const Operator& op, const Formula& formula, const Tensors&... tensors) {
  constexpr size_t kIn = sizeof...(Tensors);
  const Call<kIn> call(op, {&tensors...});
  call.check_dtypes();
  [&]<size_t... I>(std::index_sequence<I...>) {
    const std::array<const Tensor*, kIn> given{&tensors...};
    Loop<kIn + 1> loop;
    loop_over<kIn + 1>({call.views[0], call.views[I]...}, loop);
    run_elementwise<Kernels, 1, kIn>(
        op.name(), call.views[0], loop, {given[0], given[I]...}, detail::OnArrays<Formula, kIn>{formula});
  }(std::make_index_sequence<kIn>());
}

}  // namespace extension_cpp
