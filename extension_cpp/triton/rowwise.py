"""What row-wise kernels in Triton share: their rows, memory for sums over them, and the launch."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from extension_cpp.ops import _backends

MOST_SUMS = 1024
"""Programs that each add up some of the rows."""


class Rows:
    """The rows of a tensor (..., N): dense, and as far apart from each other as the argument's own where that is possible.

    Triton compiles a kernel for aligned rows and another for those that aren't, which add up in another order. So that the
    length of the rows alone decides which, a tensor of the other kind is copied.
    """

    def __init__(self, t: Tensor) -> None:
        self.size = t.shape[-1]
        self.count = t.shape[:-1].numel()
        dense = (self.size <= 1 or t.stride(-1) == 1) and (t.dim() <= 2 or t.is_contiguous())
        apart = t.stride(0) if t.dim() == 2 else self.size
        aligned = apart % 16 == 0 and t.storage_offset() * t.element_size() % 16 == 0
        self.data = t if dense and aligned == (self.size % 16 == 0) else t.clone(memory_format=torch.contiguous_format)
        self.apart = self.data.stride(0) if t.dim() == 2 else self.size

    def sums(self) -> tuple[int, Tensor]:
        """How many rows a program adds up, and memory for the programs' sums, a row each, in the type of the computation.

        The sum of these is the same on every run, as it would not be if programs added to the same memory.
        """
        of_program = max(1, triton.cdiv(self.count, MOST_SUMS))
        dtype = torch.promote_types(self.data.dtype, torch.float32)
        return of_program, self.data.new_empty((triton.cdiv(self.count, of_program), self.size), dtype=dtype)


def aligned(t: Tensor) -> Tensor:
    """An argument that all rows read, as a weight: dense and aligned, as how it is read decides too in which order rows are
    added up."""
    ready = t.is_contiguous() and t.storage_offset() * t.element_size() % 16 == 0
    return t if ready else t.clone(memory_format=torch.contiguous_format)


def launch(kernel: Any, programs: int, size: int, *arguments: Any) -> None:
    """Start so many programs of a kernel that has whole rows of `size` elements in its block."""
    block = triton.next_power_of_2(max(size, 1))
    if block > 2**20:
        _backends.fail(kernel.__name__.strip("_"), f"Triton's blocks have at most 1048576 elements, got rows of {size}")
    if programs == 0:
        return
    constants = {"BLOCK": block, "num_warps": min(32, max(1, block // 256))}
    first = arguments[0]
    if type(first) is not Tensor:
        wrap_triton(kernel)[(programs,)](*arguments, **constants)
    elif first.device.type == "cpu":
        kernel[(programs,)](*arguments, **constants)
    else:
        with torch.cuda.device_of(first):  # Triton launches on the current device.
            kernel[(programs,)](*arguments, **constants)
