// scale(input, factor) = input * factor, for any strides, in four floating dtypes: the schema, and the CPU kernel.
//
// What is included is extension_cpp's: it checks arguments, allocates the result and runs the loop.
#define EXTENSION_CPP_NAMESPACE my_ops
#include "common/elementwise.h"

namespace my_ops {

const extension_cpp::Operator kScale("scale(Tensor input, float factor) -> Tensor", "input: ... -> ...");

struct Scale {
  double factor;

  template <class V>
  EXTENSION_CPP_INLINE V operator()(V input) const {
    return input * static_cast<V>(factor);
  }
};

extension_cpp::Tensor scale(const extension_cpp::Tensor& input, double factor) {
  return extension_cpp::elementwise(kScale, Scale{factor}, input);
}

EXTENSION_CPP_REGISTER(m) {
  m.add<&scale>(kScale);
}

}  // namespace my_ops
