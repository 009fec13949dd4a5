"""Operators that meet each element by itself, and the generator that makes their kernels from scalar functions."""
