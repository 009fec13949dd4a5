from trireme.backends.cpu.backend import Cpu

__all__ = ["Cpu"]
