"""Who gets which records of a pool, and who is left out for having too few."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpscaffold.data import partition
from dpscaffold.data.config import Pooled
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Remark


def allocate(
    labels: np.ndarray, users: np.ndarray | None, names: tuple[str, ...], settings: Pooled
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Row numbers per user, and the users' names, as the settings' partition says."""
    chosen = settings.chosen_partition
    if chosen == "natural":
        if users is None:
            raise BadInput(
                "no-user-column",
                "partition = 'natural' needs the user of each record, and these data have none",
            )
        parts, kept = partition.natural(
            users,
            len(names),
            settings.users,
            settings.minimum_records,
            settings.records,
            settings.seed,
        )
        return parts, tuple(names[i] for i in kept)
    count = settings.users
    assert count is not None  # validated with the settings
    sizes = partition.equal_sizes(len(labels), count, settings.records)
    if settings.size_spread > 0:
        sizes = partition.lognormal_sizes(
            int(sizes.sum()), count, settings.size_spread, settings.seed, settings.minimum_records
        )
    if sizes.min() < settings.minimum_records:
        raise BadInput(
            "too-few-records",
            f"users get {sizes.min()} records each, and minimum_records is "
            f"{settings.minimum_records}; ask for fewer users",
        )
    if chosen == "dirichlet":
        return partition.dirichlet(labels, sizes, settings.alpha, settings.seed), ()
    return partition.similarity(labels, sizes, settings.similarity, settings.seed), ()


def left_out(settings: Pooled, gone: Sequence[str] = ()) -> tuple[Remark, ...]:
    """Who takes no part and by which rule, for the statement, or how records were partitioned where
    they had no owners. The names (``gone``) are kept apart: where whole users are hidden the rule
    alone may be said, as a name tells how many records somebody has.

    >>> from dpscaffold.data.config import parse_data
    >>> left_out(parse_data({"source": "digits", "users": 5, "similarity": 100}))
    ()
    """
    if settings.chosen_partition != "natural":
        remedy = 'partition = "similarity" and similarity = 100.0, or user = COLUMN'
        remark = Remark(PARTITIONED_BY_LABEL, "unprotected", remedy=remedy)
        return (remark,) if _looks_at_labels(settings) else ()
    said = (
        f"Users with fewer than {settings.minimum_records} records, if any, were left out before "
        f"training (data.minimum_records)"
    )
    if settings.users is not None:
        said += f", and {settings.users} of the others were drawn at random (data.users)"
    if settings.records is not None:
        said += f"; of each, {settings.records} records at most, drawn at random (data.records)"
    said += ". How many records a user has counts as public here."
    counted = settings.minimum_records > 1
    return (Remark(said, "none needed", named=named(gone), counted=counted),)


def drafted(settings: Pooled) -> tuple[Remark, ...]:
    """The remark that ``init`` drafted this configuration, where ``data.drafted`` is set."""
    return (Remark(DRAFTED, "drafted"),) if getattr(settings, "drafted", False) else ()


#: Said of a configuration that ``init`` wrote.
DRAFTED = (
    "The configuration was drafted from the records: `dpscaffold init` looked at them to choose "
    "columns, spellings, missing values, ranges and scaling."
)
#: A record that had no owner was given one by its label: another label would move others too.
PARTITIONED_BY_LABEL = (
    "Records were partitioned among users by their labels (data.partition), so another label of "
    "one record would move records between several users: who holds which record is outside the "
    "guarantee, which is for the records as they were partitioned."
)
#: Said where sizes are declared: one record more would change the whole partition.
PARTITIONED_BY_NUMBER = "Records were partitioned among users by their number (data.partition)."


def _looks_at_labels(settings: Pooled) -> bool:
    """Whether users are made by sorting records."""
    return settings.chosen_partition != "similarity" or settings.similarity < 100


def named(gone: Sequence[str], most: int = 20) -> str:
    """Who was left out, in one sentence.

    >>> named(["north"]), named([])
    ('Left out for too few records: north.', '')
    """
    if not gone:
        return ""
    more = f" and {len(gone) - most} more" if len(gone) > most else ""
    return f"Left out for too few records: {', '.join(gone[:most])}{more}."


def too_small(users: np.ndarray | None, names: Sequence[str], settings: Pooled) -> list[str]:
    """The users whom the natural partition leaves out for too few records, by name."""
    if users is None or settings.chosen_partition != "natural":
        return []
    sizes = np.bincount(users, minlength=len(names))
    few = np.flatnonzero(sizes < settings.minimum_records).tolist()
    return [f"{names[i]} ({sizes[i]} of {settings.minimum_records})" for i in few]
