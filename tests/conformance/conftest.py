"""On a GPU (``TEST_DEVICE=cuda``) the simulator computes there and is handed the CPU's draws, which
are those of the loop that it is compared with."""

from __future__ import annotations

import pytest
from small import WHERE

from dpscaffold.local import participate


@pytest.fixture(autouse=True)
def draws_of_the_cpu(monkeypatch):
    if WHERE.type == "cuda":
        monkeypatch.setattr(participate, "draws_on", lambda device, rows: False)
