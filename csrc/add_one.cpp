// add_one: input + 1;  my_op: input * scalar_arg.
//
// Two numbers: on float32 both move 8 bytes an element for 1 operation, and are bound by memory. On CUDA they are
// Triton's (extension_cpp/triton/add_one.py), so there is no add_one.cu.
#include "common/elementwise.h"

namespace extension_cpp::add_one {

const Operator kAddOne("add_one(Tensor input) -> Tensor", "input: ... -> ...");
const Operator kMyOp("my_op(Tensor input, float scalar_arg) -> Tensor", "input: ... -> ...");

struct AddOne {
  template <class V>
  EXTENSION_CPP_INLINE V operator()(V input) const {
    return input + 1;
  }
};

struct Scale {
  double scalar;

  template <class V>
  EXTENSION_CPP_INLINE V operator()(V input) const {
    return input * static_cast<V>(scalar);
  }
};

Tensor add_one(const Tensor& input) {
  return elementwise(kAddOne, AddOne{}, input);
}

Tensor my_op(const Tensor& input, double scalar_arg) {
  return elementwise(kMyOp, Scale{scalar_arg}, input);
}

EXTENSION_CPP_REGISTER(m) {
  m.add<&add_one>(kAddOne);
  m.add<&my_op>(kMyOp);
}

}  // namespace extension_cpp::add_one
