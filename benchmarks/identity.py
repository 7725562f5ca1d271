"""Do two source trees give the same results, bit for bit?

Four kinds of results are compared, all from fixed seeds: models that :func:`dpscaffold.train`
makes of arrays (every algorithm × kind of run × engine, and networks), models that
:func:`dpscaffold.run` makes of configurations, most of them of untidy CSV files, with predictions
for new files; deployed runs with sites in memory; and privacy figures. What is kept is the sha256
of parameters, of predictions and of every metric over the rounds, and every number of evaluations
and privacy statements as it is.

Each tree runs its own copy of this script, because it also needs the tests of its tree. Exit
status 1 says that something differs, or that one tree lacks what the other has::

    PYTHONPATH=old/src python old/benchmarks/identity.py --out old.json
    PYTHONPATH=src python benchmarks/identity.py --compare old.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dpscaffold
from dpscaffold import (
    Federation,
    Gaussian,
    Logistic,
    Mlp,
    ModuleTask,
    Plan,
    Task,
    fedavg,
    load_model,
    run,
    scaffold,
    scaffold_balanced,
    train,
)
from dpscaffold.algorithms import ITERATIVE
from dpscaffold.errors import BadInput
from dpscaffold.models import evaluate_files, predict_files
from dpscaffold.privacy import (
    Adversary,
    Cost,
    Mechanism,
    Part,
    adversaries,
    describe,
    epsilon,
    state,
)

#: What was found: digests and numbers, by case and by what they are of.
Found = dict[str, dict[str, str]]

# --- digests


def sha(value: bytes | Tensor | object) -> str:
    """The digest of bytes, of a tensor, or of values that JSON can hold."""
    if isinstance(value, Tensor):
        value = value.numpy().tobytes()
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return hashlib.sha256(raw).hexdigest()


def of_history(history: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Every metric over the rounds but times; a metric may be missing in some of the rows."""
    names = sorted({name for row in history for name in row} - {"round_seconds"})
    return {name: sha([row.get(name, "missing") for row in history]) for name in names}


def numbers(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every number inside dictionaries and lists, as its repr, by its path. An entry of a list is
    called by its name, where it has one; lists of lists are curves, and give one digest."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        if value and isinstance(value[0], list | tuple):
            yield name, sha(value)
            return
        for place, inner in enumerate(value):
            own = inner.get("name", place) if isinstance(inner, Mapping) else place
            yield from numbers(inner, f"{name}.{own}")
    elif isinstance(value, int | float) or value is None:
        yield name, repr(value)


# --- models of arrays

EQUAL, UNEQUAL = (20,) * 10, (20, 35, 11, 52, 20, 8, 27, 30, 14, 20)

#: K·s = 1, so that FedSGD may run it too.
PLAN = Plan(
    rounds=20,
    local_steps=5,
    user_ratio=0.4,
    data_ratio=0.2,
    learning_rate=0.4,
    warm_rounds=4,
    evaluate_every=4,
)

#: What is varied: the sizes of the users, changes of the plan, the mechanism.
KINDS: dict[str, tuple[tuple[int, ...], dict[str, str], Gaussian | None]] = {
    "no privacy": (EQUAL, {}, None),
    "fixed": (EQUAL, {}, Gaussian(clip=0.7, noise=2.0)),
    "poisson": (EQUAL, {}, Gaussian(clip=0.7, noise=2.0, sampling="poisson")),
    "user level": (EQUAL, {}, Gaussian(clip=0.7, noise=0.6, unit="user")),
    "unequal users": (UNEQUAL, {}, Gaussian(clip=0.7, noise=2.0)),
    "record weights": (UNEQUAL, {"weighting": "records"}, Gaussian(clip=0.7, noise=2.0)),
    "averaging": (UNEQUAL, {"averaging": "tail"}, None),
}


def federation(sizes: tuple[int, ...]) -> Federation:
    """Users with their own centres and labels, from a fixed seed."""
    stream = np.random.default_rng(7)
    tables = []
    for size in sizes:
        centre, weights = stream.standard_normal(6), stream.standard_normal((6, 3))
        x = (centre + stream.standard_normal((size, 6))).astype(np.float32)
        tables.append((x, (x @ weights).argmax(1)))
    return Federation.from_arrays(tables, tables, classes=3)


def trained(task: Task, make: Callable[[], Any], kind: str, engine: str, rounds: int) -> Any:
    """The parameters and the history of one run."""
    sizes, changes, privacy = KINDS[kind]
    plan = PLAN.changed(rounds=rounds, **changes)  # type: ignore[arg-type]
    result = train(federation(sizes), task, make(), plan, privacy, engine=engine)
    return {"x": sha(result.params), **of_history(result.history)}


def linear_models() -> Found:
    """Every algorithm, kind and engine with a linear model."""
    return {
        f"{name} | {kind} | {engine}": trained(Logistic(6, 3), make, kind, engine, PLAN.rounds)
        for name, make in ITERATIVE.items()
        for kind in KINDS
        for engine in ("loop", "simulator")
    }


def modules() -> dict[str, nn.Module]:
    """A convolution over records of shape (1, 6) and two layers with a norm between them, with
    weights from a fixed seed."""
    torch.manual_seed(3)
    return {
        "convolution": nn.Sequential(
            nn.Conv1d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
        ),
        "two layers": nn.Sequential(
            nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)
        ),
    }


