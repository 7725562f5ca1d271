"""Large federations fit in little memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from dpscaffold.algorithms import scaffold
from dpscaffold.engines import Simulator, State
from dpscaffold.federation import Federation, Records
from dpscaffold.local import Gaussian
from dpscaffold.metrics import Evaluator
from dpscaffold.plan import Plan
from dpscaffold.rounds import plain_draws, rounds
from dpscaffold.setting import Setting
from dpscaffold.tasks import Logistic

users, records, dimension, classes = 10_000, 100, 40, 10
generator = torch.Generator().manual_seed(0)

def table(n):
    x = torch.randn(users * n, dimension, generator=generator)
    y = torch.randint(0, classes, (users * n,), generator=generator)
    return Records(x / x.norm(dim=1, keepdim=True), y, torch.arange(users + 1) * n)

data = Federation(table(records), table(5), classes).validated()
plan = Plan(rounds=1, user_ratio=0.2)
run = Setting(data.roster, Logistic(dimension, classes), scaffold(), plan, Gaussian(1.0, 5.0))
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
