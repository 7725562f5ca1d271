"""One thread, reproducible property tests, no trace in the user's own cache, and what becomes of
tests that are about a CPU where the others run on a GPU (``TEST_DEVICE=cuda``)."""

from __future__ import annotations

import os

# Also for the processes that tests start: two workers of tests and their processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "dpscaffold",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
# For mutants: that a test fails is enough, and looking for the smallest example takes long.
settings.register_profile(
    "no shrinking", settings.get_profile("dpscaffold"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dpscaffold"))


@pytest.fixture(autouse=True)
def one_thread():
    """A run that is resumed takes the threads that it began with, and leaves them."""
    torch.set_num_threads(1)


ON_A_GPU = os.environ.get("TEST_DEVICE", "cpu") != "cpu"


def pytest_collection_modifyitems(items):
    """Leave out on a GPU what is marked ``cpu_only``, and say why."""
    for item in items if ON_A_GPU else ():
        for mark in item.iter_markers("cpu_only"):
            item.add_marker(pytest.mark.skip(reason=f"on a CPU only: {mark.args[0]}"))


@pytest.fixture
def draws_of_the_cpu(monkeypatch):
    """On a GPU the simulator computes there and is handed the CPU's draws, which are those of the
    loop."""
    if ON_A_GPU:
        from world import hand_out_draws_of_the_cpu

        hand_out_draws_of_the_cpu(monkeypatch)
