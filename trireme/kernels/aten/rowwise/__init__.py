"""Operators whose results are as large as their rows: norms, softmax and cross entropy, with their gradients."""
