"""The steps of a preparation as JSON entries and named arrays, and back.

An entry holds the kind of the step and its fields; an array stands in the entry by its name in the
``.npz`` file next to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from dpscaffold.data.features import Hog, RandomFeatures
from dpscaffold.data.prepared import (
    ClipNorm,
    Project,
    Ranges,
    Scale,
    Shift,
    Standardised,
    UnitNorm,
)
from dpscaffold.data.tables.codec import Coding
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Prepared
from dpscaffold.privacy.preparation import PROTECTIONS, Cost, Remark

#: The file of the arrays, next to the entries.
ARRAYS = "preparation.npz"

#: Every step that can be stored, by the name it is stored under.
KINDS: dict[str, type[Any]] = {
    "shift": Shift,
    "standardised": Standardised,
    "project": Project,
    "unit norm": UnitNorm,
    "clip norm": ClipNorm,
    "scale": Scale,
    "ranges": Ranges,
    "hog": Hog,
    "random features": RandomFeatures,
    "coding": Coding,
    "remark": Remark,
}


def entries(
    preparation: Iterable[Prepared],
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Steps as entries for JSON and the arrays they name.

    >>> entries([ClipNorm(2.0)])
    ([{'kind': 'clip norm', 'norm': 2.0}], {})
    """
    names = {kind: name for name, kind in KINDS.items()}
    listed: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for number, step in enumerate(preparation):
        if type(step) not in names:
            raise BadInput(
                "step-not-stored",
                f"the step {type(step).__name__} of a preparation cannot be stored; use those of "
                f"dpscaffold.data.prepared ({', '.join(KINDS)})",
            )
        entry: dict[str, Any] = {"kind": names[type(step)]}
        for field in fields(step):  # type: ignore[arg-type]
            value = getattr(step, field.name)
            if isinstance(value, np.ndarray | np.generic):
                arrays[f"{number}.{field.name}"] = np.asarray(value)
                value = {"array": f"{number}.{field.name}"}
            elif isinstance(value, Cost):
                value = asdict(value)
            entry[field.name] = value
        listed.append(entry)
    return listed, arrays


def steps(
    listed: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray], path: Path
) -> tuple[Prepared, ...]:
    """The steps of stored entries; ``path`` is the file that a complaint names.

    >>> steps([{"kind": "clip norm", "norm": 2.0}], {}, Path("federation.json"))
    (ClipNorm(norm=2.0),)
    """
    return tuple(_step(entry, arrays, path) for entry in listed)


def _step(entry: Mapping[str, Any], arrays: Mapping[str, np.ndarray], path: Path) -> Prepared:
    kind = KINDS.get(entry.get("kind", ""))
    if kind is None:
        raise BadInput(
            "wrong-version",
            f"{path} names a step {entry.get('kind')!r} that this version does not know; use a "
            f"newer version or prepare the federation again",
        )
    try:
        given = {name: _value(name, value, arrays) for name, value in entry.items()}
        del given["kind"]
        if given.get("protection", "public") not in PROTECTIONS:
            raise ValueError(f"protection {given['protection']!r}")
        step: Prepared = kind(**given)
    except (KeyError, TypeError, ValueError, BadInput) as problem:
        raise BadInput(
            "data-damaged",
            f"{path} is damaged: its step {entry['kind']!r} cannot be read ({problem}); prepare "
            f"the federation again",
        ) from None
    return step


def _value(name: str, value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, dict) and value.keys() == {"array"}:
        return arrays[value["array"]]
    if name == "cost" and value is not None:
        return Cost(**value)
    return _frozen(value)


def _frozen(value: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
