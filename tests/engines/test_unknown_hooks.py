"""An algorithm with a hook that the code does not know: no bound, no fast path, the plain steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch
from refusals import refuses
from small import EQUAL, EVERY, federation, setting, simulator
from small import Driven as Drive

from dpscaffold import train
from dpscaffold.algorithms import Broadcast, Known, Participant
from dpscaffold.algorithms.affine import FAST_FIELDS, affine
from dpscaffold.algorithms.base import PROVED_FIELDS, AffineDirection, Algorithm
from dpscaffold.algorithms.fedprox import Proximal
from dpscaffold.engines.fast import fused, lockstep
from dpscaffold.engines.fast.lockstep import Lockstep
from dpscaffold.engines.participation import participate
from dpscaffold.privacy import ALONE, Mechanism, adversaries, epsilon, no_guarantee
from dpscaffold.tasks import Linear
from dpscaffold.tasks.losses import HuberErrors, huber
from dpscaffold.training.shared_draws import shared_draws


@dataclass(frozen=True)
class Hooked(Algorithm):
    """An algorithm with a hook of the future: where local steps start."""

    start: Callable[[], float] | None = None


def hooked(name: str, start: Callable[[], float] | None = float) -> Algorithm:
    base = EVERY[name]()
    return Hooked(**{f.name: getattr(base, f.name) for f in fields(base) if f.init}, start=start)


def understood(algorithm: Algorithm) -> bool:
    return not algorithm.in_use_beyond(FAST_FIELDS)


def at(phase: Algorithm) -> Participant:
    vector, number = torch.ones(1, 5), torch.ones(1, 1)
    memory = {slot: vector if s == "vector" else number for slot, s in phase.remembers.items()}
    shared = dict.fromkeys(("control", "cohort", "common"), vector)
    return Participant(Broadcast(1, vector, shared), memory, Known(3, 0.1, 0.2))


@pytest.mark.parametrize("name", [name for name in EVERY if name != "feddyn"])
def test_a_new_hook_is_refused_where_it_is_set_and_only_there(name):
    for algorithm, known in ((hooked(name, None), True), (hooked(name), False)):
        assert (affine(algorithm, at(algorithm)) is not None) == known
        assert understood(algorithm) == known
        assert (algorithm.unproved == ()) == known


def test_a_hook_of_the_warm_up_counts_too():
    algorithm = EVERY["scaffold-warm"]().replace(warm_up=hooked("scaffold"))
    assert algorithm.unproved == ("start",) and not understood(algorithm)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_no_bound_holds_for_a_new_hook(name):
    run = setting(hooked(name), privacy="fixed").mechanism
    assert not hooked(name).one_sum
    assert "start" in no_guarantee(run)
    for who in (*adversaries(run, 2).values(), ALONE):
        with refuses("no-privacy: start"):
            epsilon(run, who)
    stored = json.loads(json.dumps(run.to_json()))
    assert Mechanism.from_json(stored, "a file") == run  # a stored run is refused as well


def test_a_run_with_a_new_hook_states_no_epsilon():
    trial = setting(hooked("fedavg"), privacy="fixed")
    said = train(trial.federation, trial.task, trial.algorithm, trial.plan, trial.privacy).privacy
    known = train(
        trial.federation, trial.task, EVERY["fedavg"](), trial.plan, trial.privacy
    ).privacy
    assert known.towards("server").epsilon is not None
    assert said.towards("server").epsilon is None


def test_descriptions_of_known_algorithms_name_no_hooks():
    for make in EVERY.values():
        assert make().unproved == () and understood(make())


def test_the_lists_of_known_fields_are_those_that_exist():
    """A hook that is added to Algorithm is in neither list, so it is refused until it is."""
    declared = {field.name for field in fields(Algorithm) if field.init}
    assert declared == PROVED_FIELDS
    # Not every fast path knows a model of one sum, or steps that begin elsewhere than at x.
    assert declared - {"sums", "begin_at"} == FAST_FIELDS


@pytest.mark.parametrize("known", [True, False], ids=["known", "hooked"])
def test_the_fast_paths_of_a_cpu_and_a_device_are_refused(monkeypatch, known):
    """The device's path, its fused program and the script are each offered the run."""
    taken = []
    for name in ("on_device", "scripted_steps"):
        real = getattr(participate, name)

        def spied(*given, name=name, real=real):
            made = real(*given)
            if made is not None:
                taken.append(name)
            return made

        monkeypatch.setattr(participate, name, spied)
    algorithm = hooked("scaffold", None if known else float)
    on_cpu = Drive(simulator(setting(algorithm, privacy="fixed"))).drive().reached.params
    with monkeypatch.context() as plainly:
        plainly.setattr(participate, "scripted_steps", lambda *given: None)
        plain = Drive(simulator(setting("scaffold", privacy="fixed"))).drive().reached.params
    torch.testing.assert_close(on_cpu, plain)  # this hook does nothing: the results are the same
    monkeypatch.setattr(participate, "draws_on", lambda device, rows: True)
    monkeypatch.setattr(fused, "fits", lambda model, device: True)
    monkeypatch.setattr(fused, "run_steps", lambda *given: taken.append("fused"))
    Drive(simulator(setting(algorithm, privacy="fixed"))).drive()
    assert ({"scripted_steps", "on_device", "fused"} <= set(taken)) == known
    assert known or not taken


@pytest.mark.parametrize("known", [True, False], ids=["known", "hooked"])
def test_lockstep_is_refused(monkeypatch, known):
    for room in (participate, lockstep):
        monkeypatch.setattr(room, "draws_on", lambda device, rows: True)
    run = setting(hooked("scaffold", None if known else float), data=federation(EQUAL))
    data, cpu = [run.federation], torch.device("cpu")
    found = Lockstep.of([run], data, shared_draws([run]), cpu, capture=None)
    assert (found is not None) == known


class Signed(AffineDirection):
    """A subclass that moves otherwise."""

    def __call__(self, gradient, y, at):
        return gradient.sign()


class Doubled(HuberErrors):
    """A subclass that is another loss."""

    def __call__(self, *given):
        return 2 * super().__call__(*given)


def test_a_subclass_is_not_taken_for_its_base():
    algorithm = EVERY["fedprox"]().replace(direction=Signed(Proximal(0.1)))
    assert affine(algorithm, at(algorithm)) is None
    loss = huber(0.5)
    assert fused.model_of(Linear(4, 1, loss)) is not None
    assert fused.model_of(Linear(4, 1, replace(loss, errors=Doubled(0.5)))) is None
