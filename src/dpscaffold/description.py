"""What a run does, as data for the accountant: the one path from sizes to a description.

Training, experiments and commands come here, so that what runs and what is stated cannot differ.
PyTorch is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from dpscaffold.algorithms import Algorithm
from dpscaffold.checks import floor_share
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Mechanism, describe
from dpscaffold.privacy.describe import Delta


class Shares(TypedDict):
    """How many of the users take part in a round, and how many of its records each draws."""

    cohort_size: int
    batch_sizes: list[int]


def shares(sizes: Sequence[int], user_ratio: float, data_ratio: float) -> Shares:
    """m = ⌊lM⌋ and b_i = ⌊sR_i⌋, where there is no plan to ask."""
    cohort_size = floor_share(user_ratio, len(sizes))
    if cohort_size < 1:
        raise BadInput(f"a user ratio of {user_ratio} selects none of {len(sizes)} users")
    return Shares(
        cohort_size=cohort_size, batch_sizes=[floor_share(data_ratio, size) for size in sizes]
    )


def describe_run(
    sizes: Sequence[int],
    algorithm: Algorithm,
    *,
    rounds: int,
    local_steps: int,
    cohort_size: int,
    batch_sizes: Sequence[int],
    noise: float,
    clip: float | Literal["median"] = 1.0,
    sampling: Literal["fixed", "poisson"] = "fixed",
    unit: Literal["record", "user"] = "record",
    weighting: Literal["uniform", "records"] = "uniform",
    delta: Delta | None = None,
    max_participations: int | None = None,
    may_decline: str | None = None,
    declared_sizes: bool = False,
) -> Mechanism:
    """T rounds of K steps in which m users take part with batches of b_i of their R_i records.

    >>> from dpscaffold import fedavg
    >>> run = describe_run([50, 90], fedavg(), rounds=10, local_steps=5, noise=3.0,
    ...                    **shares([50, 90], user_ratio=0.5, data_ratio=0.1))
    >>> run.cohort_size, run.worst.batch
    (1, 5)
    """
    return describe(
        rounds=rounds,
        local_steps=local_steps,
        users=len(sizes),
        cohort_size=cohort_size,
        records=list(sizes),
        batch_sizes=batch_sizes,
        noise=noise,
        clip=clip,
        sampling=sampling,
        unit=unit,
        memory=algorithm.memory,
        weighting=weighting,
        delta=delta,
        max_participations=max_participations,
        may_decline=may_decline,
        declared_sizes=declared_sizes,
    )
