// The schema, and the CPU kernel.
#include "elementwise_cpu.h"
#include "scale.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(my_ops, m) {
  m.def("scale(Tensor input, float factor) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("scale", TORCH_BOX(&my_ops::scale<extension_cpp::Cpu>));
}
