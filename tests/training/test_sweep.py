"""Independent runs on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import on_ranks, values

from dpscaffold.config import load
from dpscaffold.errors import BadInput
from dpscaffold.runs.folder import RunFolder
from dpscaffold.training.distributed import join
from dpscaffold.training.from_config import run_seeds
from dpscaffold.training.sweep import agree, each, of_rank_0, shared_by
from dpscaffold.tuning.settings import TuneSettings
from dpscaffold.tuning.tuning import tune

TABLES = {"data": {"users": 5, "records": 30}, "plan": {"rounds": 2, "local_steps": 2}}
GRID = {"plan.learning_rate": [0.1, 0.5], "plan.local_steps": [1, 2]}


def tuned() -> dict[str, tuple[float, ...]]:
    import torch

    table = TuneSettings.model_validate({"folds": 2, "grid": GRID})
    scores = tune(load(None, [], TABLES), table, torch.device("cpu")).scores
    return {str(score.values): score.accuracies for score in scores}


def refused(work: Any) -> tuple[str, str]:
    with pytest.raises((BadInput, RuntimeError)) as caught:
        list(work())
    return getattr(caught.value, "code", ""), str(caught.value)


def sweep(rank: int, folder: Path) -> dict[str, Any]:
    """What a rank does and finds."""
    tried: list[tuple[int, int]] = []

    def unlucky(k: int) -> int:
        tried.append((rank, k))
        if rank == 1 and k == 1:
            raise MemoryError("no room")
        return 10 * k

    def broken(k: int) -> int:
        raise OSError(f"disk {k}")

    def wrong(k: int) -> int:
        if k == 1:
            raise BadInput("out-of-range", "seed is -1; give another")
        return k

    names = ["first", "second", "third"]
    ranks = join("cpu", distributed=True)
    with shared_by(ranks):
        found: dict[str, Any] = {"answers": list(each(names, unlucky)), "tried": tried}
        found["nested"] = list(each(["a", "b"], lambda k: list(each(["c"], lambda j: rank))))
        found["failed twice"] = refused(lambda: each(["one run"], broken))
        found["refused"] = refused(lambda: each(names, wrong))
        found["of rank 0"] = of_rank_0(rank)
        with pytest.raises(BadInput) as caught:
            agree("configuration", str(rank))
        found["differ"] = caught.value.code
        found["tuned"] = tuned()
        places = run_seeds(load(None, [], TABLES), folder, 3, quiet=True)
    found["seeds"] = [place.name for place in places]
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    return values(on_ranks(2, folder, (sweep, folder / "several"))[0]), folder


def test_every_rank_gets_every_answer_and_a_failed_run_is_tried_once_more(answers):
    first, second = answers[0]
    assert first["answers"] == second["answers"] == [0, 10, 20]
    assert first["tried"] == [(0, 0), (0, 1), (0, 2)] and second["tried"] == [(1, 1)]
    assert first["nested"] == [[0], [1]]


def test_what_fails_twice_or_is_refused_ends_the_command_on_all_ranks(answers):
    for found in answers[0]:
        assert found["failed twice"] == ("", "one run failed on two ranks: disk 0")
        assert found["refused"] == ("out-of-range", "rank 1: seed is -1; give another")
        assert (found["of rank 0"], found["differ"]) == (0, "ranks-differ")


def test_ranks_tune_as_one_process_does(answers):
    expected = tuned()
    for found in answers[0]:
        assert found["tuned"].keys() == expected.keys()
        for point, accuracies in expected.items():
            assert found["tuned"][point] == pytest.approx(accuracies, rel=1e-6)


def test_ranks_share_seeds(answers):
    found, folder = answers
    run_seeds(load(None, [], TABLES), folder / "one", 3, quiet=True)
    assert found[0]["seeds"] == found[1]["seeds"] == ["seed-0", "seed-1", "seed-2"]
    for name in found[0]["seeds"]:
        one, several = (RunFolder(folder / part / name) for part in ("one", "several"))
        for mine, theirs in zip(one.metrics(), several.metrics(), strict=True):
            assert mine.round == theirs.round
            assert mine.metrics.keys() == theirs.metrics.keys()
            for key, value in mine.metrics.items():
                assert theirs.metrics[key] == (value and pytest.approx(value, rel=1e-6)), key
