"""Small runs and plans as configurations: the examples of the documentation, varied."""

from __future__ import annotations

import copy
import random
import tomllib
from pathlib import Path
from typing import Any

Given = dict[str, Any]
#: The examples of version 0.2.0, in its words.
EXAMPLES = Path(__file__).parent / "inputs" / "examples"
#: What stands for the folder of the run in a configuration.
FOLDER = "{folder}"

SMALL: Given = {
    "data": {
        "source": "synthetic",
        "users": 8,
        "records": 60,
        "dimension": 4,
        "classes": 3,
        "seed": 5,
    },
    "plan": {
        "rounds": 4,
        "local_steps": 3,
        "user_ratio": 0.5,
        "data_ratio": 0.25,
        "learning_rate": 0.1,
        "seed": 2,
        "checkpoint_every": 2,
    },
    "privacy": {"clip": 1.0, "noise": 5.0},
}
ONE_STEP: Given = {"plan": {"local_steps": 1}, "algorithm": {"name": "fedavg"}}
EVERYBODY: Given = {"plan": {"user_ratio": 1.0}}
SUMS: Given = {**ONE_STEP, "secure": {"colluders": 1}}
CENTRE = {"step": "centre", "fit": "private", "norm_bound": 1.0, "noise": 6.0}
PCA = {"step": "pca", "components": 2, "fit": "private", "norm_bound": 1.0, "noise": 9.0}
POISSON: Given = {"privacy": {"sampling": "poisson"}}
#: The budgets of eight users, by the names that synthetic users have.
BUDGETS = {"default": 2.0, "1": 1.0, "4": 4.0}

RIDGE: Given = {"algorithm": {"name": "ridge"}}
FILE: Given = {"privacy": {"budget_file": f"{FOLDER}/budget.jsonl"}}
RELEASE: Given = {"privacy": {"release": True}}
OVERLOOKED: Given = {"privacy": {"release": True, "allow": ["unprotected-preprocessing"]}}
#: A table whose classes and ranges are public.
TABLE: Given = {
    **SMALL,
    "data": {
        "source": "csv",
        "path": f"{FOLDER}/visits.csv",
        "label": "ill",
        "user": "site",
        "classes": ["no", "yes"],
        "ranges": {"age": [0, 110], "stay": [0, 40]},
        "preprocess": ["clip-norm:1"],
    },
}


def steps_of(*steps: Any) -> Given:
    """The table's steps."""
    return {"data": {"preprocess": list(steps)}}


def table() -> str:
    """The records of the table: 160 visits at eight sites."""
    rng = random.Random(7)
    lines = ["site,age,stay,ill"]
    for site in "abcdefgh":
        for _ in range(20):
            age, stay = rng.randint(20, 90), rng.randint(1, 20)
            lines.append(f"{site},{age},{stay},{'yes' if age + stay > 65 else 'no'}")
    return "\n".join(lines) + "\n"


#: No central optimum is solved for.
QUICK = {"optimum": False}
#: The examples that need no download, with fewer rounds and records.
SHORTENED = {
    "audit": {"plan": {"rounds": 3}},
    "dp-fedavg": {"plan": {"rounds": 3, "local_steps": 4}, "task": QUICK},
    "dp-scaffold-mild": {
        "plan": {"rounds": 2, "local_steps": 4},
        "task": QUICK,
    },
    "dp-scaffold": {"plan": {"rounds": 3, "local_steps": 4}, "task": QUICK},
    "epsilon-one": {"plan": {"rounds": 3, "local_steps": 4}},
    "scaffold": {"plan": {"rounds": 2, "local_steps": 2}, "task": QUICK},
    "secure-sums": {"plan": {"rounds": 4}},
}


def varied(*changes: Given, of: Given = SMALL) -> Given:
    """The small run with changes, table by table."""
    found = copy.deepcopy(of)
    for change in changes:
        for table, values in change.items():
            found[table] = {**found.get(table, {}), **values}
    return found


def case(config: Given, *steps: Given, budget: Given | None = None) -> Given:
    """``steps`` are overrides of runs into one folder, one after another; none is a plan."""
    return {"config": config, "steps": list(steps), "budget": budget}


def of_examples() -> list[tuple[str, Given]]:
    """Every shortened example: the plan of all its rounds, and a short run."""
    found = []
    for name, changes in SHORTENED.items():
        config = tomllib.loads((EXAMPLES / f"{name}.toml").read_text(encoding="utf-8"))
        small = {"data": {"users": 10, "records": 125}}
        if name != "scaffold":
            found.append((f"plan.{name}", case(varied(of=config))))
        found.append((f"run.{name}", case(varied(small, changes, of=config), {})))
    return found


