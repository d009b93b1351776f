"""Hypothesis' settings, and a line that says what is being tested."""

import os

import hypothesis
import torch

import extension_cpp

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_report_header() -> str:
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "no GPU"
    return (
        f"extension_cpp {extension_cpp.__version__} from {extension_cpp.__path__[0]}, torch {torch.__version__}, {gpus}"
    )
