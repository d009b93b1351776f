"""Memory that there isn't: what no device can hold, and storages that were freed."""

import re

import pytest
import torch

import extension_cpp
from extension_cpp.testing import DEVICES

ENTRIES = [extension_cpp.add_one, torch.ops.extension_cpp.add_one, torch.ops.extension_cpp.add_one.default]
HUGE = 2**46


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("device", DEVICES)
def test_out_of_memory(device, entry):
    """What PyTorch raises, in its words, with the operator."""
    t = torch.zeros(1, device=device).expand(HUGE)
    if device == "cpu":
        wanted = rf"(?s)^add_one: .*DefaultCPUAllocator: can't allocate memory: you tried to allocate {4 * HUGE} bytes"
        with pytest.raises(RuntimeError, match=wanted):
            entry(t)
        return
    with pytest.raises(torch.OutOfMemoryError, match=r"^add_one: CUDA out of memory. Tried to allocate "):
        entry(t)
    assert extension_cpp.add_one(torch.ones(3, device=device)).sum() == 6


def test_class_of_the_error():
    """PyTorch's own of CUDA's memory, which kernels on the stable ABI can't raise; any other error as it is."""
    operator = extension_cpp.add_one.operator
    said = "add_one: CUDA out of memory. Tried to allocate 8 bytes"
    error = operator.explain(RuntimeError(said))
    assert type(error) is torch.OutOfMemoryError and str(error) == said
    for error in (RuntimeError("add_one: input must be a tensor, got None"), ValueError("std::bad_alloc")):
        assert operator.explain(error) is error
    error = operator.explain(MemoryError("std::bad_alloc"))
    assert type(error) is MemoryError and str(error) == "add_one: can't allocate memory"


@pytest.mark.parametrize("device", DEVICES)
def test_too_many_bytes(device):
    t = torch.zeros(1, device=device).expand(2**61)
    with pytest.raises(
        RuntimeError, match=re.escape(f"add_one: can't allocate memory: a tensor of shape ({2**61},) has")
    ):
        extension_cpp.add_one(t)


@pytest.mark.parametrize("device", DEVICES)
def test_freed(device):
    """As FSDP frees what it doesn't need: an error and no access to memory that isn't there, wherever the view begins."""
    whole = torch.ones(8, device=device)
    view = whole[3:]
    whole.untyped_storage().resize_(0)
    for t in (whole, view):
        for entry in ENTRIES:
            with pytest.raises(
                RuntimeError, match=r"^add_one: input must have memory, got a tensor whose storage has 0"
            ):
                entry(t)
    a = torch.ones(5, device=device)
    with pytest.raises(RuntimeError, match=r"^mymul: b must have memory"):
        extension_cpp.mymul(a, view)
    whole.untyped_storage().resize_(32)
    assert extension_cpp.add_one(whole.fill_(1)).sum() == 16
