// add_one: input + 1;  my_op: input * scalar_arg. Their schemas, and their CPU kernels.
//
// Two numbers: on float32 both move 8 bytes an element for 1 operation, and are bound by memory. On CUDA they are
// Triton's (extension_cpp/triton/add_one.py), so there is no add_one.cu.
#include <torch/csrc/stable/library.h>

#include "elementwise_cpu.h"

namespace extension_cpp {

namespace {

struct AddOne {
  template <class V>
  void operator()(const V (&in)[1], V (&out)[1]) const {
    out[0] = in[0] + 1;
  }
};

struct Scale {
  double scalar;
  template <class V>
  void operator()(const V (&in)[1], V (&out)[1]) const {
    out[0] = in[0] * static_cast<V>(scalar);
  }
};

template <class Op>
Tensor unary(const char* name, const Tensor& input, const Op& op) {
  const View view(name, "input", input);
  check_floating(name, view);
  Loop<2> loop;
  const auto [out] = allocate_outputs<1, 1>(name, {view}, loop);
  Cpu::run<1, 1>(name, view, loop, {&out, &input}, op);
  return out;
}

Tensor add_one(const Tensor& input) {
  return unary("add_one", input, AddOne{});
}

Tensor my_op(const Tensor& input, double scalar_arg) {
  return unary("my_op", input, Scale{scalar_arg});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(extension_cpp, m) {
  m.def("add_one(Tensor input) -> Tensor");
  m.def("add_one.no_grad(Tensor input) -> Tensor");
  m.def("my_op(Tensor input, float scalar_arg) -> Tensor");
  m.def("my_op.no_grad(Tensor input, float scalar_arg) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(extension_cpp, CPU, m) {
  m.impl("add_one", TORCH_BOX(&add_one));
  m.impl("add_one.no_grad", TORCH_BOX(&add_one));
  m.impl("my_op", TORCH_BOX(&my_op));
  m.impl("my_op.no_grad", TORCH_BOX(&my_op));
}

}  // namespace extension_cpp
