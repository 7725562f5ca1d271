"""A run on several processes is the run of one process, bit for bit."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from rank_cases import (
    APART,
    FAST,
    FOLDER,
    KILLED,
    LAYOUTS,
    ON_GPUS,
    REDUCED,
    Case,
    Special,
    all_cases,
    dies,
    dies_on_a_gpu,
    layout_rows,
    on_gpus,
    reached,
    small_matrix,
    stored,
)
from ranks import on_ranks, values
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
    assert torch.equal(one["own"], several["own"])
    assert one["ended"] == several["ended"] and one["privacy"] == several["privacy"]
    for mine, theirs in zip(one["history"], several["history"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():  # reduced in another order than that of one process
            assert theirs[name] == (value and pytest.approx(value, 1e-4, 1e-6)), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder):
    """What two ranks came to in one session: of the cases, and of a run whose rank 1 is killed at
    the end. One of their runs was begun by one process."""

    def stop(round: int, row: object) -> None:
        if round == 3:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        reached(KILLED, out=folder / "resumed", observer=stop)
    assert RunFolder(folder / "resumed").load_checkpoint().state.round == 2
    return on_ranks(2, folder, (small_matrix, folder), (dies, folder / "killed"))


@pytest.fixture(scope="module")
def answers(found):
    return values(found[0])


@pytest.mark.parametrize("number", range(len(FAST)), ids=lambda number: str(FAST[number]))
def test_two_ranks_change_no_bit(number, answers):
    one = reached(FAST[number])
    for answer in answers:
        assert_same(one, answer["cases"][number])


@pytest.mark.parametrize("number", range(len(APART)), ids=lambda number: str(APART[number]))
def test_ranks_that_compute_their_own_users_change_no_bit(number, answers):
    for answer in answers:
        assert_same(answers[0]["cases"][FAST.index(APART[number])], answer["apart"][number])


@pytest.mark.parametrize("number", range(len(REDUCED)), ids=lambda number: str(REDUCED[number]))
def test_uploads_that_are_reduced_as_on_gpus_differ_in_the_last_bits_alone(number, answers):
    one = reached(REDUCED[number])
    for answer in answers:
        several = answer["reduced"][number]
        assert torch.allclose(one["params"], several["params"], rtol=1e-4, atol=1e-5)
        assert one["privacy"] == several["privacy"]


needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_a_gpu
def test_ranks_on_gpus_come_to_what_one_process_does(tmp_path):
    """Over NCCL; the same records are drawn, and sums differ in their last bits."""
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
    assert "rank 1 does not answer any more in round 2" in str(survivor["error"])


def test_ranks_that_have_all_records_divide_participants_evenly(answers):
    assert [answer["rows"] for answer in answers] == [[4] * 4, [4] * 4]


@pytest.fixture(scope="module")
def everything():
    """All cases, and what one process comes to."""
    cases = not_skipped(EVERYTHING)
    return cases, [reached(case) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("even", [True, False], ids=["even", "own users"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_no_number_of_ranks_changes_a_bit(count, even, everything, tmp_path):
    cases, expected = everything
    for answer in values(on_ranks(count, tmp_path, (all_cases, cases, even), limit=3600)[0]):
        for case, one, several in zip(cases, expected, answer, strict=True):
            try:
                assert_same(one, several)
            except AssertionError as error:
                raise AssertionError(f"{case} on {count} ranks") from error


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=lambda number: str(LAYOUTS[number]))
def test_sums_that_ranks_pass_on_have_the_bits_of_one_process(number, answers):
    count, size, _ = LAYOUTS[number]
    rows, weights = layout_rows(count)
    mean, total = torch.zeros(320), torch.zeros(320)
    for k in range(0, count, size):
        part = torch.zeros(320)
        for weight, row in zip(weights[k : k + size], rows[k : k + size], strict=True):
            part = torch.addcmul(part, weight, row)
        mean = mean + part
        total = total + rows[k : k + size].sum(0)
    found = answers[0]["sums"][number]
    assert torch.equal(found["mean"], mean) and torch.equal(found["total"], total)


def test_a_rank_that_leaves_before_it_was_met_says_why(answers):
    code, said = answers[0]["left"]
    assert code == "bad-value" and said.startswith("rank 1 on ") and "no such thing" in said


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
    "version": ("ranks-differ", "dpscaffold of rank 0 (1.0 and 1.1)"),
    "no NCCL": ("backend-missing", "nccl"),
    "no NCCL on one rank": ("backend-missing", "nccl"),
    "no gloo": ("backend-missing", "gloo"),
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


def test_a_killed_rank_ends_the_run_and_nothing_is_lost(found, folder):
    survivor, gone = found[1]
    assert gone == {"exit": -signal.SIGKILL}
    lost = survivor["error"]
    assert isinstance(lost, RankLost) and lost.reporter == 0
    assert "rank 1" in str(lost) and "in round 3" in str(lost) and "--resume" in str(lost)
    assert [round for round, _ in stored(folder / "killed")["ledger"]] == [1, 2, 3]
    ended = reached(KILLED, out=folder / "killed", resume=True)
    assert torch.equal(ended["params"], reached(KILLED)["params"])
