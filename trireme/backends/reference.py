"""The reference backend: runs the plain bodies of all ops on the CPU."""

from trireme.backends.base import Backend


class Reference(Backend):
    name = "reference"
