"""Descriptions: what they refuse, and that they survive JSON."""

from __future__ import annotations

import json

import pytest
from privacy.settings import SMALL, run_of
from refusals import refuses

from dpscaffold.privacy import Group, Mechanism, PrivacyError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delta": 0.0}, "delta is 0.0"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"delta": "1/users"}, "delta='1/users'"),
        ({"noise": -1.0}, "noise=-1.0"),
        ({"noise": float("inf")}, "noise=inf"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"clip": float("nan")}, "clip=nan"),
        ({"clip": float("inf")}, "clip=inf"),
        ({"rounds": 0}, "rounds=0"),
        ({"local_steps": 0}, "local_steps=0"),
        ({"users": 0}, "users=0"),
        ({"cohort_size": 0}, "cohort_size=0"),
        ({"cohort_size": 11}, "cohort_size=11 cannot be drawn from 10 users"),
        ({"batch_sizes": 101}, "records=100 is fewer than the batch of 101"),
        ({"batch_sizes": 0}, "a batch of 0"),
        ({"records": [100, 100]}, "records has 2 entries for 10 users"),
        ({"sampling": "cyclic"}, "sampling='cyclic'"),
        ({"weighting": "loss"}, "weighting='loss'"),
        ({"max_participations": 0}, "max_participations=0"),
    ],
)
def test_impossible_descriptions_are_refused(changes, words):
    with pytest.raises(PrivacyError) as refusal:
        run_of(SMALL, **changes)
    assert words in str(refusal.value)


def test_delta_defaults_to_a_tenth_of_one_over_all_records():
    plan = {**SMALL, "records": [50] * 5 + [150] * 5, "batch_sizes": 5}
    assert run_of({**plan, "delta": None}).delta == 0.1 / 1000
    assert run_of({**plan, "delta": "1/records"}).delta == 1 / 1000
    assert run_of({**plan, "delta": None}, unit="user").delta == 0.1 / 10
    assert run_of({**plan, "delta": "1/records"}, unit="user").delta == 1 / 10


def test_it_describes_its_groups():
    run = run_of(SMALL, records=[50, 100] * 5, batch_sizes=10)
    assert run.worst == Group(records=50, batch=10, users=5)
    assert run.group_of(1) == Group(records=100, batch=10, users=5)
    assert run.user_ratio == 0.2
    with refuses("unknown-user: user=10"):
        run.group_of(10)


@pytest.mark.parametrize(
    "changes", [{}, {"records": list(range(50, 60))}, {"clip": "median", "max_participations": 4}]
)
def test_it_survives_json(changes):
    run = run_of(SMALL, **changes)
    assert Mechanism.from_dict(json.loads(json.dumps(run.to_dict()))) == run


@pytest.mark.parametrize(
    "change", [{"rounds": 0}, {"groups": [{"records": 1}]}, {"unknown": 1}, {"membership": [0, 7]}]
)
def test_a_damaged_description_is_refused(change):
    with pytest.raises(PrivacyError):
        Mechanism.from_dict({**run_of(SMALL).to_dict(), **change})
