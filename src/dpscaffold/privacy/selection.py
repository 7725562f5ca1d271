"""The best of a random number of private trials: what whoever sees only the winner can learn.

A mechanism Q (a candidate drawn at random, trained and scored) is run J times and the best output
is released, by an order on outputs that is fixed beforehand. J is drawn independently of the data,
and neither J nor any other output is released. If J were a constant, the ε of the winner could grow
with it; a random J hides how many trials were lost (Liu and Talwar 2019; Papernot and Steinke
2022). docs/privacy-proofs.md has the conditions and the proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpscaffold.errors import BadInput
from dpscaffold.privacy.accounting import losses
from dpscaffold.privacy.adversary import ALONE, THIRD_PARTY, adversaries, no_guarantee
from dpscaffold.privacy.loss import Loss, privacy_parameters
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.numbers import digits_up, round_up
from dpscaffold.privacy.parts import Part, over_the_draw
from dpscaffold.privacy.preparation import Cost, with_costs
from dpscaffold.privacy.seeds import FROM_SYSTEM

#: The largest mean of the number of trials.
MOST = 1_000_000

#: Where ε̂ of the profile's bound is looked for.
GRID = np.geomspace(1e-4, 30, 160).tolist()


@dataclass(frozen=True)
class TrialCount:
    """The geometric law of J, the number of trials: P[J = j] = γ(1−γ)^{j−1} with γ = 1/E[J].

    >>> TrialCount(mean=10.0).gamma
    0.1
    """

    mean: float

    def __post_init__(self) -> None:
        if not 1 < self.mean <= MOST:
            raise BadInput(
                "out-of-range",
                f"the mean number of trials is {self.mean:g}; give a number above 1 and at most "
                f"{MOST:,}",
            )

    @property
    def gamma(self) -> float:
        """The probability that a trial is the last."""
        return 1 / self.mean

    def draw(self, uniform: float) -> int:
        """J from a uniform number in [0, 1), by inversion of its distribution function."""
        return 1 + math.floor(math.log1p(-uniform) / math.log1p(-self.gamma))

    def __str__(self) -> str:
        return f"geometric with mean {self.mean:g}"


@dataclass(frozen=True)
class Trials:
    """What was run.

    Attributes:
        candidates: The candidates' mechanisms.
        drawn: Which of them were drawn, by their places.
        count: The law of how many.
        score: What one score costs; None where it costs nothing.
        preparation: What preparing the data cost, once for all.
        colluders: How many participants pool what they know.
    """

    candidates: tuple[Mechanism, ...]
    drawn: tuple[int, ...]
    count: TrialCount
    score: Cost | None
    preparation: tuple[Cost, ...] = ()
    colluders: int = 1

    def __post_init__(self) -> None:
        for run in self.candidates:
            if reason := no_guarantee(run):
                raise BadInput("no-privacy", f"a candidate has no guarantee ({reason})")
            if run.neighbours != self.neighbours:
                raise BadInput(
                    "units-differ",
                    f"candidates protect {self.neighbours}, and {run.neighbours}; "
                    f"give all of them the same unit and sampling",
                )

    @property
    def delta(self) -> float:
        """The δ of what is stated: the candidates' largest."""
        return max(run.delta for run in self.candidates)

    @property
    def neighbours(self) -> str:
        """Which pairs of datasets all of them hide from one another."""
        return self.candidates[0].neighbours

    @property
    def costs(self) -> tuple[Cost, ...]:
        """What every trial costs besides its training."""
        return () if self.score is None else (self.score,)


def epsilon_of_all(trials: Trials) -> dict[str, float]:
    """ε towards everybody who sees every trial, by adversary: the trials composed, the candidates
    being drawn before any ran; what preparing the data cost counts once.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=20, local_steps=5, users=60, cohort_size=12, records=800,
    ...                batch_sizes=160, noise=10, delta=1e-6)
    >>> trials = Trials((run,), (0,) * 12, TrialCount(12.0), Cost("score", noise=20.0))
    >>> epsilon_of_winner(trials) < epsilon_of_all(trials)["server"]
    True
    """
    share = trials.delta / len(trials.drawn)
    parts = [
        Part(
            replace(trials.candidates[drawn], delta=share),
            trials.candidates[drawn].rounds,
            costs=(*trials.costs, *(trials.preparation if place == 0 else ())),
            name=f"trial {place + 1}",  # each has noise and a draw of its own
            secret=True,
            drawn=FROM_SYSTEM,
        )
        for place, drawn in enumerate(trials.drawn)
    ]
    names = dict.fromkeys(name for run in trials.candidates for name in adversaries(run))
    return {
        name: over_the_draw(parts, name, trials.colluders, fixed_in_advance=True).epsilon
        for name in names
        if name != THIRD_PARTY.name
    }


