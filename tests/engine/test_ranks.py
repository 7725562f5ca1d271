"""A run on several processes is the run of one process, but for the last bits."""

from __future__ import annotations

import shutil
import signal
from typing import Any

import pytest
import torch
from rank_cases import (
    AGAIN,
    FAST,
    FOLDER,
    KILLED,
    ON_GPUS,
    Case,
    Special,
    all_cases,
    dies,
    dies_on_a_gpu,
    on_gpus,
    reached,
    resumes,
    small_matrix,
    stored,
)
from ranks import on_ranks, values
from small import EVERY, PRIVACIES, TASKS

from dpscaffold.errors import RankLost
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.history import HistoryRow

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


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether numbers agree but for the order in which they were added: what that costs follows the
    largest of them, and differs from processor to processor."""
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5 * (1 + float(one.norm())))


def assert_close(one: dict[str, Any], several: dict[str, Any]) -> None:
    assert close(one["params"], several["params"])
    assert close(one["own"], several["own"])
    assert one["ended"] == several["ended"] and one["privacy"] == several["privacy"]
    for mine, theirs in zip(one["history"], several["history"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert theirs[name] == (value and pytest.approx(value, 1e-3, 1e-5)), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder):
    """What two ranks came to in one session: of the cases, and of a run whose rank 1 is killed at
    the end. One of their runs was begun by one process."""

    def stop(row: HistoryRow) -> None:
        if row.round == 3:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        reached(KILLED, out=folder / "resumed", on_round=stop)
    assert RunFolder(folder / "resumed").load_checkpoint().state.round == 2
    return on_ranks(2, folder, (small_matrix, folder), (dies, folder / "killed"))


@pytest.fixture(scope="module")
def answers(found):
    return values(found[0])


@pytest.mark.parametrize("number", range(len(FAST)), ids=lambda number: str(FAST[number]))
def test_two_ranks_differ_in_the_last_bits_alone(number, answers):
    one = reached(FAST[number])
    for answer in answers:
        assert_close(one, answer["cases"][number])


@pytest.mark.parametrize("number", range(len(AGAIN)), ids=lambda number: str(AGAIN[number]))
def test_the_same_number_of_ranks_makes_the_same_bits(number, answers):
    for answer in answers:
        first = answer["cases"][FAST.index(AGAIN[number])]
        again = answer["again"][number]
        assert torch.equal(first["params"], again["params"])
        assert torch.equal(first["own"], again["own"])


needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_a_gpu
def test_ranks_on_gpus_come_to_what_one_process_does(tmp_path):
    """The same records are drawn, and sums differ in their last bits."""
    expected = [reached(case, device="cuda:0") for case in ON_GPUS]
    for answer in values(on_ranks(2, tmp_path, (on_gpus,))[0]):
        for case, one, several in zip(ON_GPUS, expected, answer, strict=True):
            for name in ("params", "own"):
                mine, theirs = one[name].cpu(), several[name].cpu()
                assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4), (case, name)
            assert one["privacy"] == several["privacy"], case


@needs_a_gpu
@pytest.mark.parametrize("case", [KILLED, Special("secure")], ids=str)
def test_a_killed_rank_with_a_gpu_ends_the_run(case, tmp_path):
    survivor, gone = on_ranks(2, tmp_path, (dies_on_a_gpu, case), limit=120.0)[0]
    assert gone == {"exit": -signal.SIGKILL}
    assert isinstance(survivor.get("error"), RankLost), survivor
    assert "rank 0 lost contact" in str(survivor["error"])


@pytest.fixture(scope="module")
def everything():
    """All cases, and what one process comes to."""
    cases = not_skipped(EVERYTHING)
    return cases, [reached(case) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_any_number_of_ranks_comes_to_the_same(count, everything, tmp_path):
    cases, expected = everything
    for answer in values(on_ranks(count, tmp_path, (all_cases, cases), limit=3600)[0]):
        for case, one, several in zip(cases, expected, answer, strict=True):
            try:
                assert_close(one, several)
            except AssertionError as error:
                raise AssertionError(f"{case} on {count} ranks") from error


def test_rank_0_writes_the_memories_and_the_ledger_of_all(answers, folder):
    one = reached(FOLDER, out=folder / "one")
    for answer in answers:
        assert close(one["params"], answer["stored"]["params"])
    mine, theirs = stored(folder / "one"), stored(folder / "several")
    assert close(mine["average"], theirs["average"])
    for name, value in mine["slots"].items():
        assert close(value, theirs["slots"][name]), name
    assert (mine["users"], mine["ledger"]) == (theirs["users"], theirs["ledger"])


def test_ranks_continue_the_run_of_one_process(answers, folder):
    one = reached(KILLED)
    assert stored(folder / "resumed")["ledger"][-1][0] == 4
    for answer in answers:
        assert close(one["params"], answer["resumed"]["params"])


#: The mistake on rank 1 or on both, and how it is refused.
REFUSED = {
    "plan": ("ranks-differ", "configuration"),
    "data": ("ranks-differ", "data"),
    "users": ("too-many-ranks", "2 ranks"),
    "engine": ("not-applicable", "loop"),
    "metrics": ("ranks-differ", "configuration"),
    "version": ("ranks-differ", "dpscaffold of rank 0 (1.0 and 1.1)"),
    "no gloo": ("backend-missing", "gloo"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_ranks_that_do_not_fit_are_refused_on_every_rank(mistake, answers, folder):
    code, word = REFUSED[mistake]
    for answer in answers:
        assert answer["refused"][mistake][0] == code
        assert word in answer["refused"][mistake][1]
    assert not (folder / "refused").exists()


@pytest.mark.parametrize("mistake", ["one rank", "no GPU on one rank"])
def test_what_one_rank_refuses_ends_the_others(mistake, answers, folder):
    (code, _), (other, said) = (answers[k]["refused"][mistake] for k in (1, 0))
    assert code in ("wrong-type", "device-not-found") and other == "rank-lost"
    assert "rank 0 lost contact with another rank" in said
    assert not (folder / "refused").exists()


def test_the_same_number_of_ranks_resumes_to_the_same_bits(found, answers, folder):
    copy = shutil.copytree(folder / "killed", folder / "copied")
    meant = answers[0]["cases"][FAST.index(Case("scaffold"))]["params"]
    for answer in values(on_ranks(2, folder, (resumes, copy))[0]):
        assert torch.equal(answer["params"], meant)


def test_a_killed_rank_ends_the_run_and_nothing_is_lost(found, folder):
    survivor, gone = found[1]
    assert gone == {"exit": -signal.SIGKILL}
    lost = survivor["error"]
    assert isinstance(lost, RankLost)
    assert "rank 0 lost contact" in str(lost)
    assert "in round 3" in str(lost) and "--resume" in str(lost)
    assert [round for round, _ in stored(folder / "killed")["ledger"]] == [1, 2, 3]
    ended = reached(KILLED, out=folder / "killed", resume=True)
    assert close(ended["params"], reached(KILLED)["params"])
