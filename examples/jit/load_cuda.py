"""A .cpp and a .cu file, compiled just in time. Under a torch without CUDA the .cu file is left out."""

from pathlib import Path

import torch

from extension_cpp import jit

jit.load(*(Path(__file__).with_name(name) for name in ("scale.cpp", "scale.cu")))

input = torch.arange(6.0, device="cuda" if torch.cuda.is_available() else "cpu").reshape(2, 3)
print(torch.ops.my_ops.scale(input.t(), 0.5))
kernels = [key for key in ("CPU", "CUDA") if torch._C._dispatch_has_kernel_for_dispatch_key("my_ops::scale", key)]
print(f"kernels for {' and '.join(kernels)}")
