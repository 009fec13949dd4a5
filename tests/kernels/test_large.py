"""Tensors of 2^31 elements and more, and grids longer than the chip counts: as torch, whoever does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trireme import kernels
from trireme.kernels.aten.elementwise import layout, shape
from trireme.kernels.aten.folds import reduce, scan
from trireme.kernels.aten.products import matmul, streamed
from trireme.kernels.launch import Unsupported

COUNT = 2**31 + 4096
LINES = COUNT // 4096
ROW = 4096
Ones = dict[str, torch.Tensor]

CASES: dict[str, Callable[[Ones], Any]] = {
    "exp": lambda x: x["half"].exp()[-4:],
    "add": lambda x: (x["half"] + x["half"])[-4:],
    "add of a row": lambda x: (x["half"].view(LINES, ROW) + x["half"][-ROW:])[-1, -4:],
    "add of a turned matrix": lambda x: (x["half"].view(LINES, ROW).t() + x["half"].view(ROW, LINES))[-1, -4:],
    "eq": lambda x: (x["half"] == 7)[-4:],
    "where": lambda x: torch.where(x["half"] > 6, x["half"], -1.0)[-4:],
    "flip": lambda x: x["half"].flip(0)[:4],
    "flip of far lines": lambda x: x["half"].as_strided((3, 16), (2**30, 1)).flip(0),
    "a ragged end": lambda x: x["byte"][: 2**31 - 3].add(1)[-4:],
    "sum of a little less": lambda x: x["byte"][: 2**31 - 1].sum(),
    "rows far apart": lambda x: x["half"].as_strided((32, ROW), (2**26, 1)) @ x["half"][: ROW * ROW].view(ROW, ROW),
    "flip of lines": lambda x: x["half"].view(LINES, ROW).flip(0)[0, -4:],
    "triu": lambda x: x["half"].view(LINES, ROW).triu(ROW - LINES)[-2:, -4:],
    "triu of a wide row": lambda x: x["byte"].view(1, -1).triu(2)[:, -4:],
    "embedding": lambda x: F.embedding(torch.tensor([0, LINES - 1], device="cuda"), x["half"].view(LINES, ROW))[:, -3:],
    "sum": lambda x: x["byte"].sum(),
    "sum of lines": lambda x: x["byte"].view(LINES, ROW).sum(1)[-2:],
    "sum of columns": lambda x: x["byte"].view(LINES, ROW).sum(0)[-2:],
    "sum of two columns": lambda x: x["byte"].view(-1, 2).sum(0),
    "sum of pairs": lambda x: x["byte"].view(-1, 2).sum(1)[-2:],
    "max": lambda x: x["half"].max(),
    "argmax": lambda x: x["half"].argmax(),
    "max of columns": lambda x: x["half"].view(LINES, ROW).max(0).indices[-2:],
    "any": lambda x: (x["half"] > 6).any(),
    "var_mean": lambda x: torch.var_mean(x["half"].view(LINES, ROW), 1)[1][-2:],
    "cumsum": lambda x: x["byte"].cumsum(0, dtype=torch.int64)[-4:],
    "cumsum of columns": lambda x: x["byte"].view(LINES, ROW).cumsum(0, dtype=torch.int32)[-1, -4:],
    "softmax": lambda x: x["half"].view(LINES, ROW).softmax(1)[-1, -4:],
    "softmax of columns": lambda x: x["half"].view(ROW, LINES).softmax(0)[-1, -4:],
    "softmax of a few long rows": lambda x: x["half"].view(2, -1).softmax(1)[-1, -4:],
    "layer_norm": lambda x: F.layer_norm(x["half"].view(LINES, ROW), (ROW,))[-1, -4:],
    "rms_norm": lambda x: F.rms_norm(x["half"].view(LINES, ROW), (ROW,))[-1, -4:],
    "cross entropy": lambda x: F.cross_entropy(x["half"].view(LINES, ROW), torch.full((LINES,), ROW - 1, device="cuda")),
    "one row by a matrix": lambda x: (x["half"][:ROW].view(1, ROW) @ x["half"].view(ROW, LINES))[0, -4:],
    "one row by a turned matrix": lambda x: (x["half"][:ROW].view(1, ROW) @ x["half"].view(LINES, ROW).t())[0, -4:],
    "mv": lambda x: (x["half"].view(LINES, ROW) @ x["half"][-ROW:])[-4:],
    "a large product": lambda x: (x["half"].view(LINES, ROW)[:, :64] @ x["half"].view(LINES, ROW)[:64])[-1, -4:],
    "a product as large": lambda x: (x["half"][: 64 * 70000].view(70000, 64) @ x["half"][: 64 * 32000].view(64, 32000))[-1, -4:],
    "many items": lambda x: torch.bmm(x["half"][: 70000 * 64].view(-1, 8, 8), x["half"][: 70000 * 64].view(-1, 8, 8))[-1],
    "many odd items": lambda x: torch.bmm(x["half"][: 70000 * 9].view(-1, 3, 3), x["half"][: 70000 * 9].view(-1, 3, 3))[-1],
}


def test_what_kernels_cannot_count_is_refused(device: str) -> None:
    """By sizes alone: nothing of this is in memory."""
    one = torch.zeros(1, device=device)
    many, few = one.expand(2**31 - 2**22), one.expand(2, 3, 3)  # the last part would end beyond 32 bits
    row, far = torch.empty(1, 2**10, device="meta"), torch.empty_strided((4, 2**10), (1, 2**21), device="meta")
    refused: dict[str, Callable[[], Any]] = {
        "a long row": lambda: reduce.sum_dim(many),
        "many rows": lambda: reduce.sum_dim(many.unsqueeze(1), [1]),
        "a long running sum": lambda: scan._run(many, many, 0, 0),
        "a wide triangle": lambda: shape.triu(one.expand(1, 2**26)),
        "a wide table": lambda: shape.embedding(one.expand(1, 2**26), torch.zeros(1, dtype=torch.int64, device=device)),
        "many items": lambda: matmul._by_pointers(matmul._Problem(one.expand(70000, 3, 3), few, few, None, 1.0, 0.0)),
        "a far column": lambda: streamed.few_rows(row[None], far[None], row[None], None, 1.0, 0.0, "ieee"),
        "far rows": lambda: streamed.few_rows(far.t()[None], row[None], row[None], None, 1.0, 0.0, "ieee"),
    }
    for name, call in refused.items():
        with pytest.raises(Unsupported):
            call()
            pytest.fail(name)


def test_offsets_are_wide_before_they_overflow() -> None:
    """A block that reaches past the end of 2^31 elements, and few elements far apart, forwards and backwards."""
    dense = torch.empty(2**31 - 3, device="meta", dtype=torch.int8)
    assert layout.plan_layout([dense], None).wide and not layout.plan_layout([dense[: 2**30]], None).wide
    far = torch.empty_strided((3, 16), (3 * 2**29, 1), device="meta")
    assert layout.plan_layout([far], None).wide and layout.plan_reversed(far, torch.empty(3, 16, device="meta"), [0]).wide


@pytest.mark.gpu
def test_as_torch(device: str) -> None:
    """One test, since each case wants tens of gigabytes."""
    if torch.cuda.get_device_properties(0).total_memory < 100 * 2**30:
        pytest.skip("needs a GPU of 100 GiB")
    x = {"half": torch.ones(COUNT, device=device, dtype=torch.bfloat16), "byte": torch.ones(COUNT, device=device, dtype=torch.int8)}
    x["half"][-1], x["byte"][-3:] = 7, 5
    for name, call in CASES.items():
        expected = call(x)
        with kernels.use():
            for _ in range(3):  # new, noted, repeated
                result = call(x)
        torch.cuda.synchronize()  # a fault is this case's, and ends the test
        torch.testing.assert_close(
            result.double(), expected.double(), rtol=1e-2, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        del expected, result
        torch.cuda.empty_cache()
