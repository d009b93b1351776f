// diagonal_lstm: an LSTM whose states feed back into their own channel alone, as in IndRNN:
//   i, f, o = sigmoid(x_i + w_i h), sigmoid(x_f + w_f h), sigmoid(x_o + w_o h),  g = tanh(x_g + w_g h)
//   c = f c + i g,  h = o tanh(c)
// The products with matrices are done for all steps at once: they are x_i, x_f, x_g and x_o.
//
// Two numbers: on float32 forward moves 24 bytes an element for some 100 operations, backward 48 for 300. But a step
// waits for the one before.
#define EXTENSION_CPP_NAMESPACE my_ops
#include "common/recurrence.h"

namespace my_ops {

using namespace extension_cpp;

const Operator kForward(
    "diagonal_lstm(Tensor x_i, Tensor x_f, Tensor x_g, Tensor x_o, Tensor w_i, Tensor w_f, Tensor w_g, Tensor w_o,"
    " Tensor h, Tensor c) -> (Tensor, Tensor)",
    "x_i: B T H; x_f: B T H as x_i; x_g: B T H as x_i; x_o: B T H as x_i; w_i: H as x_i; w_f: H as x_i;"
    " w_g: H as x_i; w_o: H as x_i; h: B H as x_i; c: B H as x_i -> B T H, B T H");
const Operator kBackward(
    "diagonal_lstm_backward(Tensor grad_h, Tensor grad_c, Tensor y_h, Tensor y_c, Tensor x_i, Tensor x_f, Tensor x_g,"
    " Tensor x_o, Tensor w_i, Tensor w_f, Tensor w_g, Tensor w_o, Tensor h, Tensor c)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "grad_h: B T H; grad_c: B T H as grad_h; y_h: B T H as grad_h; y_c: B T H as grad_h; x_i: B T H as grad_h;"
    " x_f: B T H as grad_h; x_g: B T H as grad_h; x_o: B T H as grad_h; w_i: H as grad_h; w_f: H as grad_h;"
    " w_g: H as grad_h; w_o: H as grad_h; h: B H as grad_h; c: B H as grad_h"
    " -> B T H, B T H, B T H, B T H, H, H, H, H, B H, B H");

struct Cell {
  static constexpr int kStates = 2, kInputs = 4, kWeights = 4;

  // Not of `auto` parameters, of which nvcc 13.0 takes no more than nine.
  template <class H, class C, class XI, class XF, class XG, class XO, class WI, class WF, class WG, class WO>
  EXTENSION_CPP_INLINE auto operator()(H h, C c, XI x_i, XF x_f, XG x_g, XO x_o, WI w_i, WF w_f, WG w_g, WO w_o) const {
    const auto i = sigmoid(x_i + w_i * h);
    const auto f = sigmoid(x_f + w_f * h);
    const auto g = hyperbolic_tangent(x_g + w_g * h);
    const auto o = sigmoid(x_o + w_o * h);
    const auto next = f * c + i * g;
    return states(o * hyperbolic_tangent(next), next);
  }
};

using Ten = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

std::tuple<Tensor, Tensor> diagonal_lstm(
    const Tensor& x_i, const Tensor& x_f, const Tensor& x_g, const Tensor& x_o, const Tensor& w_i, const Tensor& w_f,
    const Tensor& w_g, const Tensor& w_o, const Tensor& h, const Tensor& c) {
  return recurrence(kForward, Cell{}, x_i, x_f, x_g, x_o, w_i, w_f, w_g, w_o, h, c);
}

Ten diagonal_lstm_backward(
    const Tensor& grad_h, const Tensor& grad_c, const Tensor& y_h, const Tensor& y_c, const Tensor& x_i,
    const Tensor& x_f, const Tensor& x_g, const Tensor& x_o, const Tensor& w_i, const Tensor& w_f, const Tensor& w_g,
    const Tensor& w_o, const Tensor& h, const Tensor& c) {
  return recurrence_backward(kBackward, Cell{}, grad_h, grad_c, y_h, y_c, x_i, x_f, x_g, x_o, w_i, w_f, w_g, w_o, h, c);
}

EXTENSION_CPP_REGISTER(m) {
  m.add<&diagonal_lstm>(kForward);
  m.add<&diagonal_lstm_backward>(kBackward);
}

}  // namespace my_ops
