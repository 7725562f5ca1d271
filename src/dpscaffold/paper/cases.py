"""One run of an experiment as data: its place in the figure or table, and its configuration.

A case is a configuration (the tables of ``dpscaffold train``) with labels. Its digest depends on
the configuration alone, so two figures that show the same run share it, and finished runs are found
again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dpscaffold.checks import floor_share
from dpscaffold.config import Configuration, parse
from dpscaffold.privacy.mechanism import RECORDS
from dpscaffold.training.stack import Schedule

#: Part of every digest: raise it when the meaning of a configuration changes.
VERSION = 1


@dataclass(frozen=True)
class Case:
    """``labels`` say where the run stands (row, column, line, choice, seed); ``tables`` configure
    it.

    ``solve_epsilon`` asks for the largest T that the published bound allows at that ε.
    """

    labels: dict[str, Any]
    tables: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    solve_epsilon: float | None = None
    fold: tuple[int, int] | None = (
        None  # (fold, folds) of a cross-validation, None for the real split
    )

    @cached_property
    def settings(self) -> Configuration:
        """The checked configuration."""
        return parse(self.tables)

    @cached_property
    def digest(self) -> str:
        """Names the run whatever figure it is shown in."""
        tables = self.settings.model_dump(mode="json", exclude_none=True)
        # Every algorithm once had a key mu, and finished runs are found by their digest.
        tables["algorithm"] = {"mu": 0.1, **tables["algorithm"]}
        if tables.get("privacy", {}).get("delta") == RECORDS:  # once the default, unnamed
            del tables["privacy"]["delta"]
        content: dict[str, Any] = {
            "tables": tables,
            "schedule": vars(self.schedule),
            "fold": self.fold,
            "version": VERSION,
        }
        return hashlib.blake2b(
            json.dumps(content, sort_keys=True).encode(), digest_size=12
        ).hexdigest()

    @property
    def objective(self) -> tuple[str, float]:
        """What decides the central optimum: the ``[data]`` table as JSON, and λ."""
        settings = self.settings
        return settings.data.model_dump_json(), settings.plan.regularisation

    @property
    def private(self) -> bool:
        """Whether the run has a mechanism."""
        return "privacy" in self.tables

    def with_set(self, changes: Mapping[str, Any]) -> Case:
        """The case with dotted keys set, e.g. ``{"plan.rounds": 5}``; ``{"privacy": False}`` drops
        a table."""
        tables = {name: dict(table) for name, table in self.tables.items()}
        for key, value in changes.items():
            table, _, name = key.partition(".")
            if not name:
                tables.pop(table, None)
                continue
            tables.setdefault(table, {})[name] = value
        return replace(self, tables=tables)


def scaled(case: Case, scale: float) -> Case:
    """A faithful smaller version: fewer users and rounds, everything else as it is.

    At least two users take part in a round, and at least four rounds follow a warm start, so every
    part of an algorithm is still used.

    >>> tables = {"data": {"users": 100}, "plan": {"rounds": 400, "user_ratio": 0.2}}
    >>> small = scaled(Case({}, tables), 0.1)
    >>> small.tables["data"]["users"], small.tables["plan"]["rounds"]
    (10, 40)
    """
    if scale == 1:
        return case
    settings = case.settings
    users, ratio = settings.data.users or 100, settings.plan.user_ratio  # type: ignore[union-attr]
    least = math.ceil(2 / ratio - 1e-9)
    smaller = min(users, max(least, floor_share(scale, users)))
    changes: dict[str, Any] = {"data.users": smaller}
    rounds = max(4, floor_share(scale, settings.plan.rounds))
    if settings.algorithm.build().warm_up is not None:
        warm = settings.plan.warm_rounds
        warm = round(4 / ratio) if warm is None else warm
        changes["plan.warm_rounds"] = max(1, floor_share(scale, warm))
        rounds = max(rounds, changes["plan.warm_rounds"] + 4)
    changes["plan.rounds"] = rounds
    every = case.schedule.every
    schedule = replace(case.schedule, every=max(1, floor_share(scale, every)) if every else None)
    return replace(case.with_set(changes), schedule=schedule)
