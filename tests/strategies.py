"""What the tests of several families draw their arguments with, and what they need of the machine."""

import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def strided_tensor(draw, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values of every kind, in a view with permuted dimensions, steps, an offset and broadcast dimensions."""
    special = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")]
    info = torch.finfo(dtype)
    special += [info.max, info.min, info.tiny, info.smallest_normal / 4, 1 + info.eps]
    order = draw(st.permutations(range(len(shape))))
    steps = draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=len(shape), max_size=len(shape)))
    expanded = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 3))
    stored = [1 if expanded[d] else shape[d] * steps[d] for d in order]
    numel = offset + int(torch.tensor(stored).prod()) if stored else offset + 1
    seed = draw(st.integers(0, 2**31))
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    for i, value in enumerate(draw(st.lists(st.sampled_from(special), max_size=8))):
        if numel:
            values[(seed + 7 * i) % numel] = value
    base = values[offset:].reshape(stored)
    view = base.permute([list(order).index(d) for d in range(len(shape))])
    view = view[tuple(slice(None, None, 1 if expanded[d] else steps[d]) for d in range(len(shape)))]
    return view.expand(shape)


def available_memory() -> float:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
