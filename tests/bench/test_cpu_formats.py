"""`bench cpu --formats`: what it measures is packed as loading a model packs it, in as many bits as the type beside it."""

from __future__ import annotations

import pytest

from trireme.backends import reason_against

if reason_against("cpu"):
    pytest.skip(str(reason_against("cpu")), allow_module_level=True)

from trireme.bench.cpu_kernels import FORMATS, blocks_of_gguf, in_turns, published


@pytest.mark.parametrize(
    "name, kind, more", [("GPTQ", "q4", 1.0), ("AWQ", "q4_min", 40 / 36), ("int8 by row", "q8", 1.0)], ids=list(FORMATS)
)
def test_formats_take_as_many_bytes_as_the_type_beside_them(name: str, kind: str, more: float) -> None:
    weights = {"published": published(name, 64, 512), "gguf": blocks_of_gguf(FORMATS[name], 64, 512)}
    assert weights["published"].kind == kind
    assert weights["published"].nbytes <= more * weights["gguf"].nbytes
    assert weights["published"].floats().isfinite().all()
    found = in_turns(weights, 3, turns=2)
    assert set(found) == set(weights) and all(0 < seconds < 10 for seconds in found.values())
