"""Mutated configurations and overrides."""

from __future__ import annotations

import contextlib
import random
from functools import cache
from pathlib import Path
from typing import Any

from dpscaffold.config import load, override, parse
from dpscaffold.config.reference import keys
from dpscaffold.errors import BadInput
from dpscaffold.runs.written import to_toml

#: Values of every kind and size, to be put anywhere.
WILD: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 2**31, 2**63, 10**400, 0.0, -0.5, 0.5, 1e-300, 1e300, 1e9, 1e18),
    *(float("inf"), float("nan"), True, False, "", "x", "auto", "\x00", "ε", "a" * 5000, "1/0"),
    *([], [1], ["a", "a"], [[]], {}, {"a": 1}, {"": None}, None),
)


@cache
def examples() -> dict[str, Any]:
    """An example of every key."""
    wanted = ("data", "task", "algorithm", "plan", "privacy", "facts")
    return {key.path: key.example for key in keys() if key.table in wanted}


def mutated(rng: random.Random) -> dict[str, Any]:
    """A configuration with a few keys set to examples, wild values or each other's examples."""
    known = examples()
    names = list(known)
    tables: dict[str, Any] = {}
    for name in rng.sample(names, rng.randint(1, 6)):
        table, _, key = name.partition(".")
        if rng.random() < 0.05:
            key = key[:-1] + rng.choice("xyz.")
        value = rng.choice((known[name], rng.choice(WILD), known[rng.choice(names)]))
        inner = tables.setdefault(table, {})
        if isinstance(inner, dict):
            inner[key] = value
        if rng.random() < 0.02:
            tables[table] = rng.choice(WILD)
    return tables


def attempt(rng: random.Random, folder: Path) -> str:
    """Parse a configuration, change it, and read what was written of it with a byte changed."""
    tables = mutated(rng)
    attempt.last = [repr(tables)]  # type: ignore[attr-defined]
    with contextlib.suppress(BadInput):
        parse(tables)
    item = f"{rng.choice(list(examples()))}{rng.choice('==.')}{rng.choice(WILD)}"
    attempt.last = [f"{tables!r} with {item!r}"]  # type: ignore[attr-defined]
    parse(override(tables, item))
    if rng.random() < 0.2:
        raw = bytearray(to_toml(tables).encode(errors="replace"))
        for _ in range(rng.randint(0, 3) if raw else 0):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        path = folder / "mutated.toml"
        path.write_bytes(raw)
        attempt.last = [repr(bytes(raw))]  # type: ignore[attr-defined]
        load(path)
    return ""
