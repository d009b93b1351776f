"""Every operator on a type of device that is neither CPU nor CUDA. test_backends.py runs it, in a process of its own.

The device is made by other_device.cpp, compiled into the folder that is given.
"""

import importlib
import re
import sys
import types
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import extension_cpp
from extension_cpp.testing import Case, Contract, clone, gradients, map_tensors, run, tensors

HERE = Path(__file__).parent


def make_device(folder: str) -> None:
    flags = ["-O0", "-g0"]
    source = str(HERE / "other_device.cpp")
    cpp_extension.load("other_device", [source], build_directory=folder, is_python_module=False, extra_cflags=flags)
    torch.utils.rename_privateuse1_backend("other")
    module = types.ModuleType("torch.other")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: []
    torch._register_device_module("other", module)


def operators() -> list[Case]:
    modules = [
        importlib.import_module(path.stem) for path in sorted(HERE.glob("test_*.py")) if "Contract" in path.read_text()
    ]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return list({c.op.name: c.op for c in classes if issubclass(c, Contract) and hasattr(c, "op")}.values())


def there(args: tuple) -> tuple:
    return map_tensors(lambda t: clone(t).to("other"), args)


def check_values(op: Case) -> None:
    for dtype in op.dtypes:
        for args in op.samples("cpu", dtype):
            results = run(op, op.function, there(args))
            for got, want in zip(results, run(op, op.reference, map_tensors(clone, args)), strict=True):
                assert got.device.type == "other", op.name
                torch.testing.assert_close(got.cpu(), want, equal_nan=True)


def check_gradients(op: Case) -> None:
    for args in op.samples("cpu", op.precise):
        if sum(t.numel() for t in tensors(args)) <= 100:
            leaves, copies = (
                map_tensors(lambda t: t.detach().requires_grad_(), a) for a in (map_tensors(clone, args), there(args))
            )
            for got, want in zip(gradients(op.function, copies), gradients(op.reference, leaves), strict=True):
                torch.testing.assert_close(got.cpu(), want)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def check_compiled(op: Case) -> None:
    torch._dynamo.reset()
    args = next(iter(op.samples("cpu", op.usual)))
    compiled = torch.compile(op.function, fullgraph=True, backend="aot_eager")
    for got, want in zip(run(op, compiled, there(args)), run(op, op.reference, map_tensors(clone, args)), strict=True):
        torch.testing.assert_close(got.cpu(), want, equal_nan=True)


def check_errors(op: Case) -> None:
    for args, message in op.errors("cpu"):
        args = map_tensors(lambda t: t.detach().to("other").requires_grad_(t.requires_grad), args)
        if "overlap" not in message:  # A copy overlaps nothing.
            with pytest.raises((RuntimeError, TypeError), match=re.escape(message)):
                op.function(*args)
    args = there(next(iter(op.samples("cpu", op.usual))))
    wanted = f"{op.name}: backend must be reference on other, got native"
    with extension_cpp.use_backend("native"), pytest.raises(RuntimeError, match=wanted):
        op.function(*args)


def main() -> None:
    make_device(sys.argv[1])
    found = operators()
    assert {op.name for op in found} >= set(extension_cpp.ops.__all__), "an operator has no contract"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for op in found:
            check_values(op)
            check_errors(op)
            check_compiled(op)
            if op.differentiable:
                check_gradients(op)
    said = Counter(str(w.message) for w in caught if "PyTorch reference" in str(w.message))
    reason = "runs its slower PyTorch reference on other: extension_cpp has no kernel for this device type"
    assert said == {f"{op.name}: {reason}": 1 for op in found}, said
    assert {by_type["other"] for by_type in extension_cpp.backends().values()} == {"reference"}
    print(f"{len(found)} operators")


if __name__ == "__main__":
    main()
