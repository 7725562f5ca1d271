"""Small runs of every kind: the features of their records, and their final parameters."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpscaffold.algorithms import ALGORITHMS, ITERATIVE
from frozen import configurations
from frozen.compare.difference import Difference

#: Algorithms that take a single sum.
ONCE = set(ALGORITHMS) - set(ITERATIVE)

RENAMES = Path(__file__).parents[1] / "renames.toml"


def compare(quick: bool) -> Iterator[Difference]:
    """Every array of every run; a few seconds for all, so a quick comparison leaves none out."""
    renames = tomllib.loads(RENAMES.read_text(encoding="utf-8"))
    old = configurations.frozen()
    for run in configurations.read():
        name = f"configurations/{run.id}"
        try:
            new = configurations.made(renamed(run.tables, renames))
        except ValueError as error:  # a refusal is one, and so is an array of another shape
            yield Difference(name, "runs", str(error), "is refused, and was not")
            continue
        for what, array in old[run.id].items():
            yield apart(f"{name}/{what}", array, new.get(what), run.tolerance)


def apart(name: str, old: np.ndarray, new: np.ndarray | None, tolerance: float) -> Difference:
    """How far two arrays are from each other, as a share of the largest value."""
    if new is None or new.shape != old.shape:
        return Difference(name, old.shape, None if new is None else new.shape, "not the same shape")
    largest = float(np.abs(old).max())
    distance = float(np.abs(new - old).max())
    near = distance <= tolerance * largest  # not so where one of them is no number
    why = "" if near else f"{distance / largest:.1e} of the largest value apart"
    return Difference(name, largest, float(np.abs(new).max()), why)


def renamed(tables: Mapping[str, Any], renames: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of version 0.2.0 in the present words (:file:`renames.toml`)."""
    found = copy.deepcopy(dict(tables))
    for key in renames.get("dropped", ()):
        _take(found, key)
    for key, other in renames.get("renamed", {}).items():
        if (value := _take(found, key)) is not None:
            _place(found, other, value)
    for key, names in renames.get("values", {}).items():
        value = _take(found, key)
        if value is not None:
            _place(found, key, names.get(value, value) if isinstance(value, str) else value)
    if found.get("algorithm", {}).get("name") not in ONCE:  # these have a plan of their own
        for key, value in renames.get("defaults", {}).items():
            given = _take(found, key)
            _place(found, key, value if given is None else given)
    return found


def _take(tables: dict[str, Any], key: str) -> Any:
    """The value of a key, which is taken out; None where it is not there."""
    *path, last = key.split(".")
    at: Any = tables
    for part in path:
        at = at.get(part) if isinstance(at, dict) else None
    if isinstance(at, list):  # steps: every one of them
        for item in at:
            if isinstance(item, dict):
                item.pop(last, None)
    return at.pop(last, None) if isinstance(at, dict) else None


def _place(tables: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        tables = tables.setdefault(part, {})
    tables[last] = value
