"""Numbers that follow from a privacy budget: the largest T of a plan, or its noise. Solved once
in a process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from dpscaffold.config import Configuration
from dpscaffold.data.config import DataSettings, Pooled, Synthetic
from dpscaffold.data.loading import load_federation
from dpscaffold.data.pool import held_out_size
from dpscaffold.errors import BadInput
from dpscaffold.federation.roster import Roster
from dpscaffold.paper.cases import Case
from dpscaffold.paper.formula import most_rounds
from dpscaffold.privacy import Mechanism, solve_noise


def run_of(settings: Configuration, sizes: Sequence[int] | None = None) -> Mechanism:
    """What a configuration does, for the accountant; ``sizes`` are its users' training records,
    where the data are at hand."""
    if any(
        getattr(step, "fit", None) == "private" for step in getattr(settings.data, "preprocess", ())
    ):
        raise BadInput(
            "step-not-counted",
            "data.preprocess has a private step, whose cost an experiment does not count; prepare "
            "the data and train single runs, or fit the step on public statistics",
        )
    run = settings.describe(sizes_of(settings.data) if sizes is None else sizes)
    assert run is not None
    return run


def sizes_of(data: DataSettings) -> tuple[int, ...]:
    """R_i of every user, (M,): from the configuration where it gives all users equally many
    records, else from the data."""
    pooled = isinstance(data, Pooled) and data.chosen_partition == "similarity"
    if data.declared_sizes is None and (isinstance(data, Synthetic) or pooled):
        users, records = data.users, data.records  # type: ignore[union-attr]
        if users and records and not data.size_spread:  # type: ignore[union-attr]
            test = held_out_size(records, data.test_ratio)  # type: ignore[union-attr]
            return (records - test,) * users
    return load_federation(data).roster.sizes


def solved_rounds(case: Case) -> Case:
    """The case with the largest T that the published bound allows at ``solve_epsilon``."""
    if case.solve_epsilon is None:
        return case
    run = replace(run_of(case.settings), rounds=1)
    epsilon = case.solve_epsilon
    rounds = remember("rounds", run, epsilon, lambda: most_rounds(run, epsilon))
    return replace(case.with_set({"plan.rounds": int(rounds)}), solve_epsilon=None)


def solved_noise(case: Case, roster: Roster | None = None) -> Case:
    """The case with the smallest noise that keeps its ``privacy.epsilon``, where that is given."""
    settings = case.settings
    if settings.privacy is None or settings.privacy.epsilon is None:
        return case
    run, epsilon = run_of(settings, roster.sizes if roster else None), settings.privacy.epsilon
    if not isinstance(epsilon, float):
        raise BadInput(
            "not-applicable",
            "privacy.epsilon is a table, and an experiment has one budget; give a number",
        )
    view = settings.privacy.view
    if view == "server" and settings.secure is None:
        # Its bound asks neither what users remember nor what they upload: one answer serves all.
        run = replace(run, memory=False, one_sum=False)
    who = settings.privacy.against(run)
    what = f"{view} {settings.privacy.colluders}" if view == "participant" else view
    noise = remember(what, run, epsilon, lambda: solve_noise(run, epsilon, who))
    solved = case.with_set({"privacy.noise": float(noise)})
    solved.tables["privacy"].pop("epsilon")
    return solved


#: Answers of this process: figures of the same runs ask for the same ones.
_known: dict[str, float] = {}


def remember(what: str, run: Mechanism, epsilon: float, solve: Callable[[], float]) -> float:
    """An answer, solved once in this process."""
    key = json.dumps([what, run.to_json(), epsilon], sort_keys=True)
    if key not in _known:
        _known[key] = float(solve())
    return _known[key]
