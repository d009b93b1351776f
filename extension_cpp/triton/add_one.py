"""add_one: input + 1;  my_op: input * scalar_arg. Both move 8 bytes an element of float32 for 1 operation."""

import triton

from extension_cpp.triton.elementwise import elementwise


@elementwise
@triton.jit
def add_one(input):
    return input + 1


@elementwise
@triton.jit
def my_op(input, scalar_arg):
    return input * scalar_arg
