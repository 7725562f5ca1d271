"""The algorithms by name. To add one: write its file, then its line in :data:`ALGORITHMS`."""

from __future__ import annotations

from collections.abc import Callable

from dpscaffold.algorithms.base import Algorithm, Broadcast, Local, Memory, Server, Upload
from dpscaffold.algorithms.fedavg import fedavg, fedsgd
from dpscaffold.algorithms.fedprox import fedprox
from dpscaffold.algorithms.scaffold import scaffold, scaffold_warm

#: Every algorithm, by the name it has in a configuration. The conformance tests run over this
#: table.
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedsgd": fedsgd,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "scaffold-warm": scaffold_warm,
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Broadcast",
    "Local",
    "Memory",
    "Server",
    "Upload",
    "fedavg",
    "fedprox",
    "fedsgd",
    "scaffold",
    "scaffold_warm",
]
