"""Random mechanisms of every kind, in neutral words."""

from __future__ import annotations

import random
from typing import Any

Given = dict[str, Any]
SEED, EACH = 20261119, 10


def base(rng: random.Random) -> Given:
    """Equal users, batches of fixed size, a memory, several local steps."""
    size = rng.choice([20, 50, 137, 400, 1000])
    batch = max(1, int(size * rng.choice([0.02, 0.1, 0.2, 0.5, 1.0])))
    users = rng.choice([3, 5, 8, 20, 60])
    return {
        "rounds": rng.choice([1, 2, 5, 12, 30, 80]),
        "local_steps": rng.choice([2, 3, 5, 10]),
        "users": [
            {
                "count": users,
                "size": size,
                "batch": batch,
                "noise": round(rng.choice([1, 2, 4, 8, 20]) * rng.uniform(0.8, 1.2), 3),
                "weight": 1.0,
            }
        ],
        "cohort": rng.randint(1, users),
        "delta": rng.choice([1e-3, 1e-5, 1e-6, None]),
        "clip": rng.choice([0.5, 1.0, 1.5]),
        "sampling": "fixed",
        "unit": "record",
        "memory": True,
        "linear_uploads": False,
        "weighting": "uniform",
        "release": "gradients",
        "declared_sizes": False,
        "may_decline": None,
        "most_participations": None,
        "draw_is_hidden": False,
        "unproved": [],
        "server_mean": "mean",
        "secure_sums": None,
        "void_attempts": 0,
        "prepared": [],
        "completed": None,
        "repeated_rounds": [],
        "pooling_participants": 1,
        "participations": [1, rng.choice([2, 3, 7, 20])],
    }


def several_users(rng: random.Random, given: Given, kinds: int = 0, noises: bool = False) -> None:
    """Users that differ in size and batch, and in their noise where that is asked for."""
    noise = given["users"][0]["noise"]
    rate = rng.choice([0.05, 0.2, 0.5])
    given["users"] = []
    for place in range(kinds or rng.randint(2, 6)):
        size = rng.randint(10, 900)
        own = noise * rng.choice([1.0, 1.0, 1.5, 3.0]) if noises and place else noise
        batch = max(1, int(size * (rate if rng.random() < 0.7 else rng.uniform(0.05, 1.0))))
        given["users"].append(
            {
                "count": rng.randint(1, 4),
                "size": size,
                "batch": batch,
                "noise": round(own * rng.uniform(1.0, 1.2), 3) if noises and place else own,
                "weight": 1.0,
            }
        )
    _draw(rng, given)


def _count(given: Given) -> int:
    return sum(kind["count"] for kind in given["users"])


def _draw(rng: random.Random, given: Given, least: int = 1) -> None:
    given["cohort"] = rng.randint(min(least, _count(given)), _count(given))


def one_step(rng: random.Random, given: Given) -> None:
    """A run whose rounds are one sum of Gaussian queries."""
    given |= {"local_steps": 1, "memory": False, "linear_uploads": True}
    given["pooling_participants"] = rng.choice([1, 1, 1, 2, 3])
    given["pooling_participants"] = min(given["pooling_participants"], _count(given) - 1)
    # What one step costs is little: less noise, so that there is something to compare.
    for kind in given["users"]:
        kind["noise"] = round(kind["noise"] / 2, 4)


def poisson(rng: random.Random, given: Given) -> None:
    given["sampling"] = "poisson"
    given["declared_sizes"] = rng.random() < 0.5


def whole_users(rng: random.Random, given: Given) -> None:
    given["unit"] = "user"
    given["sampling"] = rng.choice(["fixed", "poisson"])
    given["rounds"] = min(given["rounds"], 12)
    for kind in given["users"]:
        kind["noise"] = round(kind["noise"] + 3.0, 3)


def weights(rng: random.Random, given: Given) -> None:
    given["weighting"] = "noise"
    for kind in given["users"]:
        kind["weight"] = round(rng.uniform(0.2, 2.0), 3)


def sums(rng: random.Random, given: Given) -> None:
    """Secure sums; at least three users, two of whom are honest."""
    if _count(given) < 3:
        given["users"][0]["count"] += 3
    _draw(rng, given, least=3)
    colluders = rng.randint(0, max(0, given["cohort"] - 3))
    given["secure_sums"] = {
        "colluders": colluders,
        "least": rng.randint(colluders + 2, given["cohort"]),
    }


def repeats(rng: random.Random, given: Given) -> None:
    given["rounds"] = max(5, given["rounds"])
    given["repeated_rounds"] = [rng.randint(1, 2) for _ in range(rng.randint(1, 3))]


