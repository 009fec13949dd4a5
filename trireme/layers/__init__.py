from trireme.layers.attention import Attention, HeadNormSpec, Heads, Projections, alibi_slopes
from trireme.layers.batch import Batch, View
from trireme.layers.embedding import Embedding, Head
from trireme.layers.env import Env, Read
from trireme.layers.linear import Linear, Rows
from trireme.layers.mlp import MLP, GatedMLP
from trireme.layers.module import Module, calls_as
from trireme.layers.norm import HeadNorm, LayerNorm, RMSNorm, WholeNorm
from trireme.layers.rope import Rope
from trireme.layers.stack import run_blocks

__all__ = [
    "MLP", "Attention", "Batch", "Embedding", "Env", "GatedMLP", "Head", "HeadNorm", "HeadNormSpec", "Heads", "LayerNorm", "Linear",
    "Module", "Projections", "RMSNorm", "Read", "Rope", "Rows", "View", "WholeNorm", "alibi_slopes", "calls_as",
    "run_blocks",
]  # fmt: skip
