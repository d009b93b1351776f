"""The operators, one module a family."""

from extension_cpp.ops.muladd import myadd_out, mymul, mymuladd

__all__ = ["myadd_out", "mymul", "mymuladd"]
