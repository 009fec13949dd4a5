from trireme.models import bloom, gemma3, llama
from trireme.models.config import ModelConfig
from trireme.models.registry import MODELS, cache_specs, model_class, register

__all__ = ["MODELS", "ModelConfig", "bloom", "cache_specs", "gemma3", "llama", "model_class", "register"]
