"""Operators in Triton, one module a family. Imported where Triton is used or asked for, and not before."""
