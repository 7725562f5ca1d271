"""The budget file: what is reserved stays reserved, by whomever, and never exceeds the total."""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import replace
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from dpscaffold.errors import BadInput
from dpscaffold.runs.budget_file import BudgetFile, BudgetGrant

GRANT = BudgetGrant("a", 0.4, 1e-6, 100, "record", "replace-one")


@pytest.fixture
def allowance(tmp_path):
    return BudgetFile.open(tmp_path / "budget.jsonl", 1.0, 1e-5)


def test_grants_add_up_to_the_total_and_no_further(allowance):
    allowance.reserve(GRANT)
    allowance.reserve(replace(GRANT, run="b", epsilon=0.6))
    before = allowance.path.read_bytes()
    with refuses("budget-too-small: epsilon = 0 of 1"):
        allowance.reserve(replace(GRANT, run="c", epsilon=1e-9))
    with refuses("budget-too-small: delta = 1.1e-05"):
        BudgetFile.open(allowance.path.with_name("other"), 9.0, 1e-5).reserve(
            replace(GRANT, delta=1.1e-5)
        )
    once = BudgetFile.open(allowance.path.with_name("once"), 9.0, 1e-5)
    once.reserve(replace(GRANT, delta=6e-6))
    with refuses("budget-too-small: delta = 4e-06 of 1e-05"):
        once.reserve(replace(GRANT, run="b", delta=6e-6))
    assert allowance.path.read_bytes() == before
    contents = BudgetFile(allowance.path).read()
    assert contents.left == (0.0, pytest.approx(8e-6)) and list(contents.grants) == ["a", "b"]


def test_a_run_is_granted_once_and_further_needs_add(allowance):
    allowance.reserve(GRANT)
    with refuses("grant-exists"):
        allowance.reserve(replace(GRANT, epsilon=0.1))
    allowance.reserve(replace(GRANT, run="a+1", epsilon=0.5, delta=0.0))
    contents = allowance.read()
    assert contents.spent == (0.9, 1e-6) and [g.run for g in contents.of("a")] == ["a", "a+1"]
    with pytest.raises(BadInput):
        allowance.reserve(replace(GRANT, run="a+2", epsilon=0.2))


@given(st.lists(st.floats(0.0, 0.7), max_size=12))
@settings(max_examples=25, deadline=None)
def test_whatever_is_asked_the_total_holds(tmp_path_factory, asked):
    """A plain reckoning next to the file: grants add, refusals change nothing."""
    path = tmp_path_factory.mktemp("b") / "budget.jsonl"
    allowance = BudgetFile.open(path, 1.0, 0.5)
    granted: list[float] = []
    for k, epsilon in enumerate(asked):
        try:
            BudgetFile(path).reserve(replace(GRANT, run=str(k), epsilon=epsilon))
            granted.append(epsilon)
            assert math.fsum(granted) <= 1.0
        except BadInput:
            assert math.fsum([*granted, epsilon]) > 1.0
    assert allowance.read().spent[0] == math.fsum(granted) <= 1.0


def _reserve_many(path, name, together):
    together.wait(60)
    for k in range(12):
        allowance = BudgetFile(path)
        try:
            allowance.reserve(replace(GRANT, run=f"{name}{k}", epsilon=1 / 16, delta=1e-7))
            allowance.participate(f"{name}{k}", 1, after=0)
        except BadInput as error:
            assert "left" in str(error), error  # no room; anything else would be a collision


def test_processes_share_a_file(allowance):
    """Two processes ask at once for 24 of 16 equal shares: 16 are granted, and the chain holds."""
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(2)
    workers = [
        context.Process(target=_reserve_many, args=(allowance.path, n, together)) for n in "xy"
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    contents = BudgetFile(allowance.path).read()
    assert len(contents.grants) == 16 and contents.spent[0] == 1.0
    assert sum(contents.participations.values()) == 16


def test_one_object_writes_on_after_another_has_written(allowance):
    other = BudgetFile(allowance.path)
    allowance.reserve(GRANT)
    other.participate("a", 1, after=0)
    allowance.participate("a", 2, after=1)
    other.participate("a", 3, after=2)
    assert BudgetFile(allowance.path).read().participations == {"a": 3}


def test_two_copies_of_a_run_cannot_both_go_on(allowance):
    copy = BudgetFile(allowance.path)
    allowance.reserve(GRANT)
    allowance.participate("a", 1, after=0)
    with refuses("run-copied"):
        copy.participate("a", 1, after=0)
    assert BudgetFile(allowance.path).read().participations == {"a": 1}


def test_other_neighbours_and_shared_noise_are_refused(allowance):
    allowance.reserve(replace(GRANT, noise_seed=3))
    with refuses("units-differ"):
        allowance.reserve(replace(GRANT, run="b", unit="user", epsilon=0.1))
    with refuses("units-differ"):
        allowance.reserve(replace(GRANT, run="b", neighbours="zero-out", epsilon=0.1))
    with refuses("seed-repeated"):
        allowance.reserve(replace(GRANT, run="b", noise_seed=3, epsilon=0.1))
    allowance.reserve(replace(GRANT, run="b", noise_seed=4, epsilon=0.1))
    allowance.reserve(replace(GRANT, run="c", epsilon=0.1))


def test_a_changed_or_shortened_file_is_refused(allowance):
    allowance.reserve(GRANT)
    anchor = allowance.read().journal.anchor
    text = allowance.path.read_text()
    allowance.path.write_text(text.replace("0.4", "0.1"))
    with refuses("ledger-damaged"):
        BudgetFile(allowance.path).read()
    allowance.path.write_text(text.splitlines(keepends=True)[0])
    assert not BudgetFile(allowance.path).read().journal.follows(anchor)
    allowance.path.write_text("")
    with refuses("budget-file-damaged"):
        BudgetFile(allowance.path).read()
    allowance.path.unlink()
    with refuses("not-a-budget-file"):
        BudgetFile(allowance.path).read()
    assert [p.name for p in allowance.path.parent.iterdir()] == [".budget.jsonl.lock"]


def test_opening_that_is_cut_short_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "budget.jsonl"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.link", Mock(side_effect=KeyboardInterrupt))
        BudgetFile.open(path, 1.0, 1e-5)
    assert not list(tmp_path.iterdir())
    assert BudgetFile.open(path, 1.0, 1e-5).read().left == (1.0, 1e-5)


@pytest.mark.parametrize("other", [b"", b"x", b"\n", b'{"already": []}\n', b"a letter of mine"])
def test_what_is_something_else_is_never_opened(tmp_path, other):
    path = tmp_path / "budget.jsonl"
    path.write_bytes(other)
    with refuses("file-exists"):
        BudgetFile.open(path, 1.0, 1e-5)
    assert path.read_bytes() == other
