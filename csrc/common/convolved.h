// Recurrences over time whose state is convolved, circularly, with a kernel w of K taps, so that a channel sees its
// neighbours:
//   h_0 = hidden,  h_t[n] = f(sum_k w[k] h_{t-1}[(n + k - p) mod H] + x_t[n]),  p = K / 2 rounded down;
// y has h_0 to h_T. Back in time, with d_t for the gradient of what f is taken of, and g_T = 0, for t = T to 1:
//   d_t = (grad_t + g_t) f'_t,  g_{t-1}[m] = sum_k w[k] d_t[(m - k + p) mod H],
//   grad_x_t = d_t,  grad_w[k] = sum_{t,m} d_t[(m - k + p) mod H] h_{t-1}[m],  grad_hidden = g_0 + grad_0.
// An author writes f, and its slope where its value is h, as y is all that backward has:
//
//   struct Tanh {
//     EXTENSION_CPP_INLINE auto operator()(auto z) const { return hyperbolic_tangent(z); }
//     EXTENSION_CPP_INLINE auto slope(auto h) const { return (1 - h) * (1 + h); }
//   };
//
// The tensors of an operator are
//   forward:   x (B, T, H), kernel (1, 1, K), hidden (B, H) or (B, 1, H) -> y (B, T+1, H)
//   backward:  grad and y (B, S, H) with S = T+1, kernel -> grad_x (B, S-1, H), grad_kernel (1, 1, K), which is empty
//              unless kernel_grad says that it is wanted, and grad_hidden (B, H)
// with any strides. h_t and d_t are rounded to the dtype before they are used on: they are what y and grad_x hold, so
// that a sequence that is cut in two goes on where it stopped, bit by bit. All else is in float32, or float64 for
// float64. Sums are in an order that depends on the sizes alone.
//
// The threads of a row have to meet, which those of a cell of recurrence.h never do.
#pragma once

#include <tuple>

#include "functions.h"
#include "loop.h"
#include "register.h"

namespace extension_cpp::convolved {

struct Sizes {
  int64_t batch, steps, width, taps;
};

// Rows of `width` elements by batch and time.
template <class T>
struct Rows {
  EXTENSION_CPP_INLINE T* row(int64_t b, int64_t t) const { return data + b * batch + t * time; }

  T* data;
  int64_t batch, time, along;
};

template <class T>
Rows<const T> rows(const View& t) {
  const int64_t time = t.ndim == 3 ? t.strides[1] : 0;
  return {static_cast<const T*>(t.tensor->const_data_ptr()), t.strides[0], time, t.strides[t.ndim - 1]};
}

}  // namespace extension_cpp::convolved

#if defined(__CUDACC__)
#include "convolved.cuh"
#else
#include "convolved_cpu.h"
#endif

namespace extension_cpp {

template <class F>
Tensor convolved_recurrence(
    const Operator& op, const F& f, const Tensor& x, const Tensor& kernel, const Tensor& hidden) {
  const Call<3> call(op, {&x, &kernel, &hidden});
  const auto& [view_x, view_kernel, view_hidden] = call.views;
  const convolved::Sizes sizes{call["B"], call["T"], call["H"], call["K"]};
  call.check_dtypes();
  const Tensor y = call.empty();
  call.check_result(0, y, view_x.dtype);
  if (sizes.batch != 0) convolved::forward(op.name(), f, sizes, view_x, view_kernel, view_hidden, y);
  return y;
}

// The gradients of x, kernel and hidden.
template <class F>
std::tuple<Tensor, Tensor, Tensor> convolved_recurrence_backward(
    const Operator& op, const F& f, const Tensor& grad, const Tensor& y, const Tensor& kernel, bool kernel_grad) {
  const Call<3> call(op, {&grad, &y, &kernel}, {{"kernel_grad", kernel_grad}});
  const auto& [view_grad, view_y, view_kernel] = call.views;
  const convolved::Sizes sizes{call["B"], call["S"] - 1, call["H"], call["K"]};
  call.check_dtypes();
  const Tensor grad_x = call.empty(0), grad_kernel = call.empty(1), grad_hidden = call.empty(2);
  for (size_t k = 0; const Tensor* grad : {&grad_x, &grad_kernel, &grad_hidden}) {
    call.check_result(k++, *grad, view_grad.dtype);
  }
  convolved::backward(
      op.name(), f, sizes, view_grad, view_y, view_kernel, grad_x, kernel_grad ? &grad_kernel : nullptr, grad_hidden);
  return {grad_x, grad_kernel, grad_hidden};
}

}  // namespace extension_cpp
