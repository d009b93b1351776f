"""The operators, one module a family."""

from extension_cpp.ops.add_one import add_one, my_op
from extension_cpp.ops.convrnn import convrnn_forward
from extension_cpp.ops.matmul import matmul
from extension_cpp.ops.muladd import myadd_out, mymul, mymuladd
from extension_cpp.ops.nms import batched_nms, nms, nms_padded

__all__ = [
    "add_one",
    "batched_nms",
    "convrnn_forward",
    "matmul",
    "my_op",
    "myadd_out",
    "mymul",
    "mymuladd",
    "nms",
    "nms_padded",
]
