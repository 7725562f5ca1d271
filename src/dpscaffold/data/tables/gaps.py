"""What becomes of missing values, column by column, and what stands for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from dpscaffold.data.tables.coding import TableSource
from dpscaffold.data.tables.fills import PrivateFill
from dpscaffold.data.tables.missing import OTHERS
from dpscaffold.errors import BadInput, nearest

Rule = Literal["refuse", "drop", "mean", "median", "indicator", "category"] | float | PrivateFill
#: Rules whose value is read off the records.
FITTED = ("mean", "median")


def rule_of(table: TableSource, name: str) -> Rule:
    """The rule of one column.

    >>> from pathlib import Path
    >>> table = TableSource(Path("a.csv"), "csv", "ill", missing={"age": "median", "*": "drop"})
    >>> rule_of(table, "age"), rule_of(table, "stay")
    ('median', 'drop')
    """
    rules: Mapping[str, Rule] | Rule = table.missing
    if not isinstance(rules, Mapping):
        return rules
    found = rules.get(name, rules.get(OTHERS, "refuse"))
    if name in (*table.labels, table.user) and found not in ("refuse", "drop"):
        return "refuse"
    return found


def for_the_rest(table: TableSource) -> Literal["refuse", "drop"] | float:
    """What holds for columns without a rule of their own, as one word or number."""
    rules: Mapping[str, Rule] | Literal["refuse", "drop"] | float = table.missing
    if not isinstance(rules, Mapping):
        return rules
    others = rules.get(OTHERS)
    if isinstance(others, int | float):
        return float(others)
    return "drop" if "drop" in rules.values() else "refuse"


def check_rules(table: TableSource, numbers: tuple[str, ...], texts: tuple[str, ...]) -> None:
    """Refuse rules for columns that are not there, or that do not suit them."""
    if not isinstance(table.missing, Mapping):
        return
    known = (*numbers, *texts, *table.labels, *([table.user] if table.user else ()), OTHERS)
    for name, rule in table.missing.items():
        if name not in known:
            raise BadInput(
                f"missing names the column '{name}'{nearest(name, known)}, which is no feature, "
                f"label or user of {table.path}"
            )
        if isinstance(rule, PrivateFill) and name not in numbers:
            raise BadInput(
                f"missing.{name} is a private {rule.fill}, and it needs a column of numbers with a "
                f"range of its own; name one of {', '.join(numbers[:8]) or 'none'}"
            )
        if name in texts and rule in (*FITTED, "indicator"):
            raise BadInput(
                f"missing.{name} is '{rule}', and the column holds categories; use 'category', "
                f"'drop' or 'refuse'"
            )
        if name in numbers and rule == "category":
            raise BadInput(
                f"missing.{name} is 'category', and the column holds numbers; use a number, "
                f"'mean', 'median', 'indicator', 'drop' or 'refuse'"
            )


def check_na_strings(table: TableSource, names: Sequence[str]) -> None:
    """Refuse NA strings for a column that is not there."""
    for name, _ in table.gaps.columns:
        if name not in (*names, OTHERS):
            raise BadInput(
                f"gaps names the column '{name}'{nearest(name, names)}, which {table.path} lacks"
            )


def is_fitted(rule: Rule) -> bool:
    """Whether a rule's value is read off the records, privately or not."""
    return isinstance(rule, PrivateFill) or rule in FITTED


def fill_of(rule: Rule, values: np.ndarray, name: str, seed: int = 0) -> float:
    """The number that stands for a missing one: given, or read off the values that are there."""
    if isinstance(rule, PrivateFill):
        return rule.value(name, values, seed)
    if not isinstance(rule, str):
        return float(rule)
    if rule == "indicator":
        return 0.0
    there = values[np.isfinite(values)]
    if not len(there):
        raise BadInput(f"column '{name}' has no value at all, so it has no {rule}; exclude it")
    return float(np.mean(there, dtype=np.float64) if rule == "mean" else np.median(there))
