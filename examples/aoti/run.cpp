// Runs model.pt2 without Python: ./run model.pt2 cpu _C.abi3.so, and for CUDA: ./run model.pt2 cuda _C.abi3.so _C_cuda.so
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include <dlfcn.h>

#include <ATen/ops/linspace.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s model.pt2 device library...\n", argv[0]);
    return EXIT_FAILURE;
  }
  for (int i = 3; i < argc; ++i) {  // The libraries register their operators as they are loaded.
    if (!dlopen(argv[i], RTLD_NOW)) {
      std::fprintf(stderr, "%s\n", dlerror());
      return EXIT_FAILURE;
    }
  }
  try {
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const at::Tensor x = at::linspace(-1, 1, 32, at::device(at::Device(argv[2]))).view({8, 4});
    for (const at::Tensor& result : model.run({x})) {
      std::ostringstream shape;
      shape << result.sizes();
      std::printf("%s %.4f\n", shape.str().c_str(), result.to(at::kDouble).mean().item<double>());
    }
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return EXIT_FAILURE;
  }
}
