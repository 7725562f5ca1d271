"""The search for η₀: what is tried at once changes how long it takes, never what is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpscaffold import Gaussian, Logistic, Plan, recommend, scaffold_balanced
from dpscaffold.config import Run, make_run
from dpscaffold.planning import Facts, Goal, Limits
from dpscaffold.planning.recommendation import Recommendation
from dpscaffold.planning.surrogate import SurrogateAssumptions
from dpscaffold.planning.trial import WIDENINGS, Bench, StepSizeTrial, search
from dpscaffold.report.planning import as_json
from dpscaffold.training.events import StackBegun, silence

FACTS = Facts.of(users=12, records=60, features=6, classes=3)
PUBLIC = make_run(
    FACTS.roster, Logistic(6, 3), scaffold_balanced(), Plan(rounds=6), Gaussian(1.0, 2.0)
)


class Scored(Bench):
    """A bench whose scores are given by log η₀, one function a setting, and that notes its
    waves."""

    peaks: Sequence[tuple[float, float]] = ()
    looks_ahead = False

    @property
    def ahead(self) -> bool:
        return self.looks_ahead

    def run(self, asked: Sequence[tuple[Run, float]]) -> list[StepSizeTrial]:
        self.waves = [*getattr(self, "waves", []), len(asked)]
        return [
            StepSizeTrial(rate, (self._score(setting.plan.public_seed, rate),))
            for setting, rate in asked
        ]

    def _score(self, which: int, rate: float) -> float:
        """Two peaks, so that a look ahead meets scores that the search must not have seen."""
        place = math.log10(rate)
        return sum(
            math.exp(-((place - peak) ** 2)) / (k + 1) for k, peak in enumerate(self.peaks[which])
        )


def scored(peaks: Sequence[tuple[float, float]], looks_ahead: bool) -> Scored:
    bench = Scored(SurrogateAssumptions(), torch.device("cpu"), silence)
    bench.peaks, bench.looks_ahead = peaks, looks_ahead
    return bench


place = st.floats(-6, 6)


@given(st.lists(st.tuples(place, place), min_size=1, max_size=3))
def test_a_search_that_looks_ahead_chooses_the_same_in_one_wave(peaks):
    asked = [
        (replace(PUBLIC, plan=PUBLIC.plan.changed(seed=k)), [0.1, 0.3, 1.0])
        for k in range(len(peaks))
    ]
    plain, ahead = scored(peaks, False), scored(peaks, True)
    one, other = search(asked, plain), search(asked, ahead)
    assert [c.trials for c in one] == [c.trials for c in other]
    assert [c.rate for c in one] == [c.rate for c in other]
    assert len(ahead.waves) == 1 and len(plain.waves) <= WIDENINGS + 1
    assert sum(plain.waves) <= sum(ahead.waves)


def test_without_widening_nothing_beyond_is_tried():
    bench = scored([(1.0, 1.0)], True)
    [found] = search([(PUBLIC, [0.1, 0.3])], bench, widen=False)
    assert bench.waves == [2] and found.rate == 0.3


@pytest.mark.parametrize(
    ("epsilon", "widens"), [(100.0, True), pytest.param(10.0, False, marks=pytest.mark.slow)]
)
def test_a_plan_is_the_same_whether_or_not_it_looks_ahead(monkeypatch, epsilon, widens):
    """On a GPU all that may be wanted goes into one stack; on a CPU, whose time goes with the
    work, only what is wanted. Where the grid widens, the GPU has fewer stacks."""
    facts = Facts.of(users=10, records=40, features=5, classes=3, similarity=0.0)
    stacks: dict[bool, list[int]] = {False: [], True: []}

    def planned(looks_ahead: bool) -> Recommendation:
        monkeypatch.setattr(Bench, "ahead", property(lambda self: looks_ahead))

        def tell(event: object) -> None:
            if isinstance(event, StackBegun):
                stacks[looks_ahead].append(event.rounds)

        return recommend(facts, Goal(epsilon), Limits(8, 2, 2), tell=tell)

    plain, ahead = planned(False), planned(True)
    assert as_json(plain) == as_json(ahead)
    assert len(stacks[True]) == len(stacks[False]) - widens
    kept = {
        (one.setting.algorithm.name, one.setting.plan.rounds, one.setting.plan.local_steps)
        for one in (ahead.choice, *ahead.tried)
    }
    assert len(ahead.tried) + 1 == len(kept)  # each candidate once
