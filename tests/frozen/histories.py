"""Random histories of runs: who took part, what was run again, parts, caps, shared budgets."""

from __future__ import annotations

import random
from typing import Any

from frozen import mechanisms

Given = dict[str, Any]
SEED = 20261120

#: How many of each kind there are, and of which mechanisms.
SINGLE = (
    *("single", "poisson", "one-step", "unequal", "unequal.poisson", "noises", "many", "crowd"),
    *("user", "one-step.sums", "noises.one-step.weights.sums", "user.one-step.sums", "prepared"),
    *(
        "one-step.prepared.sums",
        "voids",
        "one-step.sums.voids",
        "cap",
        "declines",
        "bounded.one-step",
    ),
    *("prepared.poisson", "one-step.sums.cap", "noises.cap"),
)
PARTED = ("single", "poisson", "one-step.sums", "noises", "prepared", "cap", "user", "unequal")
#: Users of their own noise, and secure sums, are stated for the same users in all parts alone.
CONTINUING = ("single", "poisson", "one-step", "cap", "user", "unequal")
COMPOSED = (
    "single",
    "poisson",
    "one-step",
    "unequal.one-step",
    "one-step.sums",
    "user",
    "prepared",
)
ONE, PARTS, CONTINUED, TOGETHER, FILES = 150, 40, 20, 50, 40


def described(kind: str, rng: random.Random) -> Given:
    """A mechanism whose number of users stays small enough for lists of them."""
    given = mechanisms.of_kind(kind, rng, 0)
    for one in given["users"]:
        one["count"] = min(one["count"], 20)
    users = sum(one["count"] for one in given["users"])
    given["cohort"] = min(given["cohort"], users)
    given["pooling_participants"] = min(given["pooling_participants"], max(1, users - 1))
    given["rounds"] = max(2, min(given["rounds"], 20))
    if given["secure_sums"]:
        least = min(given["secure_sums"]["least"], given["cohort"])
        colluders = min(given["secure_sums"]["colluders"], least - 2)
        given["secure_sums"] = {"colluders": colluders, "least": least}
    return given


def events(rng: random.Random, given: Given, most: int, again: float) -> list[Given]:
    """Rounds in order, some of them run again with fresh noise, with fewer users at times."""
    users = range(sum(one["count"] for one in given["users"]))
    found: list[Given] = []
    for round in range(1, most + 1):
        cohort = sorted(rng.sample(users, given["cohort"]))
        found.append({"round": round, "users": cohort, "again": False})
        while rng.random() < again:
            some = [user for user in cohort if rng.random() < 0.8] or cohort[:1]
            found.append({"round": round, "users": some, "again": True})
    return found


def budget(rng: random.Random) -> float | None:
    """An ε of a user, or none; no ε of a history lies close to one of these."""
    return rng.choice([None, None, round(rng.uniform(0.3, 6.0), 3)])


def asked(rng: random.Random, given: Given) -> list[int]:
    """The users that are drawn next."""
    users = sum(one["count"] for one in given["users"])
    return sorted(rng.sample(range(users), given["cohort"]))


def one(rng: random.Random, kind: str) -> Given:
    given = described(kind, rng)
    most = rng.randint(0, given["rounds"])
    return {
        "kind": "one",
        "mechanism": given,
        "events": events(rng, given, most, rng.choice([0.0, 0.0, 0.2])),
        "user_epsilon": budget(rng),
        "asked": asked(rng, given),
    }


def parts(rng: random.Random, kind: str, continued: bool = False) -> Given:
    """A run that was given more rounds, or that goes on with other users."""
    first = described(kind, rng)
    cap = rng.randint(2, 6)
    if continued:
        first["prepared"], first["most_participations"] = [], None
    found, people = [], []
    for place in range(rng.choice([2, 2, 3])):
        given = {**first, "rounds": rng.randint(1, 10)}
        if continued and place:
            given["users"] = [{**one, "count": one["count"] + 1} for one in first["users"]]
        users = sum(one["count"] for one in given["users"])
        people.append([f"site {user + (2 * place if continued else 0)}" for user in range(users)])
        most = rng.randint(0 if place else 1, given["rounds"])
        found.append({"mechanism": given, "events": events(rng, given, most, 0.1)})
    return {
        "kind": "continued" if continued else "parts",
        "parts": found,
        "people": people if continued else [],
        "cap": rng.choice([0, cap]) if continued else 0,
        "user_epsilon": None if continued else budget(rng),
        "draw_was_chosen": rng.random() < 0.5,
        "seed_is_public": rng.random() < 0.3,
        "asked": asked(rng, first),
    }