def networks() -> Found:
    """Some algorithms, kinds and engines with networks."""
    nets = modules()
    tasks: dict[str, Task] = {
        "mlp": Mlp(6, 3, hidden=7),
        "convolution": ModuleTask(nets["convolution"], shape=(1, 6)),
        "two layers": ModuleTask(nets["two layers"]),
    }
    return {
        f"{name} | {make.__name__} | {kind} | {engine}": trained(task, make, kind, engine, 5)
        for name, task in tasks.items()
        for make in (fedavg, scaffold, scaffold_balanced)
        for kind in ("no privacy", "fixed", "poisson", "user level")
        for engine in ("loop", "simulator")
    }


# --- models of configurations

SHORT_PLAN = {
    "rounds": 6,
    "local_steps": 4,
    "user_ratio": 0.5,
    "data_ratio": 0.25,
    "evaluate_every": 2,
    "seed": 11,
}

#: Choices that only a configuration offers, or that the other cases leave at their defaults.
CHOICES: dict[str, dict[str, Any]] = {
    "momentum": {"algorithm.name": "fedavg", "algorithm.server": "momentum"},
    "adam": {"algorithm.name": "scaffold", "algorithm.server": "adam"},
    "unequal steps": {"algorithm.name": "fednova", "plan.steps_by_user": [4, 2, 1, 4, 3, 2]},
    "cosine": {"plan.schedule": "cosine", "plan.averaging": "uniform"},
    "optimum": {"task.metrics": ["optimum"], "task.class_weights": [1.0, 2.0, 0.5]},
    "median clip": {"privacy.clip": "median", "privacy.noise": 2.0},
    "user epsilon": {"privacy.noise": 2.0, "privacy.user_epsilon": 2.5},
    "unequal sizes": {"privacy.noise": 2.0, "data.size_spread": 0.5, "plan.weighting": "records"},
}


def configured() -> Found:
    """A run of synthetic data for each of these choices."""
    data = {"users": 6, "records": 40, "features": 5, "classes": 3, "seed": 5}
    found: Found = {}
    for name, choices in CHOICES.items():
        result = run({"data": data, "plan": SHORT_PLAN}, choices)
        found[f"configured | {name}"] = {
            "x": sha(result.params),
            "ended": f"{result.ended} after {result.rounds} rounds",
            **of_history(result.history),
            **dict(numbers(result.privacy, "privacy")),
        }
    return found


# --- models of CSV files

