"""An algorithm with a hook that the code does not know takes the plain steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from algorithms.test_hooks import hooked
from small import EQUAL, federation, setting, simulator
from small import Driven as Drive

from dpscaffold.engines.fast import fused, lockstep
from dpscaffold.engines.fast.lockstep import Lockstep
from dpscaffold.engines.participation import participate
from dpscaffold.tasks import Linear
from dpscaffold.tasks.losses import HuberErrors, huber
from dpscaffold.training.shared_draws import shared_draws


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


class Doubled(HuberErrors):
    """A subclass that is another loss."""

    def __call__(self, *given):
        return 2 * super().__call__(*given)


def test_a_subclass_is_not_taken_for_its_base():
    loss = huber(0.5)
    assert fused.model_of(Linear(4, 1, loss)) is not None
    assert fused.model_of(Linear(4, 1, replace(loss, errors=Doubled(0.5)))) is None
