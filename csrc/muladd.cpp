// The schemas of the muladd operators, and their CPU kernels.
#include "muladd.h"

#include <torch/csrc/stable/library.h>

#include "elementwise_cpu.h"

namespace extension_cpp {

// <op>.no_grad is the same kernel without the autograd formula that Python registers for <op>: entering that costs more
// than a small call takes, and extension_cpp/ops/_dispatch.py goes past it where nothing requires a gradient.
STABLE_TORCH_LIBRARY_FRAGMENT(extension_cpp, m) {
  m.def("mymuladd(Tensor a, Tensor b, float c) -> Tensor");
  m.def("mymuladd.no_grad(Tensor a, Tensor b, float c) -> Tensor");
  m.def("mymul(Tensor a, Tensor b) -> Tensor");
  m.def("mymul.no_grad(Tensor a, Tensor b) -> Tensor");
  m.def("mymul_backward(Tensor grad, Tensor a, Tensor b) -> (Tensor grad_a, Tensor grad_b)");
  m.def("mymul_backward.no_grad(Tensor grad, Tensor a, Tensor b) -> (Tensor grad_a, Tensor grad_b)");
  m.def("myadd_out(Tensor a, Tensor b, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(extension_cpp, CPU, m) {
  m.impl("mymuladd", TORCH_BOX(&mymuladd<Cpu>));
  m.impl("mymuladd.no_grad", TORCH_BOX(&mymuladd<Cpu>));
  m.impl("mymul", TORCH_BOX(&mymul<Cpu>));
  m.impl("mymul.no_grad", TORCH_BOX(&mymul<Cpu>));
  m.impl("mymul_backward", TORCH_BOX(&mymul_backward<Cpu>));
  m.impl("mymul_backward.no_grad", TORCH_BOX(&mymul_backward<Cpu>));
  m.impl("myadd_out", TORCH_BOX(&myadd_out<Cpu>));
}

}  // namespace extension_cpp
