"""Every operator in ONNX, computed by onnxruntime."""

import sys
from pathlib import Path

import pytest
import torch

import extension_cpp
from extension_cpp.testing import clone, compare, contracts, map_tensors, run, tensors

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS))


def test_onnx(tmp_path):
    """The results of the references, of all operators in one program."""
    cases = [contract.op for contract in contracts(TESTS)]
    samples = [contract.smallest(contract.small_samples("cpu", contract.op.usual), 2) for contract in contracts(TESTS)]

    class Model(torch.nn.Module):
        def forward(self, samples: list) -> list[list[torch.Tensor]]:
            return [run(op, op.function, map_tensors(torch.clone, args)) for op, args in zip(cases, samples)]

    program = torch.export.export(Model(), (samples,), strict=False)
    program = program.run_decompositions(extension_cpp.decompositions())
    translations = extension_cpp.onnx_translations()
    onnx = torch.onnx.export(program, custom_translation_table=translations, verbose=False)
    onnx.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    given = {value.name: t.numpy() for value, t in zip(session.get_inputs(), tensors(samples), strict=True)}
    want = [run(op, op.reference, map_tensors(clone, args)) for op, args in zip(cases, samples)]
    compare([torch.from_numpy(t) for t in session.run(None, given)], want, "onnxruntime")
