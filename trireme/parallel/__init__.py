from trireme.parallel.mesh import Alone, Comm, Group, Mesh

__all__ = ["Alone", "Comm", "Group", "Mesh"]
