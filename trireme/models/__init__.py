from trireme.models import bloom, gemma3, llama
from trireme.models.config import ModelConfig
from trireme.models.fields import check_fields
from trireme.models.registry import MODELS, architectures, cache_specs, model_class, register
from trireme.models.strays import compare, is_left_out, leaves_out_of, refuse_strays

__all__ = [
    "MODELS", "ModelConfig", "architectures", "bloom", "cache_specs", "check_fields", "compare", "gemma3", "is_left_out",
    "leaves_out_of", "llama", "model_class", "refuse_strays", "register",
]  # fmt: skip
