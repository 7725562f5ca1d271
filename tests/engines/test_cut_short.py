"""Poisson batches that do not fit their width: nobody waits to see, and the round comes again."""

from __future__ import annotations

import pytest
import torch
from small import Driven, setting, simulator

from dpscaffold import Logistic, Plan, scaffold, synthetic, train
from dpscaffold.config import make_run
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.engines.fast import devices
from dpscaffold.engines.fast.devices import BatchOverflow, Layout
from dpscaffold.engines.participation import participate
from dpscaffold.training.stack import train_stack

POISSON = Gaussian(clip=0.7, noise=0.8, sampling="poisson")


@pytest.fixture(autouse=True)
def drawing_on_the_device(monkeypatch):
    """Let the CPU draw as a GPU does, where a GPU would."""
    real = devices.draws_on
    monkeypatch.setattr(
        participate, "draws_on", lambda device, rows: real(torch.device("cuda"), rows)
    )


@pytest.fixture
def narrow(monkeypatch):
    """Widths that batches often exceed."""
    monkeypatch.setattr(devices, "poisson_width", lambda records, batch: batch + 1)


DATA = synthetic(users=6, records=40)
PLAN = Plan(rounds=6, local_steps=3, user_ratio=0.5, data_ratio=0.3, evaluate_every=2)


def end(**more):
    return train(DATA, Logistic(40, 10), scaffold(), PLAN, POISSON, **more)


def test_a_round_that_is_cut_short_comes_again_as_it_was(monkeypatch, tmp_path):
    meant = end()
    monkeypatch.setattr(devices, "poisson_width", lambda records, batch: batch + 1)
    again, real = [], devices.BatchOverflow.happened

    def happened(self):
        found = real(self)
        again.append(found)
        return found

    monkeypatch.setattr(devices.BatchOverflow, "happened", happened)
    rounds = []
    found = end(out=tmp_path / "run", on_round=lambda row: rounds.append(row.round))
    assert any(again)
    torch.testing.assert_close(found.params, meant.params, rtol=1e-5, atol=1e-6)
    assert rounds == [1, 2, 3, 4, 5, 6] and found.ended == "completed"
    for name in ("epsilon_server", "largest_user_control", "test_accuracy"):
        assert found.final[name] == pytest.approx(meant.final[name], rel=1e-4)


def test_stacks_and_memories_come_again_too(monkeypatch):
    plans = [PLAN.changed(seed=seed) for seed in (0, 1, 2)]
    runs = [make_run(DATA.roster, Logistic(40, 10), scaffold(), plan, POISSON) for plan in plans]
    meant = train_stack(runs, [DATA] * 3)
    monkeypatch.setattr(devices, "poisson_width", lambda records, batch: batch + 1)
    found = train_stack(runs, [DATA] * 3)
    for one, other in zip(found, meant, strict=True):
        torch.testing.assert_close(one.model, other.model, rtol=1e-5, atol=1e-6)
        assert one.diverged is None and len(one.history) == len(other.history)


def test_what_was_cut_short_is_not_a_number_until_then(narrow):
    run = setting("scaffold", "logistic", POISSON, user_ratio=1.0, data_ratio=0.5)
    driven = Driven(simulator(run))
    while True:
        driven.drive(driven.states[0].round + 1)
        if driven.engine.cut_short():
            break
    assert driven.reached.params.isnan().all() and driven.reached.memory.isnan().any()


def test_without_anyone_to_tell_the_device_is_waited_for(monkeypatch):
    """A deployed site has no engine that could ask later."""
    run = setting("scaffold", "logistic", POISSON, user_ratio=1.0, data_ratio=0.5)
    meant = Driven(simulator(run)).drive().reached.params
    monkeypatch.setattr(devices, "poisson_width", lambda records, batch: batch + 1)
    engine = simulator(run)
    real = participate.participate
    monkeypatch.setattr(
        "dpscaffold.engines.fast.worker.participate", lambda *given: real(*given[:8], None)
    )
    found = Driven(engine).drive().reached.params
    torch.testing.assert_close(found, meant, rtol=1e-5, atol=1e-6)
    assert not engine.cut_short()


def test_rounds_of_a_run_that_really_diverges_do_not_come_again(narrow):
    cut = BatchOverflow()
    assert not cut.happened()
    cut.flags.append(torch.tensor(False))
    assert not cut.happened()
    cut.flags.append(torch.tensor(True))
    assert cut.happened()


def test_the_usual_width_is_never_exceeded():
    rows = simulator(setting("scaffold", "logistic", POISSON, user_ratio=1.0))
    made = rows._rows(1, 0, range(6))
    layout = Layout.of(made, 15, False)
    assert layout.width == layout.most  # so few records all fit
