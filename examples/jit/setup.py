"""The same through setuptools: python setup.py build_ext --inplace, then python import_built.py."""

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

from extension_cpp import jit

cuda = torch.version.cuda is not None and CUDA_HOME is not None
flags = ["-std=c++20", "-O3", "-DTORCH_TARGET_VERSION=0x020a000000000000"]  # The stable ABI of torch 2.10.
hidden = "-fvisibility=hidden"  # Each library has its own copy of what the headers define.
extension = (CUDAExtension if cuda else CppExtension)(
    "my_ops",
    ["scale.cpp", str(jit.source_folder() / "common" / "signature.cpp"), *(["scale.cu"] if cuda else [])],
    include_dirs=[str(jit.source_folder())],
    extra_compile_args={"cxx": [*flags, hidden], "nvcc": [*flags, "-Xcompiler", hidden, "-DUSE_CUDA"]},
    py_limited_api=True,
)
setup(
    name="my_ops",
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
