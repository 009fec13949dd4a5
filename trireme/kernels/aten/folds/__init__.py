"""Operators that fold a dimension away or run along it: how rows are cut into tiles, and the kernels that go through them."""
