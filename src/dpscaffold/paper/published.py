"""The numbers the paper prints, read from one data file that gives the source of each."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from dpscaffold.errors import BadInput


@dataclass(frozen=True)
class PublishedCell:
    """One entry of a published table: test accuracy in per cent, its deviation over three runs, and
    T."""

    noise: float
    local_steps: int
    accuracy: float
    deviation: float
    rounds: int


@cache
def published() -> dict[str, Any]:
    """The whole file.

    >>> sorted(published())[:3]
    ['captions', 'source', 'table1']
    """
    text = (
        resources.files("dpscaffold.paper").joinpath("published.toml").read_text(encoding="utf-8")
    )
    return tomllib.loads(text)


@cache
def table(name: str) -> dict[tuple[float, int], PublishedCell]:
    """A published table by (σ_g, K).

    >>> table("table1")[10, 5].accuracy
    45.53
    """
    content = published()[name]
    cells = {}
    for noise, entries in zip(content["noise"], content["cells"], strict=True):
        for steps, (accuracy, deviation, rounds) in zip(
            content["local_steps"], entries, strict=True
        ):
            cells[float(noise), int(steps)] = PublishedCell(
                noise, steps, accuracy, deviation, rounds
            )
    return cells


def published_rounds(name: str, noise: float, local_steps: int) -> int:
    """The T that a table prints for a cell."""
    try:
        return table(name)[float(noise), local_steps].rounds
    except KeyError:
        raise BadInput(
            "no-such-cell",
            f"{name} of the paper has no cell with noise {noise:g} and {local_steps} local steps",
        ) from None


def caption(name: str) -> dict[str, Any]:
    """What the caption and the text say about a figure: ε, T and the like; empty where they say
    nothing."""
    return dict(published()["captions"].get(name, {}))
