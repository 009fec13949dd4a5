"""A readable summary of a checkpoint: how many bytes, in which formats. Knows kinds and formats, never values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from trireme.hub.composite import Composite
from trireme.hub.weights import Weight

LEAST = 0.01  # share of all bytes: a format with less, such as that of norms, is not mentioned


def holding(entries: Iterable[Weight | Composite]) -> str:
    """Such as "4.9 GB, GPTQ 4 bit, groups of 128, act order; BF16"."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[_format(entry)] += entry.num_bytes
    whole = sum(sizes.values())
    said = [name for name, count in sizes.most_common() if count >= LEAST * whole]
    return f"{size(whole)}, {'; '.join(said)}"


def size(count: int) -> str:
    """A number of bytes as readable text."""
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if count >= unit), (1e3, "KB"))
    return f"{count / unit:.3g} {name}"


def _format(entry: Weight | Composite) -> str:
    if isinstance(entry, Weight):
        return entry.kind
    form = entry.form
    groups = f", groups of {form.group}" if form.group and "blocks" not in form.title and "groups" not in form.title else ""
    order = ", act order" if form.facts.get("ordered") else ""
    inputs = ", with scales of activations (not used: each token gets its own)" if form.facts.get("inputs") else ""
    return form.title + groups + order + inputs
