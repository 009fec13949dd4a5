from trireme.backends.base import Backend
from trireme.backends.registry import backend_class, names, open_backend, reason_against, slow_fix

__all__ = ["Backend", "backend_class", "names", "open_backend", "reason_against", "slow_fix"]
