"""Which vectors cross between a server and a user in a round, and how long they are.

Found by running the algorithm's own functions once on zeros, so that nothing about an algorithm
has to be declared twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from dpscaffold.algorithms import (
    Algorithm,
    Broadcast,
    Cohort,
    Known,
    Local,
    Participant,
    Server,
    Size,
    Slots,
)

Lengths = dict[str, int]


def slot_lengths(slots: Mapping[str, Size], parameters: int) -> Lengths:
    """The lengths of declared slots: P, or 1.

    >>> slot_lengths({"control": "vector", "seen": "number"}, 410)
    {'control': 410, 'seen': 1}
    """
    return {name: parameters if size == "vector" else 1 for name, size in slots.items()}


@lru_cache(maxsize=64)
def broadcast_lengths(phase: Algorithm, parameters: int) -> Lengths:
    """``params`` and every ``shared.*`` of a round.

    >>> from dpscaffold import scaffold
    >>> broadcast_lengths(scaffold(), 410)
    {'params': 410, 'shared.control': 410}
    """
    shared = _announced(phase, parameters)
    return {"params": parameters} | {f"shared.{k}": v.shape[-1] for k, v in shared.items()}


@lru_cache(maxsize=64)
def upload_lengths(phase: Algorithm, parameters: int) -> Lengths:
    """``params`` and every ``totals.*`` of an upload; where memories are mirrored, the slots
    themselves (``kept.*``), of which the totals are the change.

    >>> from dpscaffold import fedavg, scaffold
    >>> upload_lengths(fedavg(), 3), upload_lengths(scaffold(), 3)
    ({'params': 3}, {'params': 3, 'totals.control': 3})
    """
    zero = torch.zeros(parameters)
    broadcast = Broadcast(1, zero, _announced(phase, parameters))
    at = Participant(broadcast, _zeros(phase.remembers, parameters), Known(1, 1.0, 0.0))
    upload, _ = phase.finish(Local(zero, zero), at)
    phase.check_upload(upload)
    lengths = {"params": parameters}
    for name, value in upload.totals.items():
        whole = phase.mirrored and name in phase.remembers
        lengths[f"{'kept' if whole else 'totals'}.{name}"] = value.shape[-1]
    return lengths


def _announced(phase: Algorithm, parameters: int) -> Slots:
    memories = {name: value[None] for name, value in _zeros(phase.shared, parameters).items()}
    one = torch.zeros(1)
    alone = Cohort(one, one + 1, Known(1, 1.0, 0.0), memories, one.bool())
    server = Server(torch.zeros(parameters), _zeros(phase.keeps, parameters))
    return phase.announce(server, alone)


def _zeros(slots: Mapping[str, Size], parameters: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(n) for name, n in slot_lengths(slots, parameters).items()}
