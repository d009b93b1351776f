"""`make tune`: finds the fastest configuration of each Triton kernel that is compiled with the package, on this GPU.

Writes extension_cpp/triton/tuned.json, from which the next build takes it: by architecture, operator, dtype and
size, where it is faster than the default by more than the times of one and the same configuration differ.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.testing import do_bench_cudagraph

import extension_cpp  # noqa: F401
from extension_cpp.ops import _backends
from extension_cpp.triton import _ahead
from extension_cpp.triton.elementwise import CONFIGS, Kernel

ELEMENTS = {"few": 2**17, "many": 2**26}
WORTH = 1.05
ROUNDS = 5


def times(kernel: Kernel, dtype: torch.dtype, n: int) -> dict[tuple[int, int], float]:
    """Milliseconds of a launch on contiguous tensors, the best of rounds in which configurations take turns."""
    tensors = [torch.randn(n, device="cuda").to(dtype) for _ in range(kernel.results + len(kernel.inputs_at))]
    numbers = [0] * (2 * len(kernel.numbers_at))
    arguments = (*tensors, *numbers, 0, n, 1, 1, *(1, 0, 0) * len(kernel.inputs_at))

    def launch(block: int, warps: int) -> None:
        constants: dict[str, Any] = {"DIMS": 1, "MANY": False, "WIDE": False, "BLOCK": block}
        kernel.plain[(triton.cdiv(n, block),)](*arguments, **constants, num_warps=warps)

    found: dict[tuple[int, int], float] = {}
    for _ in range(ROUNDS):
        for config in CONFIGS:
            at = config.kwargs["BLOCK"], config.num_warps
            took = do_bench_cudagraph(lambda at=at: launch(*at), rep=5, return_mode="min")
            found[at] = min(took, found.get(at, took))
    return found


def main() -> None:
    architecture = "{}.{}".format(*torch.cuda.get_device_capability())
    tuned = json.loads(_ahead.TUNED.read_text()) if _ahead.TUNED.exists() else {}
    default = tuple(_ahead.DEFAULT.values())
    of_gpu: dict[str, Any] = {}
    for name, operator in sorted(_backends.operators.items()):
        for kernel in _ahead.kernels_of(operator)[:1]:
            for dtype in operator.signature.arguments[0].dtypes:
                for size, n in ELEMENTS.items():
                    found = times(kernel, dtype, n)
                    best = min(found, key=found.__getitem__)
                    print(name, _ahead.name_of(dtype), size, *(f"{at}: {1e3 * t:.2f} us" for at, t in found.items()))
                    if found[default] > WORTH * found[best]:
                        chosen = dict(zip(_ahead.DEFAULT, best))
                        of_gpu.setdefault(name, {}).setdefault(_ahead.name_of(dtype), {})[size] = chosen
    tuned = {**tuned, architecture: of_gpu}
    _ahead.TUNED.write_text(json.dumps(tuned, indent=1, sort_keys=True) + "\n")
    print(f"wrote {_ahead.TUNED}")


if __name__ == "__main__":
    main()
