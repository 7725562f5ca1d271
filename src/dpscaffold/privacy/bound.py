"""What a bound is: a named way to bound ε, with its adversaries, its assumptions and its theorem.

The catalogue is in :mod:`dpscaffold.privacy.bounds`, the loss distributions behind it in
:mod:`dpscaffold.privacy.laws`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from dpscaffold.privacy.costs import Cost, with_costs
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.loss import LossDistribution
from dpscaffold.privacy.mechanism import Mechanism, Query, Sampling, Unit

SERVER, THIRD_PARTY, PARTICIPANT = "server", "third_party", "participant"
VIEWS = {
    SERVER: (
        "sees every upload of every user and who took part in each round (the "
        "honest-but-curious server)"
    ),
    THIRD_PARTY: (
        "sees every global model (x^t, c^t), not who took part, and is not a participant (anyone "
        "the model is handed to)"
    ),
    PARTICIPANT: (
        "users who took part and pool what they know: every global model and their own uploads, "
        "noise included"
    ),
}

#: The server once more, for runs with secure sums, if all other users collude with it.
ALONE = "alone"


def views_of(run: Mechanism) -> dict[str, str]:
    """The adversaries of a run by name, and what each of them sees."""
    if run.secure is None:
        return dict(VIEWS)
    k, least = run.secure.colluders, run.secure.least
    return {
        SERVER: (
            f"a server that may be hostile, together with at most {k} of the sites: it sees the "
            f"sum of the uploads of each list of at least {least} sites, and who took part"
        ),
        ALONE: (
            "the same server together with all other sites, which leaves a site nothing but its "
            "own noise; this needs no assumption about cryptography"
        ),
        THIRD_PARTY: VIEWS[THIRD_PARTY],
        PARTICIPANT: VIEWS[PARTICIPANT],
    }


REPEATED = "rounds were run again for the same participants with fresh noise"

Laws = tuple[LossDistribution, ...]
#: What one step is, as far as a proof asks: whom it protects and how batches are drawn.
Kind = tuple[Unit, Sampling]

#: What a description of a run may say, as far as any bound was proved for it.
KNOWN: Mapping[str, tuple[str, ...]] = {
    "unit": ("record", "user"),
    "sampling": ("fixed", "poisson"),
    "weighting": ("uniform", "records", "noise"),
    "query": ("gradients", "sums"),
    "aggregation": ("mean", "clipped"),
}
#: The fields of a description that the bounds take into account.
ACCOUNTED = frozenset(
    (
        *("rounds", "local_steps", "users", "cohort_size", "groups", "membership", "noise"),
        *("clip", "sampling", "unit", "memory", "weighting", "delta", "max_participations"),
        *("may_decline", "hidden_draw", "declared_sizes", "one_sum", "query"),
        *("secure", "voids", "protects", "aggregation"),
    )
)


@dataclass(frozen=True)
class Bound:
    """One way to bound ε, as data: who it holds against, what it takes for granted, where it is
    proved.

    ``proved_for`` lists the kinds of runs that the proof covers, as pairs of unit and sampling, and
    ``queries`` what they may sum; any other kind is refused, and so are users whose noise differs
    unless ``unequal`` says that the proof covers them. ``condition(run)`` gives a further
    reason why it does not apply, or None. ``laws(run, rounds)`` gives the loss distributions it
    rests on, or ``value(run, rounds, gaussians)`` its ε directly, together with further Gaussian
    mechanisms of these multipliers.
    """

    name: str
    title: str
    views: tuple[str, ...]
    theorem: str
    assumptions: tuple[str, ...]
    reference: str
    explanation: str
    proved_for: tuple[Kind, ...]
    condition: Callable[[Mechanism], str | None]
    laws: Callable[[Mechanism, int], Laws] | None = None
    value: Callable[[Mechanism, int, tuple[float, ...]], float] | None = None
    repeated: Callable[[Mechanism, int, tuple[int, ...]], Laws] | None = None
    queries: tuple[Query, ...] = ("gradients",)
    unequal: bool = False

    def explain(self) -> str:
        """What it says and why, in two sentences."""
        return self.explanation

    def theorem_for(self, run: Mechanism) -> str:
        """The theorem behind a statement about this run."""
        if run.query == "gradients":
            return self.theorem
        return f"{self.theorem}, with bounded sums for gradients (docs/privacy-proofs.md)"

    def applies(self, run: Mechanism) -> str | None:
        """None if the bound holds for this run, else the reason why it does not."""
        return no_guarantee(run) or self._unproved(run) or self.condition(run)

    def _unproved(self, run: Mechanism) -> str | None:
        """Why its proof does not cover this kind of run, or None."""
        if run.query not in self.queries:
            return f"it is proved for {' and '.join(self.queries)}, not for {run.query}"
        if run.unequal and not self.unequal:
            return "it is proved for users with equal noise, and here they differ"
        if (run.unit, run.sampling) in self.proved_for:
            return None
        covered = " or ".join(f"unit={u!r} with sampling={s!r}" for u, s in self.proved_for)
        kind = f"unit={run.unit!r} with sampling={run.sampling!r}"
        return f"it is proved for {covered}, not for {kind}"

    def epsilon(
        self,
        run: Mechanism,
        rounds: int | None = None,
        costs: Sequence[Cost] = (),
        repeats: Sequence[int] = (),
    ) -> float:
        """ε at the run's δ after ``rounds`` (all of them by default), with further mechanisms if
        given.

        ``repeats`` has one entry for each of these rounds that was run again for the same
        participants with fresh noise: how many times. ε is infinite without noise. Raises
        :class:`PrivacyError` where the bound does not apply.
        """
        reason = self.applies(run)
        if reason:
            raise PrivacyError(
                "bound-not-applicable", f"the bound {self.name!r} does not apply: {reason}"
            )
        rounds = run.rounds if rounds is None else rounds
        if rounds < 0:
            raise PrivacyError(
                "out-of-range", f"rounds={rounds} cannot have been run; give 0 or more"
            )
        if run.noise == 0.0:
            return math.inf if rounds else 0.0
        if repeats:
            if self.repeated is None:
                raise PrivacyError(
                    "bound-not-applicable", f"the bound {self.name!r} does not apply: {REPEATED}"
                )
            return largest_epsilon(
                self.repeated(run, rounds, tuple(repeats)), run.delta, tuple(costs)
            )
        if rounds == 0 and not costs:
            return 0.0
        if self.laws is None:
            return self._value(run, rounds, costs)
        return largest_epsilon(self.laws(run, rounds), run.delta, tuple(costs))

    def _value(self, run: Mechanism, rounds: int, costs: Sequence[Cost]) -> float:
        """ε given directly. Gaussian mechanisms are composed with it; the ε and δ of others add."""
        assert self.value is not None  # a bound has laws or a value
        others = [cost for cost in costs if cost.epsilon is not None]
        left = run.delta - sum(cost.delta for cost in others)
        if left <= 0.0:
            return math.inf
        gaussians = tuple(cost.noise for cost in costs if cost.noise is not None)
        value = self.value(replace(run, delta=left), rounds, gaussians)
        return value + sum(cost.epsilon or 0.0 for cost in others)


def largest_epsilon(laws: Laws, delta: float, costs: tuple[Cost, ...] = ()) -> float:
    """The larger ε over the directions of a neighbouring pair."""
    spoilt = sum(cost.delta for cost in costs)
    if spoilt >= delta:
        return math.inf
    value = max(with_costs(law, costs).epsilon(delta) for law in laws)
    if math.isinf(value):
        raise PrivacyError(
            "delta-too-small",
            f"delta={delta} is below what double precision can resolve after this many steps; give "
            f"a larger delta, or use the bound 'random_participation_rdp'",
        )
    return value


def _unknown(run: Mechanism) -> str | None:
    """What this description says that no bound was proved for, or None."""
    for name, proved in KNOWN.items():
        if getattr(run, name) not in proved:
            return (
                f"no bound is proved for {name}={getattr(run, name)!r}; give {' or '.join(proved)}"
            )
    if isinstance(run.clip, str) and run.clip != "median":
        return f"no bound is proved for clip={run.clip!r}; give a number"
    for field in fields(run):
        if field.name not in ACCOUNTED and getattr(run, field.name):
            return f"no bound takes {field.name}={getattr(run, field.name)!r} into account"
    return None


def no_guarantee(run: Mechanism) -> str | None:
    """Why no bound at all holds for this run, or None. A kind of run that no bound was proved for
    is refused, whatever it is: this is where a new kind first has to be named."""
    if reason := _unknown(run):
        return f"no guarantee: {reason}"
    if run.clip == "median":
        return (
            "no guarantee: the clip is computed from private data (clip='median'); give a "
            "fixed clip"
        )
    if run.unit == "user" and run.query == "sums":
        return (
            "no guarantee for a user's whole dataset: bounded sums are proved for single records; "
            "give unit='record'"
        )
    if run.unit == "user" and run.weighting == "records":
        return (
            "no guarantee for a user's whole dataset: weights by records reveal how many records "
            "a user has; give weighting='uniform'"
        )
    return None
