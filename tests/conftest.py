"""Hypothesis' settings, and a line that says what is being tested."""

import os

import hypothesis
import pytest
import torch

import extension_cpp

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=10, derandomize=True)

QUICK_DTYPES = (torch.float32, torch.bfloat16)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="every kind of check, but in two dtypes and with few examples")


def pytest_configure(config: pytest.Config) -> None:
    profile = "quick" if config.getoption("quick") else "default"
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", profile))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("quick"):
        return
    kept, left = [], []
    for item in items:
        dtype = item.callspec.params.get("dtype", torch.float32) if hasattr(item, "callspec") else torch.float32
        (left if dtype not in QUICK_DTYPES or item.get_closest_marker("large") else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_report_header() -> str:
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "no GPU"
    return (
        f"extension_cpp {extension_cpp.__version__} from {extension_cpp.__path__[0]}, torch {torch.__version__}, {gpus}"
    )
