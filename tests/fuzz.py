"""``python tests/fuzz.py [COUNT] [SEED]``: mutated configurations; none may end in a traceback.

A bounded number of them is run by the tests. What a mutation gives is either accepted or refused
with a sentence; whatever else happens is printed with the tables that did it.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from dpscaffold.config import override, parse
from dpscaffold.errors import BadInput
from dpscaffold.privacy import PrivacyError
from dpscaffold.reference.keys import keys

#: Values of every kind and size, to be put anywhere.
WILD: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 2**31, 2**63, 10**400, 0.0, -0.5, 0.5, 1e-300, 1e300, 1e9, 1e18),
    *(float("inf"), float("nan"), True, False, "", "x", "auto", "\x00", "ε", "a" * 5000, "1/0"),
    *([], [1], ["a", "a"], [[]], {}, {"a": 1}, {"": None}, None),
)
SLOWEST = 20.0


def mutated(rng: random.Random, names: list[str], examples: dict[str, Any]) -> dict[str, Any]:
    """A configuration with a few keys set to examples, wild values or each other's examples."""
    tables: dict[str, Any] = {}
    for name in rng.sample(names, rng.randint(1, 6)):
        table, _, key = name.partition(".")
        if rng.random() < 0.05:
            key = key[:-1] + rng.choice("xyz.")
        value = rng.choice((examples[name], rng.choice(WILD), examples[rng.choice(names)]))
        inner = tables.setdefault(table, {})
        if isinstance(inner, dict):
            inner[key] = value
        if rng.random() < 0.02:
            tables[table] = rng.choice(WILD)
    return tables


def fuzz(count: int, seed: int = 0) -> list[str]:
    """What went wrong, one line each."""
    rng = random.Random(seed)
    found = [key for key in keys() if key.table in ("data", "task", "algorithm", "plan", "privacy")]
    examples = {key.name: key.example for key in found}
    names, wrong = list(examples), []
    for _ in range(count):
        tables = mutated(rng, names, examples)
        started = time.monotonic()
        try:
            parse(tables)
            item = f"{rng.choice(names)}{rng.choice('==.')}{rng.choice(WILD)}"
            parse(override(tables, item))
        except (BadInput, PrivacyError):
            pass
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error} of {tables!r}"[:400])
        if time.monotonic() - started > SLOWEST:
            wrong.append(f"over {SLOWEST} s: {tables!r}"[:400])
    return wrong


if __name__ == "__main__":
    wanted = [int(word) for word in sys.argv[1:3]]
    failures = fuzz(*(wanted or [100_000]))
    print("\n".join(failures[:20]))
    print(f"{len(failures)} of {wanted[0] if wanted else 100_000} went wrong")
    sys.exit(bool(failures))
