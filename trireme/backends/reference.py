"""The plain bodies themselves, on the CPU: the specification, runnable."""

from trireme.backends.base import Backend


class Reference(Backend):
    name = "reference"
