"""The instructions that unpack keys and values, carried out here one by one: they make the numbers that the plain body makes."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from trireme.kernels import chips
from trireme.kernels.steps import in_bits


def carried_out(text: str, given: dict[str, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """What the instructions leave in $0 and $1, two numbers of 16 bits each."""
    held = dict(given)

    def value(name: str) -> int:
        return int(name, 16) if name.startswith("0x") else int(name) if name.isdigit() else held[name]

    def halves(name: str) -> torch.Tensor:
        return torch.tensor([value(name)], dtype=torch.int64).to(torch.uint32).view(dtype).double()

    for line in text.strip("{ }").split(";"):
        op, *names = re.split(r"[ ,]+", line.strip())
        if not op or op == ".reg":
            continue
        a, *rest = names
        if op == "mov.b32":
            held[a] = value(rest[0])
        elif op == "and.b32":
            held[a] = value(rest[0]) & value(rest[1])
        elif op == "xor.b32":
            held[a] = value(rest[0]) ^ value(rest[1])
        elif op == "add.rn.f16x2":
            held[a] = int((halves(rest[0]) + halves(rest[1])).to(dtype).view(torch.uint32))
        elif op == "shr.u32":
            held[a] = value(rest[0]) >> value(rest[1])
        elif op == "shl.b32":
            held[a] = value(rest[0]) << value(rest[1]) & 0xFFFFFFFF
        elif op == "prmt.b32":
            places = (value(rest[0]) | value(rest[1]) << 32).to_bytes(8, "little")
            held[a] = int.from_bytes(bytes(places[value(rest[2]) >> 4 * i & 15] for i in range(4)), "little")
        else:
            assert op in ("fma.rn.bf16x2", "fma.rn.f16x2"), op
            made = (halves(rest[0]) * halves(rest[1]) + halves(rest[2])).to(dtype)
            held[a] = int(made.view(torch.uint32))
    return [halves("$0"), halves("$1")]


def word(values: list[float], dtype: torch.dtype) -> int:
    return int(torch.tensor(values, dtype=dtype).view(torch.uint32))


def clear() -> None:
    in_bits.how.cache_clear()
    in_bits.quick.cache_clear()


@pytest.fixture(autouse=True)
def nvidia(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chips, "current", lambda: dataclasses.replace(chips.INTERPRETER, ptx=True))
    clear()
    yield
    clear()  # other tests ask for their own chip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_int8(dtype: torch.dtype) -> None:
    texts = in_bits.how("int8", dtype)
    assert texts
    for first in range(0, 256, 4):
        codes = bytes(range(first, first + 4))
        found = torch.cat(carried_out(texts[0], {"$2": int.from_bytes(codes, "little")}, dtype))
        assert found.tolist() == [code - 256 if code > 127 else code for code in codes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_int4(dtype: torch.dtype) -> None:
    texts, scale, middle = in_bits.how("int4", dtype), 0.25, -3.5
    assert texts
    given = {"$3": word([scale] * 2, dtype), "$4": word([scale, 2 * scale], dtype), "$5": word([middle] * 2, dtype)}
    for first in range(0, 256, 4):
        codes = bytes(range(first, first + 4))
        held = given | {"$2": int.from_bytes(codes, "little"), "$6": word([middle, 1.0], dtype)}
        for text, part in zip(texts, ([code & 15 for code in codes], [code >> 4 for code in codes]), strict=True):
            expected = [(code - 8) * scale + middle for code in part[:3]] + [(part[3] - 8) * 2 * scale + 1.0]
            assert torch.cat(carried_out(text, held, dtype)).tolist() == expected


def test_keys_of_int8_that_are_too_large() -> None:
    both = in_bits.quick("int8")
    assert both and both[1] == in_bits.how("int8", torch.float16)
    for first in range(0, 256, 4):
        codes = bytes(range(first, first + 4))
        found = torch.cat(carried_out(both[0][0], {"$2": int.from_bytes(codes, "little")}, torch.float16))
        assert (found - in_bits.ABOVE.value).tolist() == [code - 256 if code > 127 else code for code in codes]


@pytest.mark.parametrize("scale, low", [(0.25, -3.5), (0.03, 1.0), (1e-4, -2e-4), (4000.0, -30000.0)])
def test_numbers_of_int4_that_are_too_small(scale: float, low: float) -> None:
    """They are off by no more than a 32th of a scale, or what float16 loses."""
    texts, shrunk = in_bits.quick("int4"), in_bits.SHRUNK.value
    assert texts and texts[0] == texts[1]
    size, least = torch.tensor(scale).half(), torch.tensor(low).half()
    factor, rest = size * 4, least / shrunk - size * 4
    given = {"$3": word([float(factor)] * 2, torch.float16), "$5": word([float(rest)] * 2, torch.float16)}
    given |= {"$4": given["$3"], "$6": given["$5"]}
    for first in range(0, 256, 4):
        codes = bytes(range(first, first + 4))
        held = given | {"$2": int.from_bytes(codes, "little")}
        for text, part in zip(texts[0], ([code & 15 for code in codes], [code >> 4 for code in codes]), strict=True):
            exact = torch.tensor([float(code * size.double() + least.double()) for code in part], dtype=torch.double)
            off = (torch.cat(carried_out(text, held, torch.float16)) * shrunk - exact).abs()
            assert (off <= scale / 32 + exact.abs() * 2.0**-11 + 2.0**-20).all()


def test_other_chips_are_left_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.AMD)
    assert in_bits.how("int4", torch.bfloat16) is None and in_bits.quick("int4") is None
