// convrnn_forward: a recurrence over time whose state is convolved with a kernel, h_t = tanh(w * h_{t-1} + x_t), as
// common/convolved.h has it. convrnn_backward: its derivative.
//
// Two numbers: forward moves 8 bytes an element of x in float32 for 2K + 1 operations and a tanh, backward 12 for 4K.
// But a step waits for the one before, so that what counts is how long T dependent steps take.
#include "common/convolved.h"

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

struct Tanh {
  EXTENSION_CPP_INLINE auto operator()(auto z) const { return hyperbolic_tangent(z); }
  EXTENSION_CPP_INLINE auto slope(auto h) const { return (1 - h) * (1 + h); }
};

Tensor convrnn_forward(const Tensor& x, const Tensor& kernel, const Tensor& hidden) {
  return convolved_recurrence(kForward, Tanh{}, x, kernel, hidden);
}

std::tuple<Tensor, Tensor, Tensor> convrnn_backward(
    const Tensor& grad, const Tensor& y, const Tensor& kernel, bool kernel_grad) {
  return convolved_recurrence_backward(kBackward, Tanh{}, grad, y, kernel, kernel_grad);
}

EXTENSION_CPP_REGISTER(m) {
  m.add<&convrnn_forward>(kForward);
  m.add<&convrnn_backward>(kBackward);
}

}  // namespace extension_cpp::convrnn
