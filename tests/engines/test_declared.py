"""Declared sizes on the paths that only some machines take."""

from __future__ import annotations

import pytest
import torch
from small import Driven, assert_identical, federation, setting, simulator

from dpscaffold import Gaussian
from dpscaffold.engines.fast.lockstep import Lockstep
from dpscaffold.engines.participation import participate

POISSON = Gaussian(clip=0.7, noise=0.8, sampling="poisson")


def run_of(sizes, declared, **plan):
    data = federation(sizes).declaring(declared)
    return setting("scaffold-balanced", "logistic", POISSON, data, **plan)


@pytest.mark.cpu_only("scripts are for CPUs")
def test_scripted_steps_take_part_in_this(monkeypatch):
    """Logistic runs of declared sizes are those of the script; switched off, they end at the same
    bits."""
    run, found = run_of((13, 17, 9, 14, 30, 8), (10, 9, 6, 12, 15, 7)), []
    real = participate.scripted_steps

    def watched(*given):
        found.append(real(*given))
        return found[-1]

    monkeypatch.setattr(participate, "scripted_steps", watched)
    with_script = Driven(simulator(run)).drive().reached
    assert found and all(local is not None for local in found)
    monkeypatch.setattr(participate, "scripted_steps", lambda *given: None)
    assert_identical(with_script, Driven(simulator(run)).drive().reached)


def test_runs_in_lockstep_leave_declared_sizes_to_the_simulator():
    """Their device draws with the true size, so they must not take such runs."""
    runs = [run_of((9,) * 6, 9), run_of((9,) * 6, 9, seed=1)]
    streams = [run.randomness() for run in runs]
    data = [run.federation for run in runs]
    assert Lockstep.of(runs, data, streams, torch.device("cuda"), capture=None) is None