def prepares(rng: random.Random, given: Given) -> None:
    noise = round(rng.uniform(2.0, 9.0), 3)
    gaussian = {"noise": noise, "noise_if_added": 2 * noise, "own_share": rng.choice([1.0, 0.5])}
    stated = {"epsilon": round(rng.uniform(0.05, 0.6), 3), "delta": rng.choice([0.0, 1e-9, 1e-7])}
    given["prepared"] = rng.choice([[gaussian], [stated], [gaussian, stated], [gaussian, gaussian]])


def refused(rng: random.Random, given: Given, which: int) -> None:
    """One of the descriptions of which nothing is guaranteed, or that nothing could run."""
    changes: list[Given] = [
        {"clip": "median"},
        {"unproved": ["local_step"]},
        {"unit": "user", "weighting": "records"},
        {"unit": "user", "release": "bounded-sums"},
        {"cohort": _count(given) + 1},
        {"delta": 1.5},
        {"clip": 0.0},
        {"rounds": 0},
        {"secure_sums": {"colluders": 2, "least": 3}, "cohort": 3},
        {"most_participations": 0},
        {"sampling": "shuffled"},
        {"void_attempts": -1},
        {"local_steps": 0},
        {"weighting": "size"},
        {"delta": 1e-300},
    ]
    given |= changes[which % len(changes)]
    if which == len(changes):
        given["users"][0]["noise"] = 0.0
    if which == len(changes) + 1:
        given["users"][0]["batch"] = given["users"][0]["size"] + 1
    if which == len(changes) + 2:
        given["users"][0]["noise"] = 1e8
    if which == len(changes) + 3:
        given["users"][0]["batch"] = 0


def of_kind(kind: str, rng: random.Random, place: int) -> Given:
    """One mechanism; ``kind`` names what is asked about, joined by dots."""
    given = base(rng)
    steps = {
        "poisson": poisson,
        "one-step": one_step,
        "user": whole_users,
        "unequal": several_users,
        "noises": lambda r, g: several_users(r, g, noises=True),
        "many": lambda r, g: several_users(r, g, kinds=r.randint(17, 30), noises=True),
        "crowd": lambda r, g: several_users(r, g, kinds=r.randint(49, 60), noises=True),
        "weights": weights,
        "by-records": lambda r, g: g.update(weighting="records"),
        "sums": sums,
        "repeats": repeats,
        "voids": lambda r, g: g.update(void_attempts=r.randint(1, 4)),
        "cap": lambda r, g: g.update(most_participations=r.randint(1, 6)),
        "declines": lambda r, g: g.update(may_decline="site policy"),
        "hidden-draw": lambda r, g: g.update(draw_is_hidden=True),
        "bounded": lambda r, g: g.update(release="bounded-sums", rounds=r.choice([1, 1, 3])),
        "prepared": prepares,
        "part-way": lambda r, g: g.update(completed=r.randint(0, g["rounds"])),
        "clipped-mean": lambda r, g: g.update(server_mean="clipped"),
        "forgetful": lambda r, g: g.update(memory=False),
        "single": lambda r, g: None,
    }
    for word in kind.split("."):
        if word == "refused":
            refused(rng, given, place)
        else:
            steps[word](rng, given)
    return given


KINDS = (
    *("single", "poisson", "single.part-way", "poisson.part-way"),
    *("one-step", "poisson.one-step", "one-step.declines", "one-step.cap", "one-step.repeats"),
    *("unequal", "unequal.one-step", "unequal.one-step.by-records", "unequal.by-records.poisson"),
    *("noises", "noises.one-step.weights", "noises.poisson.one-step.weights", "many.one-step"),
    *("many.poisson.one-step.weights", "crowd.one-step", "many"),
    *(
        "user",
        "user.one-step",
        "user.forgetful.hidden-draw",
        "forgetful",
        "user.one-step.hidden-draw",
        "user.repeats",
    ),
    *("one-step.sums", "one-step.sums.poisson", "unequal.one-step.sums", "user.one-step.sums"),
    *("noises.one-step.weights.sums", "one-step.sums.voids", "one-step.sums.repeats", "sums"),
    *("many.one-step.sums", "one-step.sums.cap.prepared", "one-step.sums.part-way"),
    *("voids", "cap", "declines", "repeats", "repeats.poisson", "noises.repeats", "cap.voids"),
    *("bounded.one-step", "bounded.one-step.poisson", "bounded.one-step.sums", "clipped-mean"),
    *(
        "prepared",
        "prepared.poisson",
        "prepared.one-step",
        "prepared.user",
        "one-step.prepared.sums",
    ),
    "clipped-mean.one-step",
)
COUNT, REFUSED = 300, 19


def inputs() -> list[tuple[str, Given]]:
    """The mechanisms and their names, always the same."""
    rng = random.Random(SEED)
    found = [(f"{place:03d}:refused", of_kind("refused", rng, place)) for place in range(REFUSED)]
    while len(found) < COUNT:
        kind = KINDS[len(found) % len(KINDS)]
        found.append((f"{len(found):03d}:{kind}", of_kind(kind, rng, len(found))))
    return found
