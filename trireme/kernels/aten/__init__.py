"""Triton kernels that stand in for torch's operators, on any chip that has Triton. The engine does not use them."""
