"""A few hundred mutated configurations: accepted or refused with a sentence, never a traceback."""

from __future__ import annotations

from fuzz import fuzz


def test_mutated_configurations_are_accepted_or_refused():
    assert fuzz(400, seed=1) == []
