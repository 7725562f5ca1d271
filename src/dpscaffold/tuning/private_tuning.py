"""Tuning with a valid ε: a random number of random candidates, trained and scored privately.

J is drawn first, then J candidates with replacement from the grid, each equally likely. Every trial
trains with noise and participants of its own, drawn from the operating system, and is scored: on
public records, or by sums of bounded scores to which every user adds noise. The best score wins.
The server sees all of it, so towards it the trials compose; whoever is given the winner alone is
protected by the random J (:mod:`dpscaffold.privacy.selection`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from dpscaffold.config import Configuration, Run
from dpscaffold.data.loading import load_federation
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation, Records
from dpscaffold.privacy import Cost, Mechanism, charged
from dpscaffold.privacy.page import Statement
from dpscaffold.privacy.preparation import left_open
from dpscaffold.privacy.selection import SelectionCost, Trials
from dpscaffold.privacy.statement import of_winner
from dpscaffold.training.events import (
    Listener,
    StackBegun,
    StopRequested,
    silence,
)
from dpscaffold.training.stack import Outcome, Schedule, split, train_stack
from dpscaffold.tuning.folds import fold_federation
from dpscaffold.tuning.private_scores import ScoreRule, comparison, scored
from dpscaffold.tuning.settings import TuneSettings
from dpscaffold.tuning.tuning import with_values

#: The name of what scores cost.
SCORE = "validation score"


class CandidateSource(Protocol):
    """Where J and the candidates come from."""

    def random(self) -> float:
        """A number in [0, 1)."""

    def randrange(self, start: int, /) -> int:
        """An integer below it."""


class StoppedTrials(StopRequested):
    """Tuning was stopped while trials ran: ``spent`` is what the server learns from all that were
    drawn, and so at most what it has learnt."""

    def __init__(self, signal: str, spent: SelectionCost) -> None:
        super().__init__(signal)
        self.spent = spent


@dataclass(frozen=True)
class PrivateTrial:
    """One candidate as it was trained: its values, its score (None where it diverged), the
    parameters it gave, and its mechanism."""

    values: dict[str, Any]
    score: float | None
    model: Tensor | None = field(repr=False)
    run: Mechanism | None = field(default=None, repr=False)


@dataclass(frozen=True)
class PrivateTuningResult:
    """Every trial, which the server has seen, the winner, and what each adversary can learn.

    Only :meth:`released` may be given to others: the number of trials, their scores and how long
    they took belong to the server.
    """

    settings: Configuration
    tune: TuneSettings
    trials: tuple[PrivateTrial, ...]
    privacy: SelectionCost
    title: str
    federation: Federation = field(repr=False)
    scored_on: str
    outside: tuple[str, ...]
    compared: ScoreRule

    @property
    def winner(self) -> PrivateTrial:
        """The best score, the first of equals. Where all diverged: the first point of the grid,
        untrained, which depends on no record."""
        finite = [trial for trial in self.trials if trial.score is not None]
        if not finite:
            first = {key: values[0] for key, values in self.tune.grid.items()}
            return PrivateTrial(first, None, None)
        return max(finite, key=lambda trial: self.compared.sign * (trial.score or 0.0))

    @property
    def privacy_note(self) -> str:
        """What tuning cost, for statements and reports: one sentence for each adversary, and what
        stands outside them."""
        said = self.privacy.sentence()
        return f"{said} Outside the guarantee: {' '.join(self.outside)}" if self.outside else said

    def best_tables(self) -> dict[str, Any]:
        """The configuration with the winner's values set."""
        best = with_values(self.settings, self.winner.values)
        return best.model_dump(mode="json", exclude_none=True)

    def released(self) -> dict[str, Any]:
        """What a third party may be given: the winner, and what that says of the records."""
        return {
            "values": self.winner.values,
            "score": self.winner.score,
            "metric": self.compared.metric.name,
            "scored_on": self.scored_on,
            "privacy": {**self.privacy.for_third_parties(), "outside": list(self.outside)},
        }

    def statement(self) -> Statement:
        """The privacy statement of the winner, as its model carries it; it needs one."""
        assert self.winner.run is not None
        run = replace(self.winner.run, delta=self.privacy.trials.delta)
        steps = self.federation.roster.schema.preparation
        return of_winner(run, self.privacy.winner, steps, self.outside)

    def seen_by_server(self) -> dict[str, Any]:
        """Every trial and what they cost together, for the server's own records."""
        trials = [{"values": trial.values, "score": trial.score} for trial in self.trials]
        privacy = {**self.privacy.for_server(), "outside": list(self.outside)}
        return {"trials": trials, "privacy": privacy}


