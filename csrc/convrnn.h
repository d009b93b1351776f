// convrnn_forward: a recurrence over time whose state is convolved, circularly, with a kernel w of K taps:
//   h_0 = hidden,  h_t[n] = tanh(sum_k w[k] h_{t-1}[(n + k - p) mod H] + x_t[n]),  p = K / 2 rounded down;
// y has h_0 to h_T. convrnn_backward: with d_t for the gradient of what tanh is taken of, and g_T = 0, for t = T to 1:
//   d_t = (grad_t + g_t) (1 - h_t^2),  g_{t-1}[m] = sum_k w[k] d_t[(m - k + p) mod H],
//   grad_x_t = d_t,  grad_w[k] = sum_{t,m} d_t[(m - k + p) mod H] h_{t-1}[m],  grad_hidden = g_0 + grad_0.
//
// Two numbers: forward moves 8 bytes an element of x in float32 for 2K + 1 operations and a tanh, backward 12 for 4K.
// But a step waits for the one before, so that what counts is how long T dependent steps take.
//
// h_t and d_t are rounded to the dtype before they are used on: they are what y and grad_x hold, so that a sequence
// that is cut in two goes on where it stopped, bit by bit, and y is all that backward needs. Sums are in float32 for
// halves.
//
// The checks and the host functions; convrnn.cpp and convrnn.cu compile them for their device.
#pragma once

#include <array>
#include <tuple>

#include "elementwise.h"

namespace extension_cpp {

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

inline int64_t check_kernel(const char* op, const View& kernel, const View& like, int64_t width) {
  check_same(op, kernel, like);
  if (kernel.ndim != 3 || kernel.sizes[0] != 1 || kernel.sizes[1] != 1) {
    fail(op, "kernel must have shape (1, 1, K), got ", tuple(kernel.sizes));
  }
  const int64_t taps = kernel.sizes[2];
  if (taps < 1 || taps > width) fail(op, "kernel must have 1 to H elements, got K = ", taps, " and H = ", width);
  return taps;
}

inline Sizes check_inputs(const char* op, const View& x, const View& kernel, const View& hidden) {
  check_floating(op, x);
  if (x.ndim != 3) fail(op, "x must have shape (B, T, H), got ", tuple(x.sizes));
  const int64_t batch = x.sizes[0], width = x.sizes[2], taps = check_kernel(op, kernel, x, width);
  check_same(op, hidden, x);
  const std::array<int64_t, 2> flat{batch, width};
  const std::array<int64_t, 3> deep{batch, 1, width};
  if (!std::ranges::equal(hidden.sizes, flat) && !std::ranges::equal(hidden.sizes, deep)) {
    fail(op, "hidden must have shape ", tuple(flat), " or ", tuple(deep), ", got ", tuple(hidden.sizes));
  }
  return {batch, x.sizes[1], width, taps};
}

inline Sizes check_backward(const char* op, const View& grad, const View& y, const View& kernel) {
  check_floating(op, grad);
  if (grad.ndim != 3 || grad.sizes[1] < 1) fail(op, "grad must have shape (B, T + 1, H), got ", tuple(grad.sizes));
  check_same(op, y, grad);
  if (!y.same_sizes(grad)) fail(op, "y must have the shape of grad, ", tuple(grad.sizes), ", got ", tuple(y.sizes));
  const int64_t width = grad.sizes[2], taps = check_kernel(op, kernel, grad, width);
  return {grad.sizes[0], grad.sizes[1] - 1, width, taps};
}

template <size_t N>
Tensor empty_contiguous(const View& like, const std::array<int64_t, N>& sizes) {
  std::array<int64_t, N> strides;
  int64_t step = 1;
  for (size_t d = N; d-- > 0; step *= std::max<int64_t>(sizes[d], 1)) strides[d] = step;
  return empty_strided_like(like, sizes.data(), strides.data(), N);
}

// The operators, for Device = OnCpu or OnCuda.

template <class Device>
Tensor convrnn_forward(const Tensor& x, const Tensor& kernel, const Tensor& hidden) {
  constexpr const char* op = "convrnn_forward";
  const View view_x(op, "x", x), view_kernel(op, "kernel", kernel), view_hidden(op, "hidden", hidden);
  const Sizes sizes = check_inputs(op, view_x, view_kernel, view_hidden);
  const Tensor y = empty_contiguous<3>(view_x, {sizes.batch, sizes.steps + 1, sizes.width});
  if (sizes.batch != 0) Device::forward(op, sizes, view_x, view_kernel, view_hidden, y);
  return y;
}

// Without kernel_grad, the gradient of the kernel is an empty tensor.
template <class Device>
std::tuple<Tensor, Tensor, Tensor> convrnn_backward(
    const Tensor& grad, const Tensor& y, const Tensor& kernel, bool kernel_grad) {
  constexpr const char* op = "convrnn_backward";
  const View view_grad(op, "grad", grad), view_y(op, "y", y), view_kernel(op, "kernel", kernel);
  const Sizes sizes = check_backward(op, view_grad, view_y, view_kernel);
  const Tensor grad_x = empty_contiguous<3>(view_grad, {sizes.batch, sizes.steps, sizes.width});
  const Tensor grad_kernel = empty_contiguous<3>(view_grad, {1, 1, kernel_grad ? sizes.taps : 0});
  const Tensor grad_hidden = empty_contiguous<2>(view_grad, {sizes.batch, sizes.width});
  Device::backward(
      op, sizes, view_grad, view_y, view_kernel, grad_x, kernel_grad ? &grad_kernel : nullptr, grad_hidden);
  return {grad_x, grad_kernel, grad_hidden};
}

}  // namespace extension_cpp
