from trireme.backends.cuda.backend import Cuda

__all__ = ["Cuda"]