def inputs() -> list[tuple[str, Given]]:
    """The statements and their names, always the same."""
    privacy: dict[str, Given] = {
        "poisson": {"sampling": "poisson"},
        "add-remove": {"sampling": "poisson", "neighbours": "add-remove"},
        "zero-out": {"sampling": "poisson", "neighbours": "zero-out"},
        "user-unit": {"unit": "user", "noise": 8.0},
        "delta": {"delta": 1e-4},
        "large-delta": {"delta": 0.01},
        "secret": {"secret": True},
        "cap": {"max_participations": 2},
        "user-epsilon": {"user_epsilon": 0.9},
        "target-epsilon": {"target_epsilon": 1.0},
        "median-clip": {"clip": "median"},
        "no-noise": {"noise": 0.0},
    }
    named: list[tuple[str, Given]] = of_examples()
    for name, change in privacy.items():
        tables = {"privacy": change}
        if name == "add-remove":
            tables["data"] = {"declared_sizes": 50}
        # With secret noise the draw differs every time, unless everybody takes part.
        more = EVERYBODY if name == "secret" else {}
        named.append((f"run.{name}", case(varied(tables, more), {})))
    named += [
        (
            "run.warm",
            case(varied({"algorithm": {"name": "scaffold-warm"}, "plan": {"rounds": 11}}), {}),
        ),
        ("run.one-step", case(varied(ONE_STEP), {})),
        ("run.unequal", case(varied(ONE_STEP, {"data": {"size_spread": 0.5}}), {})),
        ("run.by-records", case(varied({"plan": {"weighting": "records"}}), {})),
        ("run.colluders", case(varied(ONE_STEP, {"privacy": {"colluders": 2}}), {})),
        ("run.sums", case(varied(SUMS, EVERYBODY), {})),
        ("run.sums-voids", case(varied(SUMS, EVERYBODY, {"secure": {"voids": 2}}), {})),
        ("run.sums-least", case(varied(SUMS, EVERYBODY, {"secure": {"least": 6}}), {})),
        ("run.sums-user", case(varied(SUMS, {"privacy": {"unit": "user", "noise": 8.0}}), {})),
        ("run.budgets", case(_budgets(varied(ONE_STEP)), {})),
        ("run.budgets-sums", case(_budgets(varied(SUMS, EVERYBODY)), {})),
        ("run.epsilon", case(_epsilon(varied({})), {})),
        ("run.ridge", case(_without_plan(varied(RIDGE)), {})),
        ("run.ridge-sums", case(_without_plan(varied(RIDGE, {"secure": {"colluders": 1}})), {})),
        ("run.table", case(varied(of=TABLE), {})),
        ("run.prepared", case(varied(steps_of(CENTRE, "unit-norm"), of=TABLE), {})),
        ("run.pca", case(varied(steps_of(CENTRE, PCA, "unit-norm"), of=TABLE), {})),
        (
            "run.prepared-poisson",
            case(varied(POISSON, steps_of(CENTRE, "unit-norm"), of=TABLE), {}),
        ),
        (
            "run.prepared-sums",
            case(varied(SUMS, EVERYBODY, steps_of(CENTRE, "unit-norm"), of=TABLE), {}),
        ),
        ("run.unprotected", case(varied(steps_of("standardise"), of=TABLE), {})),
        ("run.release", case(_unseeded(varied(EVERYBODY, RELEASE, of=TABLE)), {})),
        ("run.release-seeded", case(varied(EVERYBODY, RELEASE, of=TABLE), {})),
        ("run.release-overlooked", case(_unseeded(varied(EVERYBODY, OVERLOOKED)), {})),
        ("plan.release", case(_unseeded(varied(RELEASE, of=TABLE)))),
        ("plan.budgets", case(_budgets(varied(ONE_STEP, {"privacy": {"secret": True}})))),
        ("run.more-rounds", case(varied({}), {}, {"plan.rounds": 7})),
        ("run.more-twice", case(varied(ONE_STEP), {}, {"plan.rounds": 6}, {"plan.rounds": 7})),
        ("run.more-sums", case(varied(SUMS, EVERYBODY), {}, {"plan.rounds": 6})),
        (
            "run.more-prepared",
            case(varied(steps_of(CENTRE, "unit-norm"), of=TABLE), {}, {"plan.rounds": 6}),
        ),
        ("run.budget-file", case(varied(FILE), {}, budget={"epsilon": 3.0, "delta": 1e-2})),
        ("run.small-file", case(varied(FILE), {}, budget={"epsilon": 0.3, "delta": 1e-2})),
    ]
    return [(f"{place:03d}:{name}", given) for place, (name, given) in enumerate(named)]


def _budgets(config: Given) -> Given:
    del config["privacy"]["noise"]
    config["privacy"]["epsilon"] = BUDGETS
    return config


def _epsilon(config: Given) -> Given:
    del config["privacy"]["noise"]
    config["privacy"]["epsilon"] = 1.0
    return config


def _unseeded(config: Given) -> Given:
    del config["plan"]["seed"]
    return config


def _without_plan(config: Given) -> Given:
    del config["plan"]
    return config


#: Words by which a sentence of "what is outside" is known, and a name for what it says.
CAVEATS = {
    "Metrics computed on private records": "metrics",
    "yperparameters tuned on private records": "tuning",
    "Tuning: every run on these records": "tuning",
    "derived from a seed stored": "seed-is-public",
    "Stopping or selecting participants": "stopping",
    "are computed from single uploads": "single-uploads",
    "Simulated secure sums": "simulated-sums",
    "delta is not below": "large-delta",
    "is not below 1/": "large-delta",
    "Released all the same": "released-all-the-same",
    "Sites released a noised comparison": "comparison-of-models",
    "Features were ": "preparation",
}


def caveat(sentence: str) -> str:
    """The name of what a sentence leaves open."""
    for words, name in CAVEATS.items():
        if words in sentence:
            return name
    return "other"
