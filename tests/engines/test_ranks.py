"""A run on several processes is the run of one process, bit for bit."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from rank_cases import (
    FAST,
    FOLDER,
    KILLED,
    LAYOUTS,
    Case,
    all_cases,
    dies,
    layout_rows,
    reached,
    small_matrix,
    stored,
)
from ranks import on_ranks
from small import EVERY, PRIVACIES, TASKS

from dpscaffold.errors import RankLost
from dpscaffold.runs.folder import RunFolder

EVERYTHING = [*FAST, *(Case(a, t, p) for a in EVERY for t in TASKS for p in PRIVACIES)]


def not_skipped(cases: list[Case]) -> list[Case]:
    """Those that are not refused."""
    found = []
    for case in cases:
        try:
            case.arguments()
        except pytest.skip.Exception:
            continue
        found.append(case)
    return found


def assert_same(one: dict[str, Any], several: dict[str, Any]) -> None:
    assert torch.equal(one["params"], several["params"])
    assert one["ended"] == several["ended"] and one["privacy"] == several["privacy"]
    for mine, theirs in zip(one["history"], several["history"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():  # reduced in another order than that of one process
            assert theirs[name] == (value and pytest.approx(value, 1e-4, 1e-6)), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def answers(folder):
    """What each of two ranks came to. One of their runs was begun by one process."""

    def stop(round: int, row: object) -> None:
        if round == 3:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        reached(KILLED, out=folder / "resumed", observer=stop)
    assert RunFolder(folder / "resumed").load_checkpoint().state.round == 2
    found = on_ranks(2, folder, small_matrix, folder)
    assert all("value" in answer for answer in found), found
    return [answer["value"] for answer in found]


@pytest.mark.parametrize("number", range(len(FAST)), ids=lambda number: str(FAST[number]))
def test_two_ranks_change_no_bit(number, answers):
    one = reached(FAST[number])
    for answer in answers:
        assert_same(one, answer["cases"][number])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
def test_no_number_of_ranks_changes_a_bit(count, tmp_path):
    cases = not_skipped(EVERYTHING)
    for answer in on_ranks(count, tmp_path, all_cases, cases):
        for case, several in zip(cases, answer["value"], strict=True):
            assert_same(reached(case), several)


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=lambda number: str(LAYOUTS[number]))
def test_sums_that_ranks_pass_on_have_the_bits_of_one_process(number, answers):
    count, size, _ = LAYOUTS[number]
    rows, weights = layout_rows(count)
    mean, total = torch.zeros(320), torch.zeros(320)
    for k in range(0, count, size):
        mean = mean + weights[k : k + size] @ rows[k : k + size]
        total = total + rows[k : k + size].sum(0)
    found = answers[0]["sums"][number]
    assert torch.equal(found["mean"], mean) and torch.equal(found["total"], total)


def test_rank_0_writes_the_memories_and_the_ledger_of_all(answers, folder):
    one = reached(FOLDER, out=folder / "one")
    for answer in answers:
        assert torch.equal(one["params"], answer["stored"]["params"])
    mine, theirs = stored(folder / "one"), stored(folder / "several")
    assert torch.equal(mine["average"], theirs["average"])
    for name, value in mine["slots"].items():
        assert torch.equal(value, theirs["slots"][name]), name
    assert (mine["users"], mine["ledger"]) == (theirs["users"], theirs["ledger"])


def test_ranks_continue_the_run_of_one_process(answers, folder):
    one = reached(KILLED)
    assert stored(folder / "resumed")["ledger"][-1][0] == 4
    for answer in answers:
        assert torch.equal(one["params"], answer["resumed"]["params"])


#: The mistake on rank 1 or on both, and how it is refused.
REFUSED = {
    "plan": ("ranks-differ", "configuration"),
    "data": ("ranks-differ", "data"),
    "users": ("too-many-ranks", "2 ranks"),
    "engine": ("not-applicable", "loop"),
    "metrics": ("ranks-differ", "configuration"),
    "several devices": ("not-applicable", "cpu,cpu"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_ranks_that_do_not_fit_are_refused_on_every_rank(mistake, answers, folder):
    code, word = REFUSED[mistake]
    for answer in answers:
        assert answer["refused"][mistake][0] == code
        assert word in answer["refused"][mistake][1]
    assert not (folder / "refused").exists()


def test_what_one_rank_refuses_is_refused_on_all(answers):
    (code, own), (same, said) = (answers[k]["refused"]["one rank"] for k in (1, 0))
    assert code == same == "wrong-type"
    assert said.startswith("rank 1 on ") and said.endswith(own)


def test_a_killed_rank_ends_the_run_and_nothing_is_lost(tmp_path):
    survivor, gone = on_ranks(2, tmp_path, dies, tmp_path / "run")
    assert gone == {"exit": -signal.SIGKILL}
    lost = survivor["error"]
    assert isinstance(lost, RankLost) and lost.reporter == 0
    assert "rank 1" in str(lost) and "in round 3" in str(lost) and "--resume" in str(lost)
    assert [round for round, _ in stored(tmp_path / "run")["ledger"]] == [1, 2, 3]
    ended = reached(KILLED, out=tmp_path / "run", resume=True)
    assert torch.equal(ended["params"], reached(KILLED)["params"])
