"""The algorithms by name. To add one: write its file, then its line in :data:`ALGORITHMS`."""

from collections.abc import Callable

from dpscaffold.algorithms.balanced import scaffold_balanced, scaffold_balanced_warm
from dpscaffold.algorithms.base import Algorithm
from dpscaffold.algorithms.fedavg import fedavg, fedsgd
from dpscaffold.algorithms.fednova import fednova
from dpscaffold.algorithms.fedprox import fedprox
from dpscaffold.algorithms.scaffold import scaffold
from dpscaffold.algorithms.scaffold_warm import scaffold_warm
from dpscaffold.algorithms.sums import ridge

#: Every algorithm, by the name it has in a configuration. The conformance tests run over this
#: table; configuration, commands, labels and the accountant ask it or the algorithm itself.
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedsgd": fedsgd,
    "fedprox": fedprox,
    "fednova": fednova,
    "scaffold": scaffold,
    "scaffold-warm": scaffold_warm,
    "scaffold-balanced": scaffold_balanced,
    "scaffold-balanced-warm": scaffold_balanced_warm,
    "ridge": ridge,
}

#: Those that take local steps in rounds: all but the ones that solve for a model from sums.
ITERATIVE = {name: make for name, make in ALGORITHMS.items() if make().sums is None}

#: What a configuration that names no algorithm runs.
DEFAULT = "scaffold"

#: Those of which a round is one pass over a user's records: K·s must be 1.
ONE_PASS = ("fedsgd",)

#: What a plan compares where no algorithm is asked for.
RIVALS = ("scaffold-balanced", "fedavg")

#: What a site takes part in unless its policy says otherwise.
AGREED = ("scaffold", "scaffold-warm", "fedavg")
