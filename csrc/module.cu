// Says in the file itself what _C_cuda was built for, so that extension_cpp/_loader.py can compare it with the driver
// before it loads the library: once loaded, its kernels are registered for good.
#include "launch.cuh"

extern "C" __attribute__((used)) const char extension_cpp_built_for[] =
    "extension_cpp: CUDA " EXTENSION_CPP_TEXT(CUDART_VERSION) ", architectures " EXTENSION_CPP_BUILT_FOR ";";
