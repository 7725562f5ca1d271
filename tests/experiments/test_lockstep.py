"""Stacks that a device moves as a whole: what the simulator makes of them run by run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from refusals import refuses
from small import EQUAL, EVERY, PRIVACIES, WHERE, federation, setting

from dpscaffold import Gaussian
from dpscaffold.algorithms import fedavg, with_momentum
from dpscaffold.engines.fast import devices, lockstep
from dpscaffold.engines.fast.lockstep import Lockstep
from dpscaffold.engines.participation import participate
from dpscaffold.training import stack as stacks
from dpscaffold.training.shared_draws import shared_draws
from dpscaffold.training.stack import Schedule

FULL = Schedule(every=1, full=True)


@pytest.fixture(autouse=True)
def drawing_on_the_device(monkeypatch):
    """Let a CPU draw as a GPU does, where a GPU would, and take rounds without recording them."""
    if WHERE.type == "cuda":
        return
    real = devices.draws_on
    for room in (participate, lockstep):
        monkeypatch.setattr(room, "draws_on", lambda device, rows: real(torch.device("cuda"), rows))
    monkeypatch.setattr(Lockstep, "of", partial(Lockstep.of, capture=None))


def trained(runs, schedule=FULL):
    return stacks.train_stack(runs, [run.federation for run in runs], schedule, WHERE)


def in_step(runs) -> bool:
    data, streams = [run.federation for run in runs], shared_draws(runs)
    return Lockstep.of(runs, data, streams, WHERE) is not None


@pytest.fixture
def run_by_run(monkeypatch):
    """The same stack in the simulator."""

    def trained_so(runs):
        with monkeypatch.context() as patch:
            patch.setattr(Lockstep, "of", lambda *_: None)
            return trained(runs)

    return trained_so


def assert_alike(found, meant):
    for mine, theirs in zip(found, meant, strict=True):
        assert mine.diverged == theirs.diverged
        rows = zip([*mine.history, mine.average], [*theirs.history, theirs.average], strict=True)
        for one, other in rows:
            assert one.keys() == other.keys()
            for name, value in other.items():
                wanted = None if value is None else pytest.approx(value, rel=2e-4, abs=1e-6)
                assert one[name] == wanted, name
        if mine.diverged is None:
            torch.testing.assert_close(mine.model, theirs.model, rtol=1e-4, atol=1e-6)


def stack(algorithm="scaffold", seeds=(0, 1), **more):
    return [
        setting(algorithm, data=one, seed=seed, learning_rate=rate, averaging="tail", **more)
        for one in (federation(EQUAL, seed=0), federation(EQUAL, seed=1))
        for seed in seeds
        for rate in (0.1, 0.4)
    ]


@pytest.mark.parametrize("privacy", PRIVACIES)
@pytest.mark.parametrize("algorithm", EVERY)
def test_a_stack_in_step_is_the_stack_run_by_run(algorithm, privacy, run_by_run):
    if "median" in privacy and EVERY[algorithm]().noise_aware:
        pytest.skip("refused: the noise must be known")
    runs = stack(algorithm, privacy=privacy)
    assert in_step(runs)
    assert_alike(trained(runs), run_by_run(runs))


@pytest.mark.parametrize("task", ["mlp", "module"])
def test_models_of_every_kind_go_in_step(task, run_by_run):
    runs = [
        replace(one, task=first.task) for first in [stack(task=task)[0]] for one in stack(task=task)
    ]
    assert in_step(runs)
    assert_alike(trained(runs), run_by_run(runs))


def test_runs_that_share_no_draws_go_in_step_too(run_by_run):
    data = federation(EQUAL)
    runs = [setting(data=data, seed=seed, privacy="poisson") for seed in range(4)]
    assert in_step(runs)
    assert_alike(trained(runs), run_by_run(runs))


def test_a_diverged_run_is_told_and_leaves_the_others_alone(run_by_run):
    data = federation(EQUAL)
    calm = setting(data=data, learning_rate=0.1, averaging="tail")
    wild = setting(data=data, learning_rate=1e36, regularisation=1.0, averaging="tail")
    found = trained([calm, wild])
    assert found[1].diverged is not None and found[0].diverged is None
    assert found[1].average == {} and len(found[1].history) < len(found[0].history)
    assert_alike(found, run_by_run([calm, wild]))


def test_a_stack_that_is_cut_short_is_taken_run_by_run(monkeypatch, run_by_run):
    runs = stack(privacy="poisson")
    meant = run_by_run(runs)
    monkeypatch.setattr(devices, "poisson_width", lambda records, batch: batch)
    cut, real = [], Lockstep.in_vain

    def told(self):
        cut.append(real.fget(self))
        return cut[-1]

    monkeypatch.setattr(Lockstep, "in_vain", property(told))
    assert_alike(trained(runs), meant)
    assert cut == [True]


def test_what_does_not_fit_is_left_to_the_simulator():
    data = federation(EQUAL)
    fits = setting(data=data)
    assert in_step([fits])
    assert not in_step([setting()])  # users of unequal size
    assert not in_step([setting(data=data, privacy=Gaussian(clip=1.0, noise=1.0, secret=True))])
    other = replace(fits, plan=fits.plan.changed(server_rate=0.5))
    assert not in_step([fits, other])
    assert in_step([fits, replace(fits, plan=fits.plan.changed(regularisation=0.5))])
    silent = setting(data=data, privacy=Gaussian(clip=0.7, noise=0.0))
    assert not in_step([silent, setting(data=data, privacy="fixed")])  # one without noise


def test_runs_of_different_noise_and_clip_go_in_step(run_by_run):
    data = federation(EQUAL)
    runs = [
        setting("scaffold-balanced", data=data, privacy=Gaussian(clip, noise, "poisson"))
        for clip in (0.3, 0.7)
        for noise in (0.2, 2.0)
    ]
    assert in_step(runs)
    assert_alike(trained(runs), run_by_run(runs))


def test_where_memory_is_not_enough_the_simulator_takes_over(monkeypatch, run_by_run):
    runs = stack()
    meant = run_by_run(runs)

    def crowded(self, number):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(Lockstep, "_move", crowded)
    assert_alike(trained(runs), meant)


def looking(server, cohort):
    """An announcement that depends on a number which the host would have to see."""
    return {"control": server.slots["control"] * (2.0 if bool(server.params.sum() > 0) else 1.0)}


def naming(server, cohort):
    """An announcement that depends on who takes part."""
    return {"control": server.slots["control"] * float(cohort.users[0])}


@pytest.mark.parametrize("announce", [looking, naming])
def test_an_algorithm_that_looks_is_taken_run_by_run(announce, run_by_run):
    runs = [
        replace(one, algorithm=one.algorithm.replace(announce=announce))
        for one in stack(seeds=(0,))
    ]
    assert not in_step(runs)
    assert_alike(trained(runs), run_by_run(runs))


def counting(gradient, y, at):
    """A direction that depends on the number of the round."""
    return gradient / at.broadcast.round


def test_an_algorithm_that_reads_the_round_is_taken_run_by_run(run_by_run):
    runs = [replace(one, algorithm=one.algorithm.replace(direction=counting)) for one in stack()]
    assert not in_step(runs)
    assert_alike(trained(runs), run_by_run(runs))


def tried_out(work, given):
    """Records as a GPU does: it runs the work before, and not while recording."""
    for _ in range(2):
        work(given)
    return (lambda: work(given)), {}


@pytest.mark.parametrize(
    ("algorithm", "rounds"),
    [("scaffold-balanced", 1), ("scaffold-balanced-warm", 2), ("scaffold-balanced-warm", 5)],
)
def test_trying_rounds_out_leaves_no_trace(algorithm, rounds, monkeypatch, caplog, run_by_run):
    if WHERE.type == "cpu":
        real = Lockstep.of.func
        monkeypatch.setattr(Lockstep, "of", partial(real, capture=tried_out))
    runs = stack(algorithm, privacy="poisson", rounds=rounds)
    assert in_step(runs)
    assert_alike(trained(runs), run_by_run(runs))
    assert "could not be recorded" not in caplog.text


def test_servers_with_slots_of_their_own_go_in_step(run_by_run):
    algorithm = with_momentum(fedavg(), 0.5)
    runs = [replace(one, algorithm=algorithm) for one in stack("fedavg")]
    assert in_step(runs)
    assert_alike(trained(runs), run_by_run(runs))


def test_unlike_runs_are_refused():
    data = federation(EQUAL)
    with refuses("not-stackable"):
        trained([setting(data=data), setting("fedavg", data=data)])


def test_runs_that_average_different_shares_go_in_step(run_by_run):
    data = federation(EQUAL)
    plain = setting(data=data, privacy="poisson", averaging="tail")
    runs = [
        replace(plain, plan=plain.plan.changed(averaging=share)) for share in (0.25, "tail", 1.0)
    ]
    assert in_step(runs)
    found = trained(runs)
    assert len({one.average["train_loss"] for one in found}) == 3
    assert_alike(found, run_by_run(runs))
