"""An algorithm with a hook that no theorem lists has no bound, and no program takes its steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest
from refusals import refuses
from small import EVERY, setting

from dpscaffold import train
from dpscaffold.algorithms.base import FAST_FIELDS, PROVED_FIELDS, Algorithm
from dpscaffold.privacy import ALONE, Mechanism, adversaries, epsilon, no_guarantee


@dataclass(frozen=True)
class Hooked(Algorithm):
    """An algorithm with a hook of the future: where local steps start."""

    start: Callable[[], float] | None = None


def hooked(name: str, start: Callable[[], float] | None = float) -> Algorithm:
    base = EVERY[name]()
    return Hooked(**{one.name: getattr(base, one.name) for one in fields(base)}, start=start)


@pytest.mark.parametrize("name", EVERY)
def test_a_new_hook_counts_where_it_is_set_and_only_there(name):
    assert EVERY[name]().unproved == hooked(name, None).unproved == ()
    assert hooked(name).unproved == hooked(name).in_use_beyond(FAST_FIELDS) == ("start",)
    assert not hooked(name).one_sum and hooked(name).form(None) is None
    warmed = EVERY[name]().replace(warm_up=hooked(name))
    assert warmed.unproved == warmed.in_use_beyond(FAST_FIELDS) == ("start",)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_no_bound_holds_for_a_new_hook(name):
    run = setting(hooked(name), privacy="fixed").mechanism
    assert "start" in no_guarantee(run)
    for who in (*adversaries(run, 2).values(), ALONE):
        with refuses("no-privacy: start"):
            epsilon(run, who)
    stored = json.loads(json.dumps(run.to_json()))
    assert Mechanism.from_json(stored, "a file") == run  # a stored run is refused as well


@pytest.mark.parametrize(
    "algorithm", [hooked("fedavg"), EVERY["fedavg"]()], ids=["hooked", "known"]
)
def test_a_run_with_a_new_hook_states_no_epsilon(algorithm):
    trial = setting(algorithm, privacy="fixed")
    given = trial.federation, trial.task, trial.algorithm, trial.plan, trial.privacy
    stated = train(*given).privacy.towards("server").epsilon
    assert (stated is None) == bool(algorithm.unproved)


def test_the_lists_of_known_fields_are_those_that_exist():
    """A hook that is added to Algorithm is in neither list, so it is refused until it is."""
    declared = {field.name for field in fields(Algorithm)}
    assert declared == PROVED_FIELDS
    # Not every fast path knows a model of one sum, or steps that begin elsewhere than at x.
    assert declared - {"sums", "begin_at"} == FAST_FIELDS
