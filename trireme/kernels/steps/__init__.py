"""A model's own steps, each in one pass: attention over a paged KV, lean products, gates, sampling, and the fused operators."""
