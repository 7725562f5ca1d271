"""One thread, reproducible property tests, and no trace in the user's own cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "dpscaffold",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("dpscaffold")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Solved optima go to a folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("DPSCAFFOLD_CACHE", str(folder))
    return folder
