// The CUDA kernel.
#include "elementwise.cuh"
#include "scale.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(my_ops, CUDA, m) {
  m.impl("scale", TORCH_BOX(&my_ops::scale<extension_cpp::Cuda>));
}
