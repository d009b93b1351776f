"""Recurrences over time in plain PyTorch: the references of operators that are made with recurrence.h and convolved.h.

A cell takes states, inputs of the step and weights, and returns the new state, or a tuple of them; its channels don't mix. Of
a Dual for each of these it computes its own derivative, as the cell in C++ does. PyTorch's autograd would do that too, but
not inside of a kernel, where a reference may run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["convolved_recurrence", "convolved_recurrence_backward", "recurrence", "recurrence_backward"]

Cell = Callable[..., Any]

# The functions of one argument that dual.h has: the slope where the argument is x and the value y.
SLOPES: dict[Callable, Callable[[Tensor, Tensor], Tensor]] = {
    torch.exp: lambda x, y: y,
    torch.sigmoid: lambda x, y: y * (1 - y),
    torch.tanh: lambda x, y: (1 - y) * (1 + y),
    torch.sqrt: lambda x, y: 0.5 / y,
    torch.relu: lambda x, y: (x > 0).to(x.dtype),
}


def _times(a: Any, b: Any) -> Any:
    """Without an operation for the number 1."""
    return a if isinstance(b, int) and b == 1 else b if isinstance(a, int) and a == 1 else a * b


class Dual:
    """A tensor, and its slopes in the variables that it depends on, each elementwise; its own is the number 1."""

    def __init__(self, value: Tensor, slopes: dict[int, Any]) -> None:
        self.value, self.slopes = value, slopes

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in SLOPES or kwargs:
            names = ", ".join(f"torch.{each.__name__}" for each in SLOPES)
            raise NotImplementedError(f"a cell is made of + - * / and {names}, got {function}")
        (x,) = args
        y = function(x.value)
        return x.chain(y, SLOPES[function](x.value, y))

    def chain(self, value: Tensor, slope: Any, other: Dual | None = None, of_other: Any = None) -> Dual:
        """The function of this, and of another, that has this value and these slopes in both."""
        slopes = {k: _times(s, slope) for k, s in self.slopes.items()}
        for k, s in other.slopes.items() if other else ():
            slopes[k] = slopes[k] + _times(s, of_other) if k in slopes else _times(s, of_other)
        return Dual(value, slopes)

    def __add__(self, other: Any) -> Dual:
        b = other if isinstance(other, Dual) else Dual(other, {})
        return self.chain(self.value + b.value, 1, b, 1)

    def __mul__(self, other: Any) -> Dual:
        b = other if isinstance(other, Dual) else Dual(other, {})
        return self.chain(self.value * b.value, b.value, b, self.value)

    def __truediv__(self, other: Any) -> Dual:
        b = other if isinstance(other, Dual) else Dual(other, {})
        value = self.value / b.value
        return self.chain(value, 1 / b.value, b, -value / b.value)

    def __rtruediv__(self, other: Any) -> Dual:
        value = other / self.value
        return self.chain(value, -value / self.value)

    def __neg__(self) -> Dual:
        return self.chain(-self.value, -1)

    def __sub__(self, other: Any) -> Dual:
        b = other if isinstance(other, Dual) else Dual(other, {})
        return self.chain(self.value - b.value, 1, b, -1)

    def __rsub__(self, other: Any) -> Dual:
        return self.chain(other - self.value, -1)

    __radd__, __rmul__ = __add__, __mul__


def _states(returned: Any) -> tuple:
    return returned if isinstance(returned, tuple) else (returned,)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _widen(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [*map(_wide, tensors)]


def _stack(steps: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(steps, 1) if steps else like.clone(memory_format=torch.contiguous_format)


def recurrence(
    cell: Cell, inputs: Sequence[Tensor], weights: Sequence[Tensor], initial: Sequence[Tensor]
) -> list[Tensor]:
    """The states after each step, (B, T, H), of inputs (B, T, H), weights (H,) and initial states (B, H).

    A state is rounded to its dtype before it is used on.
    """
    steps: list[list[Tensor]] = [[] for _ in initial]
    wide, states = _widen(weights), list(initial)
    for at_step in zip(*(x.unbind(1) for x in _widen(inputs))):
        after = _states(cell(*_widen(states), *at_step, *wide))
        states = [new.to(state.dtype) for new, state in zip(after, states)]
        for each, state in zip(steps, states):
            each.append(state)
    return [_stack(each, inputs[0]) for each in steps]


def recurrence_backward(
    cell: Cell,
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    initial: Sequence[Tensor],
) -> list[Tensor]:
    """The gradients of inputs, weights and initial states for those of the results of `recurrence`."""
    before = [torch.cat([state[:, None], y], 1)[:, :-1] for state, y in zip(initial, results)]
    variables = _widen([*before, *inputs, *(w.expand_as(inputs[0]) for w in weights)])
    after = _states(cell(*(Dual(t, {k: 1}) for k, t in enumerate(variables))))
    slopes = [[each.slopes.get(k, 0) for k in range(len(variables))] for each in after]
    slopes = [[s if isinstance(s, Tensor) else torch.full_like(variables[0], s) for s in each] for each in slopes]

    carried = [torch.zeros_like(s) for s in _widen(initial)]
    totals: list[list[Tensor]] = [[] for _ in initial]
    for t in range(inputs[0].shape[1] - 1, -1, -1):
        now = [grad[:, t] + later for grad, later in zip(_widen(grads), carried)]
        carried = [sum(total * slope[k][:, t] for total, slope in zip(now, slopes)) for k in range(len(initial))]
        for each, total in zip(totals, now):
            each.append(total)
    every = [_stack(each[::-1], grad) for each, grad in zip(totals, _widen(grads))]
    gradients = [
        sum(total * slope[k] for total, slope in zip(every, slopes)) for k in range(len(initial), len(variables))
    ]
    of_weights = [g.sum((0, 1)) for g in gradients[len(inputs) :]]
    return [g.to(inputs[0].dtype).contiguous() for g in (*gradients[: len(inputs)], *of_weights, *carried)]


def convolved(h: Tensor, kernel: Tensor) -> Tensor:
    """The sum over k of kernel[k] * h[(n + k - p) mod H], of rows (B, H), with p = K // 2."""
    size, taps = h.shape[1], kernel.shape[2]
    p = taps // 2
    # Not a convolution of PyTorch's, which on CUDA rounds float32 to TF32.
    return torch.cat([h[:, size - p :], h, h[:, : taps - 1 - p]], 1).unfold(1, taps, 1) @ kernel.flatten()


