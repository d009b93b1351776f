"""Operators in Triton, one module a family. Imported where Triton serves or is asked for, and not before."""
