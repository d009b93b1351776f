"""Hypothesis' settings, and a line that says what is being tested."""

import os

import hypothesis
import pytest
import torch

import extension_cpp

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=10, derandomize=True)


# What is registered for all backends in one place.
TRANSFORMS = ("test_forward_mode", "test_transforms", "test_autocast", "test_dispatch_modes")


def is_quick(item: pytest.Item) -> bool:
    """Whether --quick keeps a test: every kind of check of every operator, but not every dtype and setting."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return (
        params.get("dtype", torch.float32) in (torch.float32, torch.bfloat16)
        # The reference is PyTorch: what is ours there is the registration.
        and (
            params.get("chosen") != "reference"
            or (params.get("dtype") == torch.float32 and item.name.startswith(("test_parity", "test_fake")))
            or item.name.startswith("test_errors")
        )
        and not (item.name.startswith(TRANSFORMS) and params.get("chosen"))
        and "level" not in params
        and params.get("version", 13000) == 13000
        and params.get("damage", "missing") == "missing"
        and item.get_closest_marker("large") is None
        and item.get_closest_marker("slow") is None
        and (item.path.name != "test_doctor.py" or item.get_closest_marker("quick") is not None)
        # One tests the tests; what the other does, the operators' own tests do too.
        and item.path.name not in ("test_contract.py", "test_tutorial.py")
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="every kind of check, but in two dtypes and with few examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: what --quick keeps of test_doctor.py")
    config.addinivalue_line(
        "markers", "slow: seconds for what doesn't depend on how the package was built; not of --quick"
    )
    profile = "quick" if config.getoption("quick") else "default"
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", profile))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        config.hook.pytest_deselected(items=[item for item in items if not is_quick(item)])
        items[:] = filter(is_quick, items)


def pytest_report_header() -> str:
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "no GPU"
    package = extension_cpp
    return f"extension_cpp {package.__version__} from {package.__path__[0]}, torch {torch.__version__}, {gpus}"
