"""An algorithm with a hook that the code does not know takes the plain steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from algorithms.test_hooks import hooked
from small import Driven as Drive
from small import draw_as_a_gpu, setting, simulator

from dpscaffold.engine import gpu
from dpscaffold.tasks import Linear
from dpscaffold.tasks.losses import HuberErrors, huber


@pytest.mark.parametrize("known", [True, False], ids=["known", "hooked"])
def test_the_program_of_a_device_is_refused(monkeypatch, known):
    """It is offered the run, and the plain steps end where it should."""
    taken = []
    draw_as_a_gpu(monkeypatch)
    monkeypatch.setattr(gpu, "tried", lambda name, *given: taken.append(name))
    algorithm = hooked("scaffold", None if known else float)
    found = Drive(simulator(setting(algorithm, privacy="fixed"))).drive().reached.params
    assert bool(taken) == known
    # This hook does nothing: the results are the same.
    plain = Drive(simulator(setting("scaffold", privacy="fixed"))).drive().reached.params
    assert torch.equal(found, plain)


class Doubled(HuberErrors):
    """A subclass that is another loss."""

    def __call__(self, *given):
        return 2 * super().__call__(*given)


def test_a_subclass_is_not_taken_for_its_base():
    loss = huber(0.5)
    assert gpu._loss_of(Linear(4, 1, loss))[0] is not None
    assert gpu._loss_of(Linear(4, 1, replace(loss, errors=Doubled(0.5))))[0] is None