WARDS = ("surgery", "children", "Männer")
READ_AS = {
    "source": "csv",
    "delimiter": ";",
    "decimal": ",",
    "dates": {"admitted": "%d.%m.%Y"},
    "categories": ["ward", "sex"],
    "na_values": {"weight": ["-9", "?"]},
    "seed": 5,
}
FILLED = {"missing": {"age": 50.0, "weight": "indicator", "ward": "category", "*": 0.0}}

#: What is learnt of the tables: the [data] keys, the [task] table.
TARGETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text label": (
        {
            "label": "ill",
            "values": {"sex": {"f": ["F", "w"]}, "ill": {"yes": ["ja", "Yes"]}},
            **FILLED,
        },
        {},
    ),
    "integer label": ({"label": "grade", "missing": "drop"}, {"kind": "mlp", "hidden": 5}),
    "number": (
        {"label": "stay", "target": {"kind": "number", "low": 0, "high": 20}, "missing": 1.5},
        {"kind": "linear"},
    ),
    "two labels": ({"label": ["fell", "pain"], **FILLED}, {"kind": "linear"}),
}
LABELS = ("ill", "grade", "stay", "fell", "pain")

#: The [privacy] table, changes of the [data] table.
PROTECTED: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "no privacy": (None, {}),
    "fixed": ({"clip": 0.7, "noise": 2.0}, {}),
    "poisson": ({"clip": 0.7, "noise": 2.0, "sampling": "poisson"}, {}),
    "user level": ({"clip": 0.7, "noise": 0.5, "unit": "user"}, {}),
    "calibrated": ({"clip": 0.7, "epsilon": 3.0, "view": "third-party"}, {}),
    "private preparation": (
        {"clip": 0.7, "noise": 2.0},
        {
            "preprocess": [
                {"step": "standardise", "fit": "private", "norm_bound": 1.0, "noise": 9.0},
                {"step": "clip-norm", "norm": 1.0},
            ]
        },
    ),
}


