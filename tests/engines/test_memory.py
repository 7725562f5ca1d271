"""Large federations fit in little memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dpscaffold.algorithms import scaffold, scaffold_balanced
from dpscaffold.config import make_run
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import Plan
from dpscaffold.engines import Simulator, State
from dpscaffold.engines.rounds import plain_draws, rounds
from dpscaffold.federation import Federation, Records
from dpscaffold.tasks import Logistic

SCRIPT = """
import resource, torch
from dpscaffold.algorithms import scaffold
from dpscaffold.engines import Simulator, State
from dpscaffold.federation import Federation, Records
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.training.evaluator import Evaluator
from dpscaffold.config.plan import Plan
from dpscaffold.engines.rounds import plain_draws, rounds
from dpscaffold.config import make_run
from dpscaffold.tasks import Logistic

users, records, dimension, classes = 10_000, 100, 40, 10
generator = torch.Generator().manual_seed(0)

def table(n):
    x = torch.randn(users * n, dimension, generator=generator)
    y = torch.randint(0, classes, (users * n,), generator=generator)
    return Records(x / x.norm(dim=1, keepdim=True), y, torch.arange(users + 1) * n)

data = Federation(table(records), table(5), classes).validated()
plan = Plan(rounds=1, user_ratio=0.2)
run = make_run(data.roster, Logistic(dimension, classes), scaffold(), plan, Gaussian(1.0, 5.0))
device = torch.device("cpu")
engine = Simulator([run], [data])
drawing, start = plain_draws(run, run.randomness()), State.initial(run, device)
(done,) = rounds(run, engine, drawing, start)
assert torch.isfinite(done.state.params).all() and len(done.draw.drawn) == 2000
Evaluator(data, run.task, 0.005, device)(done.state.params)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
def test_ten_thousand_users_of_a_hundred_records_run_in_under_4_gb():
    """One DP-SCAFFOLD round with 2,000 participants and an evaluation; the peak of the process, in
    GiB."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 4e9 / 2**30


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor) and "alias" not in str(function._schema):
                self.most = max(self.most, one.numel())
        return made


@pytest.mark.parametrize("algorithm", [scaffold, scaffold_balanced])
def test_a_round_makes_nothing_for_users_who_do_not_take_part(algorithm):
    """Twenty of this many users: the largest tensor of the second round, and the slots that are
    stored, are those of twenty of a thousand."""

    def round_of(users):
        x = torch.randn(3 * users, 4, generator=torch.Generator().manual_seed(0))
        table = Records(x, (x[:, 0] > 0).long(), torch.arange(users + 1) * 3)
        data = Federation(table, table, 2).validated()
        plan = Plan(rounds=2, local_steps=2, user_ratio=20 / users, data_ratio=0.4)
        run = make_run(data.roster, Logistic(4, 2), algorithm(), plan, Gaussian(1.0, 1.0))
        engine = Simulator([run], [data])
        start = State.initial(run, torch.device("cpu"))
        left = rounds(run, engine, plain_draws(run, run.randomness()), start)
        next(left)
        with Largest() as seen:
            next(left)
        return seen.most, len(engine.memories._rooms["control"].table)

    (few, stored), (many, kept) = round_of(1_000), round_of(40_000)
    assert few == many < 1_000
    assert 20 < stored <= 82 and 20 < kept <= 82
