"""Numbers that follow from a privacy budget: the largest T of a plan, or its noise. Solved once,
then kept."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from dpscaffold.checks import floor_share
from dpscaffold.config import Settings
from dpscaffold.errors import BadInput
from dpscaffold.optimum import cache_folder
from dpscaffold.paper.cases import Case
from dpscaffold.privacy import (
    PAPER_THIRD_PARTY,
    Run,
    calibrate_noise,
    describe,
    largest_rounds,
)
from dpscaffold.privacy.ledger import USER_BUDGET


def description(settings: Settings, rounds: int | None = None) -> Run:
    """What a configuration does, for the accountant, without loading its data: all users hold R
    records."""
    data, plan, privacy = settings.data, settings.plan, settings.privacy
    assert privacy is not None
    if any(getattr(step, "fit", None) == "private" for step in getattr(data, "preprocess", ())):
        raise BadInput(
            "data.preprocess has a private step, whose cost an experiment does not count; prepare "
            "the data and train single runs, or fit the step on public statistics"
        )
    users, records = data.users or 100, data.records or 5000  # type: ignore[union-attr]
    train = records - round(data.test_ratio * records)  # type: ignore[union-attr]
    return describe(
        rounds=rounds or plan.rounds,
        local_steps=plan.local_steps,
        users=users,
        participants=floor_share(plan.user_ratio, users),
        records=train,
        batches=floor_share(plan.data_ratio, train),
        noise=privacy.noise if privacy.noise is not None else 1.0,
        clip=privacy.clip,
        sampling=privacy.sampling,
        unit=privacy.unit,
        memory=settings.algorithm.build().memory,
        weighting=plan.weighting,
        delta=privacy.delta,
        max_participations=privacy.max_participations,
        may_decline=USER_BUDGET if privacy.user_epsilon is not None else None,
    )


def solved_rounds(case: Case) -> Case:
    """The case with the largest T that the published bound allows at ``solve_epsilon``."""
    if case.solve_epsilon is None:
        return case
    run = description(case.settings, rounds=1)
    epsilon = case.solve_epsilon
    rounds = remember(
        "rounds", run, epsilon, lambda: largest_rounds(run, epsilon, PAPER_THIRD_PARTY)
    )
    return replace(case.with_set({"plan.rounds": int(rounds)}), solve_epsilon=None)


def solved_noise(case: Case) -> Case:
    """The case with the smallest noise that keeps its ``privacy.epsilon``, where that is given."""
    settings = case.settings
    if settings.privacy is None or settings.privacy.epsilon is None:
        return case
    run, epsilon, view = description(settings), settings.privacy.epsilon, settings.privacy.view
    if (
        view == "server"
    ):  # its bound does not ask whether users remember anything: one answer serves all
        run = replace(run, memory=False)
    bound = settings.privacy.budget.bound(run)
    what = f"{view} {settings.privacy.colluders}" if view == "participant" else view
    noise = remember(what, run, epsilon, lambda: calibrate_noise(run, epsilon, bound))
    solved = case.with_set({"privacy.noise": float(noise)})
    solved.tables["privacy"].pop("epsilon")
    return solved


def remember(what: str, run: Run, epsilon: float, solve: Callable[[], float]) -> float:
    """An answer from this process, from the cache folder, or solved now and kept in both."""
    content = json.dumps([what, run.to_dict(), epsilon, 1], sort_keys=True)
    key = hashlib.blake2b(content.encode(), digest_size=12).hexdigest()
    return _stored(key, _Solve(solve))


class _Solve:
    """A computation that does not count in the key of a cache."""

    def __init__(self, solve: Callable[[], float]) -> None:
        self.solve = solve

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Solve)


@cache
def _stored(key: str, solve: _Solve) -> float:
    path = cache_folder() / "solved" / f"{key}.json"
    try:
        return float(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        value: Any = solve.solve()
    _write(path, json.dumps(value))
    return float(value)


def _write(path: Path, text: str) -> None:
    """Keep the answer where there is a writable place for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        return