def together(rng: random.Random, kind: str) -> Given:
    """Several runs over the same records, whose seeds may be one."""
    first = described(kind, rng)
    same, runs = rng.random() < 0.7, []
    secret = rng.random() < 0.8
    for place in range(rng.choice([2, 2, 3])):
        given = {**first, "rounds": rng.randint(1, 12)}
        if rng.random() < 0.5:
            louder = rng.choice([1.5, 2.0])
            given["users"] = [{**one, "noise": one["noise"] * louder} for one in first["users"]]
        seed = rng.choice([3, 4]) if rng.random() < 0.4 else None
        origin = rng.choice(["given", "default"]) if seed is not None else "system"
        if rng.random() < 0.08:
            origin, seed = "unknown", None
        mark = f"mark {seed}" if seed is not None else f"own {place}"
        runs.append(
            {
                "mechanism": given,
                "events": events(rng, given, rng.randint(1, given["rounds"]), 0.1),
                "secret": secret or rng.random() < 0.5,
                "seed": {
                    "origin": origin,
                    "mark": None if origin == "unknown" else mark,
                    "value": seed,
                },
            }
        )
    if rng.random() < 0.1:
        other = "poisson" if first["sampling"] == "fixed" else "fixed"
        runs[-1]["mechanism"] = {**runs[-1]["mechanism"], "sampling": other, "unit": "record"}
    return {
        "kind": "together",
        "runs": runs,
        "fixed_in_advance": rng.random() < 0.5,
        "same_records": same,
    }


def budget_file(rng: random.Random) -> Given:
    """Runs that reserve what they may spend, and enter their rounds."""
    total, delta = round(rng.uniform(1.0, 4.0), 2), rng.choice([1e-5, 1e-4])
    neighbours = rng.choice(["replace-one", "zero-out"])
    steps: list[Given] = []
    known: dict[str, int] = {}
    for _ in range(rng.randint(3, 12)):
        if known and rng.random() < 0.4:
            run = rng.choice(list(known))
            after = known[run] if rng.random() < 0.85 else known[run] + rng.choice([-1, 1])
            steps.append({"run": run, "round": known[run] + 1, "after": max(0, after)})
            known[run] += after == known[run]
            continue
        run = rng.choice("abcdefgh")
        steps.append(
            {
                "run": run if rng.random() < 0.9 else f"{run}+1",
                "epsilon": round(rng.uniform(0.05, 0.8) * total, 3),
                "delta": rng.choice([1e-6, 3e-6, delta]),
                "rounds": rng.randint(1, 50),
                "unit": "record",
                "neighbours": neighbours if rng.random() < 0.93 else "add-remove",
                "seed": rng.choice([None, None, None, 1, 2]),
            }
        )
        known.setdefault(run, 0)
    return {"kind": "budget-file", "epsilon": total, "delta": delta, "steps": steps}


def inputs() -> list[tuple[str, Given]]:
    """The histories and their names, always the same."""
    rng = random.Random(SEED)
    found: list[tuple[str, Given]] = []

    def add(name: str, given: Given) -> None:
        found.append((f"{len(found):03d}:{name}", given))

    for place in range(ONE):
        kind = SINGLE[place % len(SINGLE)]
        add(f"one.{kind}", one(rng, kind))
    for place in range(PARTS):
        kind = PARTED[place % len(PARTED)]
        add(f"parts.{kind}", parts(rng, kind))
    for place in range(CONTINUED):
        kind = CONTINUING[place % len(CONTINUING)]
        add(f"continued.{kind}", parts(rng, kind, continued=True))
    for place in range(TOGETHER):
        kind = COMPOSED[place % len(COMPOSED)]
        add(f"together.{kind}", together(rng, kind))
    for _ in range(FILES):
        add("budget-file", budget_file(rng))
    return found
