// scale(input, factor) = input * factor, for any strides, in four floating dtypes.
//
// elementwise.h and what it includes are extension_cpp's: they check arguments, allocate the result and run the loop.
#pragma once

#include "elementwise.h"

namespace my_ops {

struct Scale {
  double factor;

  template <class T>
  EXTENSION_CPP_INLINE void operator()(const T (&in)[1], T (&out)[1]) const {
    out[0] = in[0] * static_cast<T>(factor);
  }
};

template <class Device>
extension_cpp::Tensor scale(const extension_cpp::Tensor& input, double factor) {
  const extension_cpp::View view("scale", "input", input);
  extension_cpp::check_floating("scale", view);
  extension_cpp::Loop<2> loop;
  const auto [out] = extension_cpp::allocate_outputs<1, 1>("scale", {view}, loop);
  Device::template run<1, 1>("scale", view, loop, {&out, &input}, Scale{factor});
  return out;
}

}  // namespace my_ops
