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
// It is no cell of common/recurrence.h: a step needs the neighbours in the state, so that the threads of a row have to
// meet, where those of a cell never do.
//
// The host functions; convrnn.cpp and convrnn.cu compile them for their device.
#pragma once

#include <tuple>

#include "common/loop.h"
#include "common/register.h"

namespace extension_cpp::convrnn {

const Operator kForward(
    "convrnn_forward(Tensor x, Tensor kernel, Tensor hidden) -> Tensor",
    "x: B T H; kernel: 1 1 K as x where 1 <= K <= H; hidden: B H | B 1 H as x -> B T+1 H");
// Without kernel_grad, the gradient of the kernel is an empty tensor.
const Operator kBackward(
    "convrnn_backward(Tensor grad, Tensor y, Tensor kernel, bool kernel_grad=True)"
    " -> (Tensor grad_x, Tensor grad_kernel, Tensor grad_hidden)",
    "grad: B S H where 1 <= S; y: B S H as grad; kernel: 1 1 K as grad where 1 <= K <= H"
    " -> B S-1 H, 1 1 K*kernel_grad, B H");

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

template <size_t N>
Tensor empty_contiguous(const View& like, const std::array<int64_t, N>& sizes) {
  std::array<int64_t, N> strides;
  int64_t step = 1;
  for (size_t d = N; d-- > 0; step = times(step, std::max<int64_t>(sizes[d], 1))) strides[d] = step;
  return empty_strided(like, -1, sizes.data(), strides.data(), N);
}

// Device is OnCpu or OnCuda.

template <class Device>
Tensor convrnn_forward(const Tensor& x, const Tensor& kernel, const Tensor& hidden) {
  const Call<3> call(kForward, {&x, &kernel, &hidden});
  const auto& [view_x, view_kernel, view_hidden] = call.views;
  const Sizes sizes{call["B"], call["T"], call["H"], call["K"]};
  const Tensor y = call.empty();
  if (sizes.batch != 0) Device::forward(sizes, view_x, view_kernel, view_hidden, y);
  return y;
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> convrnn_backward(
    const Tensor& grad, const Tensor& y, const Tensor& kernel, bool kernel_grad) {
  const Call<3> call(kBackward, {&grad, &y, &kernel}, {{"kernel_grad", kernel_grad}});
  const auto& [view_grad, view_y, view_kernel] = call.views;
  const Sizes sizes{call["B"], call["S"] - 1, call["H"], call["K"]};
  const Tensor grad_x = call.empty(0), grad_kernel = call.empty(1), grad_hidden = call.empty(2);
  Device::backward(sizes, view_grad, view_y, view_kernel, grad_x, kernel_grad ? &grad_kernel : nullptr, grad_hidden);
  return {grad_x, grad_kernel, grad_hidden};
}

}  // namespace extension_cpp::convrnn
