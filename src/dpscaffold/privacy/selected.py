"""What private tuning promises: all trials towards the server, the winner alone towards others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpscaffold.privacy.bound import (
    ALONE,
    PARTICIPANT,
    SERVER,
    THIRD_PARTY,
    VIEWS,
    Laws,
    no_guarantee,
    views_of,
)
from dpscaffold.privacy.bounds import RANDOM_PARTICIPATION, bound_for
from dpscaffold.privacy.composition import RunPart, together
from dpscaffold.privacy.costs import Cost, with_costs
from dpscaffold.privacy.drawn import FROM_SYSTEM
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.loss import privacy_parameters
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.record import JsonRecord, optional
from dpscaffold.privacy.selection import TrialCount, largest_profile, selected_profile
from dpscaffold.privacy.showing import round_up

COMPOSED = (
    "every trial and its score composed, the candidates being drawn before any ran (Zhu, Dong, "
    "Wang 2022)"
)
STOPPED = (
    "random stopping (Papernot and Steinke 2022, in the form of Koskela, Redberg, Wang 2024; see "
    "docs/privacy-proofs.md): the number of trials is hidden"
)


@dataclass(frozen=True)
class Trials:
    """What was run: the candidates' mechanisms, which of them were drawn, the law of how many, what
    one score costs (None: nothing), what preparing the data cost, once for all, and how many
    participants pool what they know."""

    candidates: tuple[Mechanism, ...]
    drawn: tuple[int, ...]
    stopping: TrialCount
    score: Cost | None
    preparation: tuple[Cost, ...] = ()
    colluders: int = 1

    @property
    def costs(self) -> tuple[Cost, ...]:
        """What every trial costs besides its training."""
        return () if self.score is None else (self.score,)


@dataclass(frozen=True, eq=False)
class WinnerGuarantee(JsonRecord):
    """ε towards a third party who is given the winner of a private tuning alone; ``method`` is the
    theorem."""

    adversary: str
    epsilon: float
    delta: float
    neighbours: str
    method: str


@dataclass(frozen=True, eq=False)
class AllTrialsGuarantee(JsonRecord):
    """ε towards the server, which saw all trials of a private tuning, and towards ``colluders``
    participants together. With secure sums ``alone`` is the ε if all other sites collude with the
    server."""

    adversary: str
    trials: int
    epsilon: float
    participant: float
    colluders: int
    delta: float
    neighbours: str
    method: str
    alone: float | None = optional()


@dataclass(frozen=True)
class SelectionCost:
    """ε by view at one δ; ``trials`` is how many there were, which only the server may know, and
    ``sees`` what the server sees of one trial."""

    epsilon: dict[str, float]
    delta: float
    neighbours: str
    trials: int
    method: dict[str, str]
    colluders: int = 1
    sees: str = VIEWS[SERVER]

    def sentence(self, stopping: TrialCount) -> str:
        """What each adversary can learn, every ε rounded up."""
        shown = {view: round_up(value) for view, value in self.epsilon.items()}
        several = self.colluders > 1
        them = f"{self.colluders} participants together" if several else "a participant"
        return (
            f"Tuned privately at delta = {self.delta:.3g}, for {self.neighbours}. Towards the "
            f"server, which saw every trial and score ({self.trials}): epsilon = {shown[SERVER]} "
            f"({shown[PARTICIPANT]} towards {them}). {self._alone()}Towards a third party who is "
            f"given the winner alone (values, model and score, not how many trials there were nor "
            f"how long they took): epsilon = {shown[THIRD_PARTY]}, the number of trials being "
            f"{stopping}. Training again with these values is a further run, whose epsilon adds."
        )

    def _alone(self) -> str:
        """What holds without secure sums, where there are any."""
        if ALONE not in self.epsilon:
            return ""
        return (
            f"It saw sums of uploads; if all other sites collude with it, epsilon = "
            f"{round_up(self.epsilon[ALONE])}. "
        )

    def to_third_parties(self) -> WinnerGuarantee:
        """What may be published with the winner; the number of trials is not in it."""
        return WinnerGuarantee(
            adversary="a third party, given the winner alone: " + VIEWS[THIRD_PARTY],
            epsilon=self.epsilon[THIRD_PARTY],
            delta=self.delta,
            neighbours=self.neighbours,
            method=self.method[THIRD_PARTY],
        )

    def to_server(self) -> AllTrialsGuarantee:
        """What the server and participants can learn from all trials."""
        return AllTrialsGuarantee(
            adversary="the server, in every trial: " + self.sees,
            trials=self.trials,
            epsilon=self.epsilon[SERVER],
            participant=self.epsilon[PARTICIPANT],
            colluders=self.colluders,
            delta=self.delta,
            neighbours=self.neighbours,
            method=self.method[SERVER],
            alone=self.epsilon.get(ALONE),
        )


def account(trials: Trials) -> SelectionCost:
    """ε towards the server and participants, who see all trials, and towards third parties, who see
    the winner; all at the candidates' largest δ.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=20, local_steps=5, users=60, cohort_size=12, records=800,
    ...                batch_sizes=160, noise=10, delta=1e-6)
    >>> found = account(Trials((run,), (0,) * 12, TrialCount(12.0), Cost("score", noise=20.0)))
    >>> found.epsilon["third_party"] < found.epsilon["server"], found.trials
    (True, 12)
    """
    _check(trials)
    delta = max(run.delta for run in trials.candidates)
    seen = [views_of(run) for run in trials.candidates]
    alone = [ALONE] if any(ALONE in views for views in seen) else []
    epsilon = {view: _all(trials, view, delta) for view in (SERVER, PARTICIPANT, *alone)}
    epsilon[THIRD_PARTY] = _winner(trials, delta)
    return SelectionCost(
        epsilon,
        delta,
        trials.candidates[0].neighbours,
        len(trials.drawn),
        {SERVER: COMPOSED, THIRD_PARTY: STOPPED},
        trials.colluders,
        "; or ".join(dict.fromkeys(views[SERVER] for views in seen)),
    )


def _check(trials: Trials) -> None:
    """Refuse candidates without a guarantee, or with different neighbours."""
    for run in trials.candidates:
        reason = no_guarantee(run)
        if reason or run.noise == 0:
            raise PrivacyError(
                "no-privacy", f"a candidate has no guarantee ({reason or 'no noise'})"
            )
        if run.neighbours != trials.candidates[0].neighbours:
            raise PrivacyError(
                "units-differ",
                f"candidates protect {trials.candidates[0].neighbours}, and {run.neighbours}; give "
                f"all of them the same unit and sampling",
            )


def _all(trials: Trials, view: str, delta: float) -> float:
    """Every trial, composed; what preparing the data cost counts once."""
    parts = []
    for place, drawn in enumerate(trials.drawn):
        run = replace(trials.candidates[drawn], delta=delta / len(trials.drawn))
        costs = (*trials.costs, *(trials.preparation if place == 0 else ()))
        bound = RANDOM_PARTICIPATION if view == ALONE else None
        bounds = {view: bound or bound_for(run, view, (), trials.colluders)}
        name = f"trial {place + 1}"  # each has noise and a draw of its own
        own = RunPart(name, run, run.rounds, bounds, None, costs, secret=True, drawn=FROM_SYSTEM)
        parts.append(own)
    if len(parts) == 1:
        return parts[0].epsilon(view)
    value = together(parts, fixed_in_advance=True).epsilon[view]
    return math.inf if value is None else value


def _winner(trials: Trials, delta: float) -> float:
    """The winner alone, then what preparing the data cost."""
    left = delta / 2 if trials.preparation else delta
    laws = [_laws(run, trials.costs) for run in _distinct(trials.candidates)]
    value = _by_profile(trials, laws, left)
    if not trials.preparation:
        return value
    law = privacy_parameters(value, left, max(value, 1e-6) / 256)
    return with_costs(law, trials.preparation).epsilon(delta)


def _distinct(runs: Sequence[Mechanism]) -> list[Mechanism]:
    """Candidates that differ in their mechanism: step sizes do not."""
    return list({str(run.to_dict()): run for run in runs}.values())


def _laws(run: Mechanism, costs: tuple[Cost, ...]) -> Laws:
    bound = bound_for(run, THIRD_PARTY)
    assert bound.laws is not None
    return tuple(with_costs(law, costs) for law in bound.laws(run, run.rounds))


def _by_profile(trials: Trials, laws: Sequence[Laws], delta: float) -> float:
    def epsilon_of(target: float) -> float:
        return max(law.epsilon(target) for each in laws for law in each)

    return selected_profile(trials.stopping, _profile(laws), epsilon_of, delta)


def _profile(laws: Sequence[Laws]) -> Any:
    return largest_profile([law.delta for each in laws for law in each])
