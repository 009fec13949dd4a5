from trireme.ops.attention import AttentionKind, AttentionPlan, CacheSpec, KVCache, StepLayout
from trireme.ops.choosing import Choosing
from trireme.ops.state import States, StateSpec
from trireme.ops.table import Ops, Projection

__all__ = [
    "AttentionKind",
    "AttentionPlan",
    "CacheSpec",
    "Choosing",
    "KVCache",
    "Ops",
    "Projection",
    "StateSpec",
    "States",
    "StepLayout",
]