def tune_privately(
    settings: Configuration,
    table: TuneSettings,
    device: torch.device,
    tell: Listener = silence,
    choosing: CandidateSource | None = None,
) -> PrivateTuningResult:
    """Draw how many candidates to try and which, train and score them, and account for it."""
    points = [
        dict(zip(table.grid, values, strict=True)) for values in product(*table.grid.values())
    ]
    whole = load_federation(settings.data)
    compared = comparison(table, whole.target)
    trained, held_out, scored_on = _records(settings, table, whole)
    candidates = [_candidate(with_values(settings, point).setting(trained)) for point in points]
    runs = [_described(one, whole) for one in candidates]
    score = _score_cost(table, runs[0])
    stream: CandidateSource = secrets.SystemRandom() if choosing is None else choosing
    # before anything runs, and whatever comes of it
    drawn = [stream.randrange(len(points)) for _ in range(table.stopping_law.draw(stream.random()))]
    prepared = whole.roster.schema.preparation
    costs, unprotected = charged(prepared, runs[0])
    colluders = candidates[0].limits.colluders
    trials_run = Trials(tuple(runs), tuple(drawn), table.stopping_law, score, costs, colluders)
    privacy = SelectionCost.of(trials_run)
    try:
        outcomes = _train([_fresh(candidates[p]) for p in drawn], trained, device, tell)
    except StopRequested as stopped:
        raise StoppedTrials(str(stopped), privacy) from None
    sizes = trained.roster.sizes
    trials = tuple(
        PrivateTrial(
            points[p],
            scored(outcome, held_out, compared, table, runs[0], sizes),
            outcome.model,
            runs[p],
        )
        for p, outcome in zip(drawn, outcomes, strict=True)
    )
    outside = tuple(left_open([*prepared, *unprotected]))
    return PrivateTuningResult(
        settings, table, trials, privacy, whole.title, whole, scored_on, outside, compared
    )


def _records(
    settings: Configuration, table: TuneSettings, whole: Federation
) -> tuple[Federation, Records, str]:
    """What candidates train on, and what they are evaluated on."""
    target = whole.target
    if table.public is None:
        fold = fold_federation(whole, 0, table.folds)
        return fold, fold.test, f"one of {table.folds} parts of every user's records, held out"
    public = load_federation(table.public)
    if (public.dimension, public.target) != (whole.dimension, target):
        raise BadInput(
            "public-records-differ",
            f"tune.public has {public.dimension} features and the target {public.target}, and the "
            f"private records {whole.dimension} and {target}; give public records of one kind "
            f"with them",
        )
    return whole, public.train, f"public records ({public.title})"


def _candidate(setting: Run) -> Run:
    """The run of a candidate, its noise from the operating system."""
    if setting.privacy is None or setting.privacy.noise == 0:
        raise BadInput(
            "no-noise",
            "tuning is private, and a candidate trains without noise; give [privacy] a noise "
            "or an epsilon, and none of tune.grid 0",
        )
    limit = setting.limits.user_epsilon
    if limit is not None:
        raise BadInput(
            "not-applicable",
            f"privacy.user_epsilon is {limit:g}, and private tuning keeps no such "
            f"limit over its trials; leave it out, and read what they cost together",
        )
    return replace(setting, privacy=setting.privacy.changed(secret=True))


def _described(setting: Run, whole: Federation) -> Mechanism:
    """The candidate for the accountant, at the δ of all training records."""
    delta = replace(setting, roster=whole.roster).describe()
    assert delta is not None
    run = setting.describe(delta.delta)
    assert run is not None
    return run


def _fresh(setting: Run) -> Run:
    """A trial draws its participants from a seed of its own, of the operating system."""
    return replace(setting, plan=setting.plan.changed(seed=None))


def _score_cost(table: TuneSettings, run: Mechanism) -> Cost | None:
    """What a score costs: nothing on public records, else a Gaussian of this multiplier."""
    if table.public is not None:
        return None
    if table.score_noise is None:
        raise BadInput(
            "missing-key",
            "tuning is private, and candidates are scored on private records: give "
            "tune.score_noise, the deviation of the noise that every user adds to its count of "
            "right answers (10, say; in units of tune.score_bound for errors), or [tune.public] "
            "records that are public",
        )
    if run.relation == "add-remove":
        raise BadInput(
            "neighbours-not-proved",
            "data.declared_sizes is given, so that neighbours add or remove a record, and one "
            "record more would change which records are held out; leave the sizes out, or score on "
            "[tune.public] records",
        )
    return Cost(SCORE, noise=table.score_noise)


def _train(
    settings: Sequence[Run], federation: Federation, device: torch.device, tell: Listener
) -> list[Outcome]:
    """All trials, side by side where their shapes agree; no accuracy is reported on the way."""
    outcomes: dict[int, Outcome] = {}
    stacks = split(settings, device) if settings else []
    for number, stack in enumerate(stacks, 1):
        first = settings[stack[0]].plan
        work = float(sum(settings[k].cohort_size for k in stack)) * first.rounds
        tell(StackBegun("private tuning", number, len(stacks), first.rounds, work))
        chosen = [settings[k] for k in stack]
        found = train_stack(chosen, [federation] * len(stack), Schedule(), device, tell)
        outcomes |= dict(zip(stack, found, strict=True))
    return [outcomes[k] for k in range(len(settings))]


def as_lines(values: Mapping[str, Any]) -> str:
    """Values of a candidate on one line."""
    shown = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in values.items()}
    return ", ".join(f"{key} = {value}" for key, value in shown.items())
