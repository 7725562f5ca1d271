"""The simulator is compared with the loop, so on a GPU too it is handed the CPU's draws."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def the_same_draws(draws_of_the_cpu):
    """In every test of this folder."""
