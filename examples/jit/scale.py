"""scale(input, factor) with all that follows from a declaration: gradients, torch.compile, torch.func, autocast, backends."""

from pathlib import Path

import torch
from torch import Tensor

from extension_cpp import jit, operator

jit.load(Path(__file__).with_name("scale.cpp"))


def _backward(grad: Tensor, factor: float) -> Tensor:
    return scale(grad, factor)


@operator(name="my_ops::scale", backward=_backward)
def scale(input: Tensor, factor: float) -> Tensor:
    """A tensor of floating dtype times a number, elementwise."""
    return input * factor  # The reference.


if __name__ == "__main__":
    input = torch.arange(6.0).reshape(2, 3).requires_grad_()
    print(scale(input.t(), 0.5).detach())
    print(torch.autograd.grad(scale(input, 0.5).sum(), input)[0])
    print(torch.func.vmap(torch.func.grad(lambda row: scale(row, 0.5).sum()))(input.detach()))