def rows(seed: int, sites: Sequence[str], missing: bool = True) -> list[dict[str, str]]:
    """Records of people at some sites, as cells with decimal commas; with ``na_values``, some
    values are missing, and some categories and labels are spelt in other ways."""
    stream = np.random.default_rng(seed)

    def some(*texts: str) -> str:
        return texts[int(stream.integers(len(texts)))]

    found = []
    for site in sites:
        for number in range(int(stream.integers(24, 40))):
            age, stay = int(stream.integers(18, 95)), float(stream.gamma(2.0, 3.0))
            ill = age + 6 * stay + stream.normal(0, 9) > 90
            row = {
                "site": site,
                "patient": f"{site}-{number}",
                "age": str(age),
                "weight": f"{stream.normal(75, 12):.1f}".replace(".", ","),
                "ward": some(*WARDS),
                "sex": some("f", "m"),
                "admitted": f"{stream.integers(1, 29):02}.{stream.integers(1, 13):02}.2023",
                "ill": "yes" if ill else "no",
                "grade": str(min(2, int(stay) // 4)),
                "stay": f"{stay:.2f}".replace(".", ","),
                "fell": str(int(age + stream.normal(0, 20) > 70)),
                "pain": str(int(stream.random() < 0.4)),
            }
            if missing:
                row["age"] = some(row["age"], row["age"], row["age"], row["age"], "")
                row["weight"] = some(row["weight"], row["weight"], row["weight"], "-9", "?", "")
                row["ward"] = some(row["ward"], row["ward"], row["ward"], "", f" {row['ward']}")
                row["sex"] = some("m") if row["sex"] == "m" else some("f", "F", "w", "f ")
                row["ill"] = some("yes", "ja", "Yes ") if ill else some("no", " no")
            found.append(row)
    return found


def write(path: Path, table: list[dict[str, str]], german: bool = True, code: str = "utf-8") -> str:
    """A file of these rows, as a spreadsheet of either country writes it; its path."""
    sign = ";" if german else ","
    lines = [table[0].keys(), *(row.values() for row in table)]
    cells = [[cell if german else cell.replace(",", ".") for cell in line] for line in lines]
    path.write_text("\n".join(sign.join(line) for line in cells) + "\n", encoding=code)
    return str(path)


def write_folder(folder: Path, seed: int) -> str:
    """One file for each of five sites, each in its own encoding, with its own signs; one of them
    lacks a column. The folder's path."""
    folder.mkdir()
    for place, code in enumerate(("utf-8", "cp1252", "utf-8-sig", "utf-16", "cp1252")):
        table = rows(seed + place, [f"site {place}"])
        if place == 1:
            table = [{key: row[key] for key in row if key != "weight"} for row in table]
        write(folder / f"site{place}.csv", table, place % 2 == 0, code)
    return str(folder)


def of_table(config: dict[str, Any], out: Path, new: str, complete: str) -> dict[str, str]:
    """One run of a configuration, and what the model in its folder gives for ``new`` files and for
    a file of ``complete`` rows."""
    result = run(config, out=out / "run")
    model = load_model(out / "run")
    predict_files(model, [new], out / "predicted.csv")
    return {
        "x": sha(result.params),
        "x of the folder": sha(model.params),
        **of_history(result.history),
        **dict(numbers(result.privacy, "privacy")),
        "scores": sha(model.scores(complete)),
        "predictions": sha((out / "predicted.csv").read_bytes()),
        **dict(numbers(evaluate_files(model, new).to_dict(), "evaluation")),
    }


def cases(folder: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str]]:
    """The name of a case, its [data] and [task] tables, and files of new rows: every target from
    one file, and one target from a folder."""
    sites = ("east", "north", "south", "west", "inland", "coast")
    one = {"path": write(folder / "all.csv", rows(1, sites)), "user": "site"}
    new = write(folder / "new.csv", rows(2, sites[:4]))
    for target, (keys, task) in TARGETS.items():
        others = [name for name in LABELS if name not in np.atleast_1d(keys["label"])]
        data = {**READ_AS, **one, **keys, "exclude": ["patient", *others]}
        yield f"file | {target}", data, task, new
        if target == "text label":
            del data["user"]
            auto = dict.fromkeys(("encoding", "delimiter", "decimal"), "auto")
            data |= {"path": write_folder(folder / "sites", 10), "absent": ["weight"], **auto}
            data["exclude"] = ["patient", "site", *others]
            yield f"folder | {target}", data, task, write_folder(folder / "new", 20)


def tables(folder: Path) -> Found:
    """Every case with every kind of privacy."""
    found: Found = {}
    complete = write(folder / "complete.csv", rows(3, ["east", "west"], missing=False))
    for name, data, task, new in cases(folder):
        for kind, (privacy, changes) in PROTECTED.items():
            config = {"data": {**data, **changes}, "task": task, "plan": SHORT_PLAN}
            if privacy is not None:
                config["privacy"] = privacy
            out = folder / f"{name} {kind}".replace(" | ", " ").replace(" ", "-")
            out.mkdir()
            found[f"{name} | {kind}"] = of_table(config, out, new, complete)
    return found


# --- deployed runs


def deployed(folder: Path) -> Found:
    """Runs with sites in memory, by the same helpers as in the tests of this tree."""
    # In place of the folder of this script, whose deploy.py would hide tests/deploy.
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "tests")
    from deploy.test_deployed import deployment
    from deploy.world import World

    found: Found = {}
    names = product(("scaffold", "fedavg"), ("logistic", "mlp"), ("no privacy", "fixed", "poisson"))
    for algorithm, task, kind in names:
        place = folder / f"{algorithm} {task} {kind}".replace(" ", "-")
        privacy = KINDS[kind][2]
        world = World(place / "sites", algorithm, task, privacy, rounds=4, evaluate_every=2)
        served = deployment(world, place / "run").run(world.names, resume=False)
        found[f"deployed | {algorithm} | {task} | {kind}"] = {
            "x": sha(served.state.params),
            "x of the folder": sha(load_model(place / "run").params),
            **{f"slot {name}": sha(slot) for name, slot in served.state.server.slots.items()},
            **of_history(served.history),
            **dict(numbers(served.statement, "privacy")),
        }
    return found


# --- privacy figures


