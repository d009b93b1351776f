// The muladd operators on CUDA.
#include "muladd.h"

#include <torch/csrc/stable/library.h>

#include "elementwise.cuh"

namespace extension_cpp {

STABLE_TORCH_LIBRARY_IMPL(extension_cpp, CUDA, m) {
  m.impl("mymuladd", TORCH_BOX(&mymuladd<Cuda>));
  m.impl("mymuladd.no_grad", TORCH_BOX(&mymuladd<Cuda>));
  m.impl("mymul", TORCH_BOX(&mymul<Cuda>));
  m.impl("mymul.no_grad", TORCH_BOX(&mymul<Cuda>));
  m.impl("mymul_backward", TORCH_BOX(&mymul_backward<Cuda>));
  m.impl("mymul_backward.no_grad", TORCH_BOX(&mymul_backward<Cuda>));
  m.impl("myadd_out", TORCH_BOX(&myadd_out<Cuda>));
}

}  // namespace extension_cpp
