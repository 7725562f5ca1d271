"""Functions on several processes of one process group, over gloo on this machine."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What a launcher tells a process."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DPSCAFFOLD_RANK_TIMEOUT": "60",
    }


def on_ranks(
    count: int, folder: Path, function: Callable[..., Any], *given: Any
) -> list[dict[str, Any]]:
    """What ``function(rank, *given)`` returns on each rank ("value"), or raises ("error"); of a
    rank that was killed, its "exit"."""
    port, context = free_port(), multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_call, args=(rank, count, port, folder, function, given))
        for rank in range(count)
    ]
    for one in ranks:
        one.start()
    found = []
    for rank, one in enumerate(ranks):
        one.join()
        path = folder / f"{rank}.pickle"
        found.append(pickle.loads(path.read_bytes()) if path.exists() else {"exit": one.exitcode})
        path.unlink(missing_ok=True)
    return found


def _call(
    rank: int, count: int, port: int, folder: Path, function: Callable[..., Any], given: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment(rank, count, port))
    dist.init_process_group("gloo")
    try:
        found = {"value": function(rank, *given)}
    except Exception as error:
        found = {"error": error}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    with suppress(Exception):  # a rank may be gone
        dist.barrier()
        dist.destroy_process_group()
