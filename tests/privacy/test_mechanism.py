"""Descriptions: what they refuse, that they survive JSON, and that every field matters."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from privacy.settings import SMALL, run_of
from refusals import refuses

from dpscaffold.config import Gaussian
from dpscaffold.errors import BadInput
from dpscaffold.privacy import (
    Group,
    Ledger,
    Mechanism,
    SecureSums,
    adversaries,
    epsilon,
)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"delta": 0.0}, "out-of-range: delta=0"),
        ({"delta": 1.0}, "out-of-range: delta=1"),
        ({"delta": math.nan}, "out-of-range: delta=nan"),
        ({"delta": "1/users"}, "unknown-choice: delta='1/users'"),
        ({"noise": -1.0}, "out-of-range: noise is -1"),
        ({"noise": math.inf}, "out-of-range: noise is inf"),
        ({"noise": math.nan}, "out-of-range: noise is nan"),
        ({"noise": 1e-10}, "noise-out-of-range: noise is 1e-10"),
        ({"clip": 0.0}, "out-of-range: clip=0.0"),
        ({"clip": math.nan}, "out-of-range: clip=nan"),
        ({"clip": math.inf}, "out-of-range: clip=inf"),
        ({"rounds": 0}, "out-of-range: rounds=0"),
        ({"local_steps": 0}, "out-of-range: local_steps=0"),
        ({"users": 0}, "out-of-range: users=0"),
        ({"cohort_size": 0}, "out-of-range: cohort_size=0"),
        ({"cohort_size": 11}, "out-of-range: cohort_size=11 … 10 users"),
        ({"extra": -1}, "out-of-range: extra=-1"),
        ({"batch_sizes": 101}, "batch-too-large: records=100 … 101"),
        ({"batch_sizes": 0}, "empty-batch: a batch of 0"),
        ({"records": [100, 100]}, "count-differs: records has 2 entries for 10 users"),
        ({"sampling": "cyclic"}, "unknown-choice: sampling='cyclic'"),
        ({"unit": "site"}, "unknown-choice: unit='site'"),
        ({"weighting": "loss"}, "unknown-choice: weighting='loss'"),
        ({"query": "medians"}, "unknown-choice: query='medians'"),
        ({"louder": [1.5] + [2.0] * 9}, "out-of-range: louder"),
        ({"louder": [1.0] + [0.5] * 9}, "out-of-range: louder"),
        ({"louder": [1.0] + [math.inf] * 9}, "out-of-range: louder"),
        ({"louder": [1.0] * 2}, "count-differs: louder"),
        ({"weighting": "noise"}, "missing-argument: weights"),
        ({"weights": [1.0] * 10}, "missing-argument: weights"),
        ({"weighting": "noise", "weights": [0.0] * 10}, "out-of-range: weight"),
        ({"secure": SecureSums(1, 2)}, "too-few-sites: at least 2 users, 1 of them"),
        ({"secure": SecureSums(-1, 2)}, "too-few-sites"),
        ({"secure": SecureSums(0, 3)}, "too-few-sites: 2 take part"),
    ],
)
def test_impossible_descriptions_are_refused(changes, refusal):
    with refuses(refusal):
        run_of(SMALL, **changes)


def test_delta_defaults_to_a_tenth_of_one_over_all_that_are_protected():
    plan = {**SMALL, "records": [50] * 5 + [150] * 5, "batch_sizes": 5}
    for unit, protected in (("record", 1000), ("user", 10)):
        assert run_of({**plan, "delta": None}, unit=unit).delta == 0.1 / protected
        assert run_of({**plan, "delta": "1/records"}, unit=unit).delta == 1 / protected


def test_it_describes_its_groups():
    run = run_of(SMALL, records=[50, 100] * 5, batch_sizes=10)
    assert run.groups[run.place(1)] == Group(records=100, batch=10, users=5)
    with refuses("unknown-user: user=10"):
        run.place(10)
    # Towards whole users a description says nothing of how many records anybody has.
    told = [run_of(SMALL, records=size, unit="user") for size in (50, 100)]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "replace-one"),
        ({"sampling": "poisson"}, "zero-out"),
        ({"sampling": "poisson", "declared_sizes": True}, "add-remove"),
        ({"unit": "user"}, "replace-one"),
        ({"unit": "user", "sampling": "poisson", "declared_sizes": True}, "replace-one"),
    ],
)
def test_every_run_names_its_neighbours_and_survives_json(changes, name):
    unequal = {"records": list(range(50, 60)), "louder": [1.0, 2.0] * 5}
    for more in ({}, unequal, {"clip": "median", "declines": "a site", "extra": 3}):
        run = run_of(SMALL, **changes, **more)
        assert run.relation == name and run.neighbours.endswith(f"({name})")
        stored = json.loads(json.dumps(run.to_json(), allow_nan=False))
        assert Mechanism.from_json(stored, "a file") == run


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": 0},
        {"groups": [{"records": 1}]},
        {"groups": [{"records": 100, "batch": 20, "users": 10, "shuffled": True}]},
        {"secure": {"colluders": 0, "least": 2, "shuffled": True}},
        {"groups": [[100, 20, 1], [100, 20, 9, math.nan]]},
        {"shuffled": True},
        {"membership": [0, 7]},
        {"membership": [-1] * 10},
        {"membership": [1] * 10},
    ],
    ids=str,
)
def test_a_stored_description_that_is_not_fully_understood_is_refused(change):
    with pytest.raises(BadInput):
        Mechanism.from_json({**run_of(SMALL).to_json(), **change}, "a file")


def test_a_stored_membership_that_contradicts_its_groups_is_refused():
    """Who is in which group decides what its ε is."""
    run = run_of(SMALL, louder=[1.0] + [3.0] * 9)
    for membership in ([0] * 10, [1] * 10, [0] * 9 + [1], [-1, *[1] * 9]):
        with refuses("run-damaged: membership"):
            Mechanism.from_json({**run.to_json(), "membership": membership}, "a file")


#: One sum of a round over unequal users: where the noise of others counts, so that all may matter.
SUM = run_of(
    SMALL,
    memory=False,
    local_steps=1,
    cohort_size=4,
    records=[100] * 5 + [300] * 5,
    batch_sizes=[20] * 5 + [50] * 5,
)
USERS = run_of(SMALL, unit="user", memory=False, local_steps=1)
#: Another value of every field, and the run in which it matters.
ALTERED: dict[str, tuple[Mechanism, Any]] = {
    "clip": (SUM, "median"),
    "noise": (SUM, 3.0),
    "sampling": (SUM, "poisson"),
    "unit": (SUM, "user"),
    "rounds": (SUM, 21),
    "local_steps": (SUM, 2),
    "users": (SUM, 11),
    "cohort_size": (SUM, 5),
    "groups": (SUM, (replace(SUM.groups[0], batch=10), SUM.groups[1])),
    "memory": (SUM, True),
    "weighting": (SUM, "records"),
    "delta": (SUM, 1e-6),
    "declines": (SUM, "a site"),
    "one_sum": (SUM, False),
    "unproved_hooks": (SUM, ("new",)),
    "query": (USERS, "sums"),
    "secure": (SUM, SecureSums(1, 4)),
    "extra": (SUM, 1),
}
#: Fields that change no ε of a run.
NO_MATTER = {
    "membership": "says which user is in which group; the ledger's ε of single users change",
    "declared_sizes": "says of what kind the neighbours are, whose ε are the same",
}


def seen(run: Mechanism) -> dict[str, float | str]:
    """ε towards everybody, or the refusal."""
    try:
        return {name: epsilon(run, who) for name, who in adversaries(run).items()}
    except BadInput as refusal:
        return {"refused": refusal.code}


@pytest.mark.parametrize("name", [field.name for field in fields(Mechanism)])
def test_every_field_changes_epsilon_or_is_known_not_to(name):
    """A field that nothing reads would be a promise that nobody checked: add it to the table."""
    if name in NO_MATTER:
        return
    run, value = ALTERED[name]
    try:
        other = seen(replace(run, **{name: value}))
    except BadInput:
        return
    assert other != seen(run)


def test_what_does_not_matter_for_epsilon_matters_elsewhere():
    assert set(NO_MATTER) | set(ALTERED) == {field.name for field in fields(Mechanism)}
    ledgers = [Ledger(SUM), Ledger(replace(SUM, membership=SUM.membership[::-1]))]
    for ledger in ledgers:
        ledger.record(1, [0])
    assert seen(ledgers[1].run) == seen(SUM) and ledgers[0].of(0) != ledgers[1].of(0)
    sized = [run_of(SMALL, sampling="poisson", declared_sizes=known) for known in (True, False)]
    assert seen(sized[0]) == seen(sized[1]) and sized[0].neighbours != sized[1].neighbours


@pytest.mark.parametrize(
    ("part", "value"),
    [("records", 150), ("batch", 10), ("users", 6), ("louder", 1.5), ("weight", 2.0)],
)
def test_every_number_of_a_group_matters(part, value):
    assert {field.name for field in fields(Group)} == {
        *("records", "batch", "users", "louder", "weight")
    }
    changed = replace(SUM.groups[1], **{part: value})
    try:
        other = replace(SUM, groups=(SUM.groups[0], changed))
    except BadInput:
        return
    assert seen(other) != seen(SUM)


def test_every_number_of_secure_sums_matters():
    quiet = run_of(SMALL, memory=False, local_steps=1, cohort_size=4, batch_sizes=[40] + [20] * 9)
    base = replace(quiet, secure=SecureSums(1, 4))
    for other in (SecureSums(0, 4), SecureSums(1, 3)):
        assert seen(replace(base, secure=other)) != seen(base)
    assert {field.name for field in fields(SecureSums)} == {"colluders", "least"}


@dataclass(frozen=True, kw_only=True)
class Shuffled(Mechanism):
    """A kind of run that does not exist: a field that no theorem looks at."""

    shuffled: bool = False


def test_a_new_kind_of_run_has_no_guarantee():
    run = Shuffled(**{field.name: getattr(SUM, field.name) for field in fields(SUM)})
    assert seen(run) == {"refused": "no-privacy"}
    ledger = Ledger(run)
    ledger.record(1, [0])
    with refuses("no-privacy: Shuffled"):
        ledger.largest()


def test_what_trains_and_what_is_accounted_share_their_fields():
    shared = {"clip", "noise", "sampling", "unit"}
    assert shared <= {field.name for field in fields(Mechanism)} & set(Gaussian.model_fields)


@pytest.mark.parametrize(
    "wrong", [{"delta": 2.0}, {"rounds": 1.5}, {"unit": "site"}, {"noise": -1.0}, {"users": 7}]
)
def test_a_run_with_a_wrong_field_is_refused_in_one_sentence(wrong):
    with pytest.raises(BadInput) as refused:
        replace(SUM, **wrong)
    assert next(iter(wrong)) in str(refused.value) and "\n" not in str(refused.value)
