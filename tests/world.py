"""What tests of laws ask of the product, in words that no rewrite of it changes.

Suites that state what must hold whatever the inside looks like (privacy, crashes, clipping,
conformance) reach the product through this file alone, so that when an internal name moves, only
this file follows. It translates and computes nothing of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from dpscaffold import BadInput
from dpscaffold.privacy import (
    PAPER_THIRD_PARTY,
    RANDOM_PARTICIPATION_RDP,
    Ledger,
    Mechanism,
    PrivacyError,
    describe,
    largest_rounds,
)
from dpscaffold.privacy.bound import no_guarantee
from dpscaffold.privacy.bounds import bound_for
from dpscaffold.privacy.mechanism import SecureTerms


class Refused(BadInput):
    """Something that has no answer, with the code of the refusal."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Whatever refuses inside, it is one kind of refusal outside."""
    try:
        yield
    except (BadInput, PrivacyError) as reason:
        raise Refused(reason.code, str(reason)) from reason


# --- accounting ---------------------------------------------------------------------------------

View = Literal["server", "third_party", "participant"]


def _mechanism(
    *,
    users: int,
    cohort: int,
    rounds: int,
    local_steps: int,
    size: int | Sequence[int],
    batch: int | Sequence[int],
    noise: float,
    delta: float,
    clip: float | Literal["median"] = 1.0,
    sampling: Literal["fixed", "poisson"] = "fixed",
    unit: Literal["record", "user"] = "record",
    memory: bool = True,
    linear: bool | None = None,
    weighting: Literal["uniform", "records"] = "uniform",
    declines: bool = False,
    most: int | None = None,
    secure: tuple[int, int] | None = None,
    voids: int = 0,
    hidden: bool = False,
    louder: Sequence[float] | None = None,
) -> Mechanism:
    """T rounds of K noised steps, in each of which m of M users take part.

    Args:
        users: M.
        cohort: m.
        rounds: T.
        local_steps: K.
        size: R_i, one number or one per user.
        batch: b_i, likewise.
        noise: σ_g.
        delta: δ.
        clip: C.
        sampling: How a batch is drawn.
        unit: What is protected.
        memory: Whether users keep something between rounds, as in SCAFFOLD.
        linear: Whether an upload is one vector that is linear in the noised gradient; by default
            what is true of an algorithm with memory or without.
        weighting: Of the mean over participants.
        declines: Whether a drawn user may stay away.
        most: The most rounds that a user takes part in.
        secure: Colluders and the shortest list, where the server sees only sums.
        voids: How many attempts at a round may end without a result.
        hidden: Whether it stays secret who takes part.
        louder: σ_i over σ_g for each user.
    """
    return describe(
        rounds=rounds,
        local_steps=local_steps,
        users=users,
        cohort_size=cohort,
        records=size,
        batch_sizes=batch,
        noise=noise,
        clip=clip,
        sampling=sampling,
        unit=unit,
        memory=memory,
        one_sum=not memory if linear is None else linear,
        weighting=weighting,
        delta=delta,
        max_participations=most,
        may_decline="users may stay away" if declines else None,
        hidden_draw=hidden,
        secure=None if secure is None else SecureTerms(*secure),
        voids=voids,
        louder=louder,
    )


def epsilon(
    view: View, *, repeats: Sequence[int] = (), colluders: int = 1, **numbers: Any
) -> float:
    """ε towards an adversary over the draw of participants, before it is rounded for people.

    Args:
        view: Who tries to find out: the server, whoever is given the model, or participants.
        repeats: How often rounds were run again with fresh noise.
        colluders: How many participants pool what they know.
        numbers: What is run, as in :func:`_mechanism`.
    """
    with _refusing():
        run = _mechanism(**numbers)
        if reason := no_guarantee(run):
            raise Refused("no-privacy", reason)
        return bound_for(run, view, repeats, colluders).epsilon(run, repeats=repeats)


def epsilon_given(took_part: Sequence[Sequence[int]], **numbers: Any) -> dict[int, float]:
    """ε of each user who took part, given who took part in each round."""
    with _refusing():
        ledger = Ledger(_mechanism(**numbers))
        for round, cohort in enumerate(took_part, 1):
            ledger.record(round, cohort)
        users = Counter(user for cohort in took_part for user in cohort)
        found = {user: ledger.of(user) for user in users}
        assert ledger.largest() == max(found.values(), default=0.0)
        return found


def published_epsilon(**numbers: Any) -> float:
    """The number that the paper prints, which is no theorem for every loss."""
    with _refusing():
        return PAPER_THIRD_PARTY.epsilon(_mechanism(**numbers))


def published_rounds(epsilon: float, **numbers: Any) -> int:
    """The largest T for which the paper's number is at most ε."""
    with _refusing():
        return largest_rounds(_mechanism(**numbers), epsilon, PAPER_THIRD_PARTY)


def renyi_epsilon(**numbers: Any) -> float:
    """ε over the draw by Rényi divergences: looser, and computed by other means."""
    with _refusing():
        return RANDOM_PARTICIPATION_RDP.epsilon(_mechanism(**numbers))
