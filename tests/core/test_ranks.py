"""Messages between ranks, in a group of one."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from fastgrad.core.ranks import Ranks


def test_messages_longer_than_the_store_takes() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("localhost", port, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ranks = Ranks(dist.group.WORLD, seconds=5.0)
        for size in (3, 1 << 19, 1 << 20, 3 << 20):
            sent = torch.arange(size, dtype=torch.float64)
            ranks._push(0, sent)
            assert torch.equal(ranks._pop(0), sent)
    finally:
        dist.destroy_process_group()
