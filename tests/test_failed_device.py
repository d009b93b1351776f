"""A GPU on which another kernel has failed: CUDA takes no more work of the process, and each operator says so."""

import pytest
import torch
from processes import python

CODE = """
import torch, extension_cpp

def tensors(*shapes):
    return [torch.ones(shape, device="cuda") for shape in shapes]

boxes, scores = tensors((5, 4), 5)
many, many_scores = tensors((20_000, 4), 20_000)
classes = torch.zeros(5, dtype=torch.int64, device="cuda")
x, kernel, hidden = tensors((2, 3, 8), (1, 1, 3), (2, 8))
a, b, out = tensors((64, 64), (64, 64), (64, 64))
calls = {
    "add_one": lambda: extension_cpp.add_one(a),
    "my_op": lambda: extension_cpp.my_op(a, 2.0),
    "mymuladd": lambda: extension_cpp.mymuladd(a, b, 1.0),
    "mymul": lambda: extension_cpp.mymul(a, b),
    "myadd_out": lambda: extension_cpp.myadd_out(a, b, out),
    "matmul": lambda: extension_cpp.matmul(a, b),
    "convrnn_forward": lambda: extension_cpp.convrnn_forward(x, kernel, hidden),
    "nms": lambda: extension_cpp.nms(boxes, scores, 0.5),
    "nms ": lambda: extension_cpp.nms(many, many_scores, 0.5),
    "batched_nms": lambda: extension_cpp.batched_nms(boxes, scores, classes, 0.5),
    "nms_padded": lambda: extension_cpp.nms_padded(boxes, scores, 0.5),
}
for call in calls.values():
    call()
torch.ones(4, device="cuda")[torch.tensor([10], device="cuda")]  # An assertion of a kernel of PyTorch's.
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
for name, call in calls.items():
    try:
        call()
    except RuntimeError as error:
        assert str(error).startswith(name.strip() + ": ") and "CUDA" in str(error), f"{name}: {error}"
    else:
        raise AssertionError(f"{name} raised nothing")
print("all said so")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_each_operator_says_so():
    done = python(CODE, fresh=True)
    assert "all said so" in done.stdout, done.stdout + done.stderr
