"""Functions on several processes of one process group, over gloo on this machine."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing


@contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody else is given within the block, and at which rank 0 can listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What a launcher tells a process."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DPSCAFFOLD_RANK_TIMEOUT": "240",  # imports of a command take a minute on a busy machine
    }


#: What processes share: it takes longer to import than to run.
IMPORTED = ["dpscaffold.training.train", "torch._dynamo", "scipy.signal", "dp_accounting.rdp"]

#: A function and what it is called with, after the number of the rank.
Call = tuple[Any, ...]


def on_ranks(
    count: int, folder: Path, *calls: Call, limit: float = 600.0
) -> list[list[dict[str, Any]]]:
    """For each call, what ``function(rank, *given)`` returns on each rank ("value"), or raises
    ("error"); of a rank that was killed, or took longer than ``limit`` seconds, its "exit".

    The processes are copies of one that has imported the package, which takes seconds.
    """
    store = folder / f"store-{time.monotonic_ns()}"  # a file: a port could be taken meanwhile
    ranks = _started(_call, [(rank, count, store, folder, calls) for rank in range(count)])
    _ended(ranks, limit)
    return [
        [_left(folder, rank, number, one.exitcode) for rank, one in enumerate(ranks)]
        for number in range(len(calls))
    ]


def _started(target: Any, given: Sequence[tuple[Any, ...]]) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ranks = [context.Process(target=target, args=one) for one in given]
    for one in ranks:
        one.start()
    return ranks


def _ended(ranks: Sequence[Any], limit: float) -> None:
    end = time.monotonic() + limit
    for one in ranks:
        one.join(max(0.0, end - time.monotonic()))
        if one.is_alive():  # ranks that wait for each other
            one.kill()
            one.join()


def _left(folder: Path, rank: int, number: int, exitcode: int | None) -> dict[str, Any]:
    path = folder / f"{rank}-{number}.pickle"
    found = pickle.loads(path.read_bytes()) if path.exists() else {"exit": exitcode}
    path.unlink(missing_ok=True)
    return found


def values(answers: list[dict[str, Any]]) -> list[Any]:
    """What a call returned on each rank, where it did on all."""
    assert all("value" in answer for answer in answers), answers
    return [answer["value"] for answer in answers]


def _call(rank: int, count: int, store: Path, folder: Path, calls: Sequence[Call]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a rank that fails looks for unused objects, and these are many
    os.environ.update(environment(rank, count, 1))  # a port that nobody asks
    held = dist.FileStore(str(store), count)
    dist.init_process_group("gloo", store=held, rank=rank, world_size=count)
    for number, (function, *given) in enumerate(calls):
        try:
            found = {"value": function(rank, *given)}
        except Exception as error:
            found = {"error": error}
        (folder / f"{rank}-{number}.pickle").write_bytes(pickle.dumps(found))
    with suppress(Exception):  # a rank may be gone
        dist.barrier()
        dist.destroy_process_group()