def _spread(d: Tensor, kernel: Tensor) -> Tensor:
    """The sum over k of kernel[k] * d[(m - k + p) mod H], of rows (B, H): the transpose of `convolved`."""
    size, taps = d.shape[1], kernel.shape[2]
    p = taps - 1 - taps // 2
    return torch.cat([d[:, size - p :], d, d[:, : taps - 1 - p]], 1).unfold(1, taps, 1) @ kernel.flatten().flip(0)


def _correlated(d: Tensor, h: Tensor, taps: int) -> Tensor:
    """The sums over all else of d[n] * h[(n + k - p) mod H], for each k, of states (B, T, H)."""
    size, p = h.shape[2], taps // 2
    wide = torch.cat([h[:, :, size - p :], h, h[:, :, : taps - 1 - p]], 2)
    return torch.stack([(d * wide[:, :, k : k + size]).sum() for k in range(taps)]).view(1, 1, taps)


def convolved_recurrence(function: Callable[[Tensor], Tensor], x: Tensor, kernel: Tensor, hidden: Tensor) -> Tensor:
    """The states from `hidden` on, (B, T + 1, H): a step takes the function of the last state, convolved with the kernel, and
    of what x (B, T, H) adds to it."""
    states, weights = [hidden.reshape(x.shape[0], x.shape[2])], _wide(kernel)
    for x_t in x.unbind(1):
        states.append(function(convolved(_wide(states[-1]), weights) + x_t).to(x.dtype))
    return torch.stack(states, 1)


def convolved_recurrence_backward(
    slope: Callable[[Tensor], Tensor], grad: Tensor, y: Tensor, kernel: Tensor, kernel_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, kernel (empty without `kernel_grad`) and hidden for that of the states y.

    `slope` is that of the function where its value is y.
    """
    wide, states, w = _widen([grad, y, kernel])
    from_later = torch.zeros_like(wide[:, 0])
    deltas = []
    for t in range(grad.shape[1] - 1, 0, -1):
        delta = (wide[:, t] + from_later) * slope(states[:, t])
        deltas.append(delta.to(grad.dtype))
        from_later = _spread(_wide(deltas[-1]), w)
    grad_x = _stack(deltas[::-1], grad[:, 1:])
    grad_kernel = kernel.new_empty(1, 1, 0)
    if kernel_grad:
        grad_kernel = _correlated(_wide(grad_x), states[:, :-1], kernel.shape[2]).to(grad.dtype)
    return grad_x, grad_kernel, (wide[:, 0] + from_later).to(grad.dtype).contiguous()
