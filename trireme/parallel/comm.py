"""Collective operations over torch.distributed, each with a deadline. Knows processes; nothing of layers or plans."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch import Tensor


class ProcessComm:
    """The collectives of a process group. Gathers are padded, because shares may differ in size."""

    def __init__(self, rank: int, size: int, store_path: str, timeout: float, backend: str = "gloo"):
        # A file store opens no listening port; gloo itself is bound to the loopback by GLOO_SOCKET_IFNAME (see worker/rank.py).
        store = dist.FileStore(store_path, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout))
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """The ranks' shares side by side on the last axis."""
        widest = max(sizes)
        padded = x if x.shape[-1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[-1]))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded.contiguous())
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        dist.broadcast(x, source)
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's equal share, along the first axis, of the sum."""
        # gloo has no reduce_scatter of its own
        return self.all_reduce(x.clone()).chunk(self.size)[self.rank]

    def all_to_all(self, x: Tensor) -> Tensor:
        """Chunk i of each rank's x goes to rank i; the result holds what the others sent here, by rank."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat([part.chunk(self.size)[self.rank] for part in parts])

    def close(self) -> None:
        dist.destroy_process_group()
