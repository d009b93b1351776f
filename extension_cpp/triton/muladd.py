"""mymuladd: a * b + c, rounded once;  mymul: a * b. Both move 12 bytes an element of float32 for 2 operations or 1.
mymul_backward: the gradients of a and b, from one pass that moves 20 bytes for 2.
"""

import triton
import triton.language as tl

from extension_cpp.triton.elementwise import elementwise


@elementwise
@triton.jit
def mymuladd(a, b, c):
    return tl.fma(a, b, c)


@elementwise
@triton.jit
def mymul(a, b):
    return a * b


@elementwise
@triton.jit
def mymul_backward(grad, a, b):
    return grad * b, grad * a
