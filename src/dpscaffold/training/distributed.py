"""What all processes of one run must have alike, before its first round."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch

import dpscaffold
from dpscaffold.engine.distributed import Comm, refuse_differing
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.runs.written import plain
from dpscaffold.training.opening import Asked


def check_same(comm: Comm, asked: Asked) -> None:
    """Refuse processes that do not run the same thing."""
    if comm.count == 1:
        return
    if asked.engine != "simulator":
        raise BadInput(
            "not-applicable",
            f"engine is {asked.engine!r}, and only the simulator runs on several ranks; leave it "
            f"out, or use one process",
        )
    shown = {
        "version of dpscaffold": dpscaffold.__version__,
        "version of PyTorch": torch.__version__.partition("+")[0],
        "version of NumPy": np.__version__,
    }
    refuse_differing(comm, shown, frozenset(shown))
    if comm.count > asked.run.users:
        raise BadInput(
            "too-many-ranks",
            f"{comm.count} ranks were started for {asked.run.users} users; start at most one rank "
            f"for each user",
        )
    names = [one if isinstance(one, str) else one.__name__ for one in asked.metrics]
    declared = hashlib.sha256(repr(asked.federation.declared_sizes).encode()).hexdigest()
    said = json.dumps(plain([asked.run.to_dict(), names, declared]), sort_keys=True, default=repr)
    facts = {
        "configuration": hashlib.sha256(said.encode()).hexdigest(),
        "data": _known_again(asked.federation),
    }
    refuse_differing(comm, facts, frozenset())


def _known_again(federation: Federation) -> str:
    """What tells that ranks have the same data; of stored data, the checksums of the files and the
    sizes, so that no rank has to read the records of others."""
    if not federation.mapped or not federation.checksum:
        return federation.digest().value
    state = hashlib.blake2b(federation.checksum.encode())
    for table in (federation.train, federation.test):
        state.update(repr(tuple(table.features.shape)).encode())
        for block in table.offsets.split(1 << 20):
            state.update(block.numpy().data)
    return state.hexdigest()
