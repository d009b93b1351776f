"""Hypothesis' settings, Triton's interpreter, and a line that says what is being tested."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

# As many processes as there are cores run tests, and each has as many threads: those that wait must not spin, or all of
# them wait for each other. OpenMP reads it once, when PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest
import torch

# Without a GPU Triton's kernels run in its interpreter. Triton and the package must know that when they are imported; the
# processes that tests start are told nothing of it.
BY_DEFAULT = bool(find_spec("triton")) and not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ
if BY_DEFAULT:
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        import triton

        import extension_cpp
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True

import extension_cpp  # noqa: E402
from extension_cpp import _build, _loader  # noqa: E402
from extension_cpp.ops import _backends  # noqa: E402

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=10, derandomize=True)


# What doesn't depend on how and for what the package was built: registration in Python, and what PyTorch makes of it. But for
# the transforms of torch.func, which take a second: other versions of PyTorch ask for other things there.
NOT_OF_A_BUILD = (
    "test_autocast",
    "test_calls_are_right_and_wrong",
    "test_compile_for_any_size",
    "test_compiled",
    "test_compliant",
    "test_deterministic",
    "test_dispatch_modes",
    "test_export",
    "test_fake_kernel",
    "test_flops",
    "test_gradcheck",
    "test_inductor_fuses",
    "test_keeps",
    "test_learns",
    "test_nested",
    "test_non_tensors",
    "test_of_two_selections",
    "test_opcheck",
    "test_profile",
    "test_same_bits_every_time",
    "test_symbolic_numbers",
    "test_user_",
    "test_what_onnx_has_not",
)


def is_quick(item: pytest.Item) -> bool:
    """Whether --quick keeps a test: what a package can get wrong that the checkout has right."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return (
        params.get("dtype", torch.float32) in (torch.float32, torch.bfloat16)
        and not item.name.startswith(NOT_OF_A_BUILD)
        # Where Inductor fuses, it compiles C++, for the first time in an environment for a minute.
        and not (item.name.startswith("test_compile[") and item.cls.op.operator.declared.fused)
        # Its kernels are Python files, which the checkout tests.
        and not (params.get("chosen") == "triton" and params.get("device") == "cpu")
        # The reference is PyTorch: what is ours there is the registration.
        and (params.get("chosen") != "reference" or item.name.startswith(("test_parity", "test_errors")))
        and params.get("version", 13000) == 13000
        and params.get("damage", "missing") == "missing"
        and item.get_closest_marker("large") is None
        and item.get_closest_marker("slow") is None
        and (item.path.name != "test_doctor.py" or item.get_closest_marker("quick") is not None)
        # One tests the tests, two are Python alone, and what the last does, the operators' own tests do too.
        and item.path.name not in ("test_contract.py", "test_opinfo.py", "test_sharding.py", "test_tutorial.py")
    )


def is_of_a_kernel(item: pytest.Item) -> bool:
    """Whether Triton's interpreter, which is slow, runs a test of a kernel by default: what depends on the kernel itself,
    and for other checks than of its values in one dtype. TRITON_INTERPRET=1 in the environment runs all."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if not BY_DEFAULT or (params.get("device"), params.get("chosen")) != ("cpu", "triton"):
        return True
    others = item.name.startswith(("test_layouts", "test_gradients_of_reference"))
    others = others and params["dtype"] == item.cls.op.usual
    return item.name.startswith("test_parity") or others


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="what a package can get wrong: values in two dtypes, with few examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: for what rarely breaks alone; `make test-all` runs it too")
    config.addinivalue_line("markers", "builds: for what builds this repository anew; `make test-builds` runs it")
    config.addinivalue_line("markers", "quick: what --quick keeps of test_doctor.py")
    config.addinivalue_line(
        "markers", "slow: seconds for what doesn't depend on how the package was built; not of --quick"
    )
    profile = "quick" if config.getoption("quick") else "default"
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", profile))


@pytest.hookimpl(tryfirst=True)  # Before -m chooses by markers.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # Each state of an installation takes seconds to make and to look at; further cases of one differ little.
        further = hasattr(item, "callspec") and any(item.callspec.indices.values())
        if item.path.name == "test_doctor.py" and further and item.get_closest_marker("quick") is None:
            item.add_marker("long")
    kept = [item for item in items if is_of_a_kernel(item) and (is_quick(item) or not config.getoption("quick"))]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say that the library was compiled from other sources than those in the checkout."""
    root = Path(__file__).resolve().parents[1]
    record = root / "build" / "compiled.json"
    if not record.exists() or _loader.just_in_time or Path(extension_cpp.__path__[0]).resolve().parent != root:
        return  # A package, or what setup.py didn't compile.
    compiled = json.loads(record.read_text())
    now = _build.contents(root, any(path.endswith(".cu") for path in compiled))
    if changed := {path for path, _ in compiled.items() ^ now.items()}:
        said = f"{', '.join(sorted(changed))} changed since the tested library was compiled: make build"
        terminalreporter.write_line(said, red=True, bold=True)


def pytest_report_header() -> str:
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "no GPU"
    package = extension_cpp
    triton = "run in its interpreter" if _backends.interpreted else _backends.why_no_triton() or "run on the GPU"
    return (
        f"extension_cpp {package.__version__} from {package.__path__[0]}, torch {torch.__version__}, {gpus}\n"
        f"Triton kernels: {triton}"
    )
