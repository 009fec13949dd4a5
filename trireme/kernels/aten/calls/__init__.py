"""How a call becomes launches: kernels started thinly, calls that come again repeated without Python, cuts tuned once and kept.
Knows calls by the kinds of their arguments, never what an operator computes."""
