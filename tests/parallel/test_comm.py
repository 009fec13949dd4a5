"""The collectives between real processes over the loopback, against what arithmetic says."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

SIZE = 2
RANK = """
import sys
import torch
from trireme.parallel import Group
from trireme.parallel.comm import ProcessComm

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
comm = ProcessComm(rank, size, store, timeout=30.0)
values = [torch.arange(6.0) * 10**r for r in range(size)]
mine = values[rank].clone()
assert torch.equal(comm.all_reduce(mine.clone()), sum(values))
sizes = Group(rank, size).sizes(7)
whole = torch.arange(14.0).view(2, 7)
assert torch.equal(comm.all_gather(whole[:, Group(rank, size).span(7)], sizes), whole)  # uneven shares
assert torch.equal(comm.broadcast(mine.clone(), 1), values[1])
assert torch.equal(comm.reduce_scatter(mine.clone()), sum(values).chunk(size)[rank])
assert torch.equal(comm.all_to_all(mine.clone()), torch.cat([v.chunk(size)[rank] for v in values]))
comm.close()
print("done", rank)
"""


def test_collectives(tmp_path: pathlib.Path) -> None:
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(SIZE), str(tmp_path / "store")],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(SIZE)
    ]  # fmt: skip
    try:
        for number, rank in enumerate(ranks):
            out, err = rank.communicate(timeout=90)
            assert rank.returncode == 0, err
            assert f"done {number}" in out
    finally:
        for rank in ranks:
            rank.kill()