def settings() -> dict[str, Mechanism]:
    """Runs such that every theorem applies to one of them at least."""
    sized = {"rounds": 30, "local_steps": 4, "users": 12, "cohort_size": 5}
    equal = {**sized, "records": 40, "batch_sizes": 8}
    unequal = {
        **sized,
        "records": [40, 25, 60] * 4,
        "batch_sizes": [8, 5, 12] * 4,
        "delta": 1e-5,
    }
    one_sum = {"local_steps": 1, "memory": False, "one_sum": True}
    given: dict[str, dict[str, Any]] = {
        "fixed": {**equal, "noise": 3.0},
        "poisson": {**equal, "noise": 3.0, "sampling": "poisson"},
        "unequal users": {**unequal, "noise": 2.0},
        "record weights": {**unequal, **one_sum, "noise": 2.0, "weighting": "records"},
        "one step": {**equal, **one_sum, "noise": 1.5},
        "one Poisson step": {**equal, **one_sum, "noise": 1.5, "sampling": "poisson"},
        "user level": {**equal, "noise": 4.0, "unit": "user"},
        "declining": {**equal, **one_sum, "noise": 3.0, "declines": "a budget of its own"},
        "hardly any noise": {**equal, "noise": 0.1},
        "no noise": {**equal, "noise": 0.0},
    }
    return {name: describe(**keys) for name, keys in given.items()}


def accounted(about: Mechanism, who: Adversary, *args: Any, **more: Any) -> str:
    """An ε as its repr; where there is none, that it is refused, without the reason."""
    try:
        return repr(epsilon(about, who, *args, **more))
    except BadInput:
        return "refused"


def figures() -> Found:
    """All numbers of the statement of every setting; its ε towards every adversary, at the end and
    early, given who took part, with another mechanism and with a round that was run again."""
    found: Found = {}
    for name, about in settings().items():
        said = state([Part(about, about.rounds)])
        parts = found[f"figures | {name}"] = dict(numbers(said.to_json(), "statement"))
        again = replace(about, extra=1)
        for colluders in (1, 2):
            for who in adversaries(about, colluders).values():
                key = f"{who.name}, {colluders} colluding"
                parts |= {
                    f"{key}, after all rounds": accounted(about, who),
                    f"{key}, after 7 rounds": accounted(about, who, 7),
                    f"{key}, after 7 participations": accounted(about, who, times=7),
                    f"{key}, with a cost": accounted(about, who, costs=(Cost("mean", noise=5.0),)),
                    f"{key}, with a repeated round": accounted(again, who),
                }
    return found


# --- the comparison


def everything() -> Found:
    """All cases."""
    with tempfile.TemporaryDirectory() as name:
        runs = tables(Path(name)) | deployed(Path(name))
    return linear_models() | networks() | configured() | runs | figures()


def differences(found: Found, other: Found) -> list[str]:
    """What differs, and what is in one of the two alone, one line each."""

    def listed(what: Found) -> dict[str, str]:
        values = {f"{case}: {part}": v for case, parts in what.items() for part, v in parts.items()}
        return dict.fromkeys(what, "") | values

    here, there = listed(found), listed(other)
    both = here.keys() & there.keys()
    return sorted(
        [f"only here: {name}" for name in here.keys() - both]
        + [f"only in the other tree: {name}" for name in there.keys() - both]
        + [f"differs: {name}" for name in both if here[name] != there[name]]
    )


def main() -> int:
    """Print, write or compare."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, help="write the digests here")
    options.add_argument("--compare", type=Path, help="digests of another tree")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    print(f"the code is that of {Path(dpscaffold.__file__).parent}", file=sys.stderr)
    found = everything()
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not chosen.compare:
        if not chosen.out:
            print(json.dumps(found, indent=1))
        return 0
    lines = differences(found, json.loads(chosen.compare.read_text(encoding="utf-8")))
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(found)} cases, {sum(map(len, found.values()))} values, {len(lines)} differences")
    return bool(lines)


if __name__ == "__main__":
    raise SystemExit(main())
