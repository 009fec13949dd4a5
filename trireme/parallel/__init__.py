from trireme.parallel.mesh import Alone, Comm, Group

__all__ = ["Alone", "Comm", "Group"]
