"""An algorithm with a hook that the code does not know takes the plain steps."""

from __future__ import annotations

import pytest
import torch
from algorithms.test_hooks import hooked
from small import Driven as Drive
from small import draw_as_a_gpu, setting, simulator

from dpscaffold.engine import gpu


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
