"""What the doctor says of torch's symbols agrees with PyTorch's own list of them."""

import re

from torch_abi_audit import torch_versions

from extension_cpp import _doctor


def test_who_has():
    """Every function of the stable shim that came after 2.10, by its release; of the older ones none."""
    versions = torch_versions.stable_shim_versions()
    assert len(versions) > 200
    for name, (major, minor, _) in versions.items():
        # Single operators per backend, for code that torch.compile exports; no stable header calls them.
        if not re.match(r"aoti_torch_(cpu|cuda|mps|xpu)_", name):
            assert _doctor.who_has(name) == (f"{major}.{minor}" if (major, minor) > (2, 10) else None), name
    assert _doctor.who_has("aoti_torch_does_not_exist") is None
