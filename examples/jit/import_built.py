"""Loads what setup.py has built, and calls it."""

from pathlib import Path

import torch

torch.ops.load_library(Path(__file__).with_name("my_ops.so"))

input = torch.arange(6.0, device="cuda" if torch.cuda.is_available() else "cpu").reshape(2, 3)
print(torch.ops.my_ops.scale(input.t(), 0.5))
