"""New weights go where captured steps have the old ones only if nothing but the values differs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trireme.quant import Dense
from trireme.quant.base import take_tensors


@dataclass
class Record:
    values: Tensor
    zeros: Tensor | None
    group: int


class Holder:
    def __init__(self, group: int = 32, columns: int = 8, zeros: bool = False, bias: bool = False, device: str = "meta"):
        def made() -> Tensor:
            return torch.empty(4, columns, device=device)

        self.weight = Record(made(), made() if zeros else None, group)
        self.bias = made() if bias else None
        self.dtype = torch.bfloat16


def test_values_alone_differ() -> None:
    assert take_tensors(Holder(zeros=True, bias=True), Holder(zeros=True, bias=True))


@pytest.mark.parametrize("settings", [{"group": 64}, {"columns": 16}, {"zeros": True}, {"bias": True}], ids=str)
def test_something_else_differs(settings: dict[str, int]) -> None:
    assert not take_tensors(Holder(), Holder(**settings))
    assert not take_tensors(Holder(**settings), Holder())


def test_a_bias_that_was_not_there() -> None:
    weight = torch.empty(4, 8, device="meta")
    assert Dense(weight, None).take(Dense(weight, None))
    assert not Dense(weight, None).take(Dense(weight, torch.empty(4, device="meta")))


def test_on_a_cpu_nothing_is_taken() -> None:
    """Tensors there may map a file."""
    assert not take_tensors(Holder(device="cpu"), Holder(device="cpu"))
