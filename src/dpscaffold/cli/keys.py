"""The keys of a configuration for completion and explanation, read without loading PyTorch."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def known_keys() -> tuple[dict[str, Any], ...]:
    """The stored reference, one entry per key and source, step or algorithm that has it."""
    text = files("dpscaffold.reference").joinpath("keys.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


def names(table: str | None = None) -> list[str]:
    """The dotted names, each once.

    >>> "plan.rounds" in names("plan"), names("plan")[0]
    (True, 'plan.rounds')
    """
    found = (key["name"] for key in known_keys() if not key["name"].startswith("step."))
    return list(dict.fromkeys(n for n in found if table is None or n.startswith(f"{table}.")))


def complete_setting(incomplete: str) -> list[str]:
    """For ``--set``: keys with their sign, then the values that a key chooses among.

    >>> complete_setting("plan.weigh"), complete_setting("plan.weighting=r")
    (['plan.weighting='], ['plan.weighting=records'])
    """
    name, sign, begun = incomplete.partition("=")
    if not sign:
        return [f"{key}=" for key in names() if key.startswith(incomplete)]
    values = [value for value in _choices(name) if value.startswith(begun)]
    return [f"{name}={value}" for value in values]


def complete_unset(incomplete: str) -> list[str]:
    """For ``--unset``: keys and whole tables."""
    tables = dict.fromkeys(name.partition(".")[0] for name in names())
    return [name for name in (*tables, *names()) if name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """For ``config explain``."""
    return [name for name in names() if name.startswith(incomplete)]


def complete_source(incomplete: str) -> list[str]:
    """The sources of ``[data]``."""
    return [source for source in _choices("data.source") if source.startswith(incomplete)]


def complete_dataset(incomplete: str) -> list[str]:
    """The datasets that can be downloaded."""
    from dpscaffold.data.readers.catalogue import CATALOGUE

    return [name for name in CATALOGUE if name.startswith(incomplete)]


def complete_algorithm(incomplete: str) -> list[str]:
    """The algorithms by name."""
    from dpscaffold.algorithms import ALGORITHMS

    return [name for name in ALGORITHMS if name.startswith(incomplete)]


def complete_experiment(incomplete: str) -> list[str]:
    """The paper's experiments, which are files."""
    folder = files("dpscaffold.paper").joinpath("definitions")
    found = sorted(file.name.removesuffix(".toml") for file in folder.iterdir())
    return [name for name in (*found, "all") if name.startswith(incomplete)]


def _choices(name: str) -> list[str]:
    if name == "algorithm.name":
        return complete_algorithm("")
    kinds = [key["kind"] for key in known_keys() if key["name"] == name]
    if not kinds:
        return []
    if kinds[0].startswith("true or false"):
        return ["true", "false"]
    quoted = str(kinds[0]).split("'")
    return quoted[1::2]
