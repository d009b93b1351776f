"""What the doctor says agrees with what others say: PyTorch of its symbols, the README of the doctor."""

import re
from pathlib import Path

import pytest

from extension_cpp._machine import Gpu
from extension_cpp.doctor import findings, fixes, libraries, report
from extension_cpp.doctor.facts import Facts
from extension_cpp.doctor.libraries import Library
from extension_cpp.doctor.origin import Origin

ROOT = Path(__file__).parents[2]


def test_first_release():
    """Every function of the stable shim that came after 2.10, by its release; of the older ones none."""
    versions = pytest.importorskip(
        "torch_abi_audit.torch_versions", reason="it needs Python 3.11"
    ).stable_shim_versions()
    assert len(versions) > 200
    for name, (major, minor, _) in versions.items():
        # Single operators per backend, for code that torch.compile exports; no stable header calls them.
        if not re.match(r"aoti_torch_(cpu|cuda|mps|xpu)_", name):
            assert libraries.first_release(name) == (f"{major}.{minor}" if (major, minor) > (2, 10) else None), name
    assert libraries.first_release("aoti_torch_does_not_exist") is None


def test_readme(capsys, monkeypatch):
    """The sample, for a machine of which these are the facts."""
    package = Path("/opt/env/lib/python3.11/site-packages/extension_cpp")
    monkeypatch.setattr(fixes.shutil, "which", lambda name: None)
    facts = Facts(
        package=package,
        prefix=Path("/opt/env"),
        platform="Linux x86_64",
        libraries=[Library(package / "_C.abi3.so", platform="Linux x86_64")],
        origin=Origin("conda", "", "conda-forge"),
        torch=None,
        driver=13000,
        gpus=[Gpu("NVIDIA H200", (9, 0))],
        conda=True,
    )
    report.doctor(facts, [finding for finding in findings.diagnose(facts) if finding.name != "no-torch"])
    sample = (ROOT / "README.md").read_text().split("<!-- the doctor's words are tested -->\n```\n")[1].split("```")[0]
    assert capsys.readouterr().out.strip() == sample.strip()
