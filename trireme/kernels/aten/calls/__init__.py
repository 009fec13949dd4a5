"""How a call becomes launches: calls that come again are repeated without Python, cuts are tuned once and kept."""