def epsilon_of_winner(trials: Trials) -> float:
    """ε towards whoever is given the winner alone, then what preparing the data cost."""
    left = trials.delta / 2 if trials.preparation else trials.delta
    laws = [
        law
        for run in dict.fromkeys(trials.candidates)
        for law in losses(run, adversaries(run)["third_party"], costs=trials.costs)
    ]
    value = selected(trials.count, laws, left)
    if not trials.preparation:
        return value
    law = privacy_parameters(value, left, max(value, 1e-6) / 256)
    return with_costs(law, trials.preparation).epsilon(trials.delta)


def selected(count: TrialCount, laws: Sequence[Loss], delta: float) -> float:
    """ε of the winner at δ, of candidates each of which has one of these losses: a coin that does
    not look at the data may tell which, so their profile is at most the largest.

    For every ε̂ with δ̂ = δ_Q(ε̂): δ′(ε + 2·log(e^ε̂ + δ̂(1−γ)/γ)) ≤ E[J]·δ_Q(ε), so ε′ is
    ε_Q(δ/E[J]) plus the smallest such term (docs/privacy-proofs.md; Koskela, Redberg, Wang 2024).

    >>> pure = privacy_parameters(0.5, 0.0, 0.25)
    >>> round(selected(TrialCount(5.0), [pure], 1e-6), 6)  # 3ε
    1.5
    """
    alone = max(law.epsilon(delta / count.mean) for law in laws)
    odds = (1 - count.gamma) / count.gamma

    def term(hat: float) -> float:
        most = max(law.delta(hat) for law in laws)
        return float(np.logaddexp(hat, math.log(odds * max(most, 1e-300))))

    return alone + 2 * min(term(hat) for hat in (*GRID, alone))


@dataclass(frozen=True)
class SelectionCost:
    """What a private tuning cost: ε of all trials by adversary, and of the winner alone, at one δ.
    How many trials there were only the server may know."""

    trials: Trials
    all_trials: dict[str, float]
    winner: float

    @classmethod
    def of(cls, trials: Trials) -> SelectionCost:
        """What these trials cost."""
        return cls(trials, epsilon_of_all(trials), epsilon_of_winner(trials))

    def for_third_parties(self) -> dict[str, object]:
        """What may be published with the winner; the number of trials is not in it."""
        return {
            "epsilon": self.winner,
            "delta": self.trials.delta,
            "neighbours": self.trials.neighbours,
            "number_of_trials": str(self.trials.count),
        }

    def for_server(self) -> dict[str, object]:
        """What the server and participants can learn from all trials."""
        return {
            "epsilon": self.all_trials,
            "delta": self.trials.delta,
            "neighbours": self.trials.neighbours,
            "trials": len(self.trials.drawn),
            "colluders": self.trials.colluders,
        }

    def sentence(self) -> str:
        """What each adversary can learn, every ε rounded up."""
        trials = self.trials
        shown = {name: round_up(value) for name, value in self.all_trials.items()}
        alone = ""
        if ALONE.name in shown:
            alone = f", {shown[ALONE.name]} if all other sites collude with it"
        return (
            f"Tuned privately at delta = {digits_up(trials.delta)}, for {trials.neighbours}. "
            f"Towards the server, which saw all {len(trials.drawn)} trials and scores: epsilon = "
            f"{shown['server']}{alone} ({shown['participant']} towards participants). Towards "
            f"whoever is given the winner alone: epsilon = {round_up(self.winner)}, the number of "
            f"trials being {trials.count}. Training again with it is a further run, whose epsilon "
            f"adds."
        )
