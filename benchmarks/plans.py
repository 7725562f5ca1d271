"""Whole plans, trained as they are written, next to the best of the frontier.

    python benchmarks/plans.py --out FOLDER [--device cuda] [--data-dir DATA] [--rows 1 2 3 4]
    python benchmarks/plans.py --out FOLDER --write docs

For each row of the frontier and each ε towards the server, ``recommend`` makes a plan from public
facts alone: at most 400 rounds, the row's local steps and participants, Poisson batches. Rows 1 to
4 have the paper's own features, 5 and 6 HOG features, 7 and 8 HOG features and secure sums. The
plan is written, read back and trained on the real data with three seeds. What its averaged model
reaches stands next to the best of the frontier at the same ε, which is the best of all algorithms,
step sizes, clips and K that were tried **with the test data in view**.

Finished parts of FOLDER are kept, so the script goes on where it was stopped, and several may work
on one FOLDER with other ``--rows`` or ``--epsilons``. ``--write docs`` runs nothing: it writes
benchmarks/results/plans.md and plans.json and the table in docs/planning.md from what is finished,
for which FOLDER/plans.json is enough.
``--rounds 8 --seeds 1`` is for trying the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch

import dpscaffold
from dpscaffold.atomic import write_text
from dpscaffold.checks import floor_share
from dpscaffold.config import Configuration, load
from dpscaffold.data.loading import load_federation
from dpscaffold.data.preprocessing import HogSettings, Pca, hog_width
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import experiment
from dpscaffold.paper.solving import sizes_of
from dpscaffold.planning.facts import Facts, Limits
from dpscaffold.planning.recommendation import Goal, Preset
from dpscaffold.report.planning import write_plan
from dpscaffold.training.events import Event, RoundDone, StackBegun
from dpscaffold.training.stack import Schedule, train_stack

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "docs" / "results"
FRONTIERS = ("frontier", "frontier-hog", "frontier-secure")
PAGE = ROOT / "docs" / "planning.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- plans -->", "<!-- end of plans -->"

#: Rows by number, as the frontiers name them; those of secure sums say so.
ROWS = {
    1: "synthetic (5, 5), λ = 0",
    2: "synthetic (5, 5)",
    3: "FEMNIST, γ = 0 %",
    4: "MNIST, γ = 0 %",
    5: "FEMNIST, HOG, γ = 0 %",
    6: "MNIST, HOG, γ = 0 %",
    7: "FEMNIST, HOG, γ = 0 %, secure sums",
    8: "MNIST, HOG, γ = 0 %, secure sums",
}
SECURE = ", secure sums"
FEATURES = {
    "frontier": "on the paper's features",
    "frontier-hog": "on HOG features",
    "frontier-secure": "with secure sums on HOG features",
}
EPSILONS = (0.1, 0.3, 1.0, 3.0)
#: The line of the stored results on HOG features that holds plans.
OWN_PLAN = "planned, nothing looked at"


@dataclass(frozen=True)
class Trained:
    """What became of one plan: where it stands, what it says, and the accuracies by seed."""

    row: str
    epsilon: float
    algorithm: str
    rounds: int
    local_steps: int
    clip: float
    learning_rate: float
    noise: float
    accuracies: tuple[float, ...]
    planning_seconds: float
    device: str
    tail: float = 0.5


@dataclass(frozen=True)
class Best:
    """The best entry of the frontier at one row and ε."""

    algorithm: str
    local_steps: int
    clip: float
    learning_rate: float
    tail: float | None
    accuracies: tuple[float, ...]

    def __str__(self) -> str:
        return (
            f"{self.algorithm}, K = {self.local_steps}, C = {self.clip:g}, "
            f"η₀ = {self.learning_rate:g}{_averaged(self.tail)}"
        )


def _averaged(tail: float | None) -> str:
    return f", average of the last {tail:g}" if tail not in (None, 0.5) else ""


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Progress:
    """A line at every stack, and every hundred rounds of one."""

    def __init__(self, title: str) -> None:
        self.title, self.stack = title, ""

    def __call__(self, event: Event) -> None:
        if isinstance(event, StackBegun):
            self.stack = f"stack {event.number} of {event.of} of this wave"
            say(f"{self.title}: {self.stack}, {event.rounds} rounds")
        elif isinstance(event, RoundDone) and event.round % 100 == 0:
            say(f"{self.title}: {self.stack}, round {event.round} of {event.of}")


def frontier_of(row: str) -> str:
    """The experiment that a row is of."""
    if row.endswith(SECURE):
        return "frontier-secure"
    return "frontier-hog" if "HOG" in row else "frontier"


def case_of(row: str, epsilon: float) -> Case:
    """The frontier's case at this place, of which the data, the task, λ, K and δ are used."""
    place = row.removesuffix(SECURE), f"{epsilon:g} poisson"
    found = replace(experiment(frontier_of(row)), chosen={}).cases(1)
    # Its first line is DP-SCAFFOLD or that of secure sums, whose K is the row's own.
    return next(c for c in found if (c.labels["row"], c.labels["column"]) == place)


#: (features, classes) of images as they are read.
IMAGES = {
    "mnist": (28 * 28, 10),
    "fashion-mnist": (28 * 28, 10),
    "emnist47": (28 * 28, 47),
    "cifar10": (32 * 32 * 3, 10),
}


def shape_of(data: Any) -> tuple[int, int]:
    """(features, classes) of a row's records as they are trained on."""
    if data.source == "synthetic":
        return data.features, data.classes
    features, classes = IMAGES[data.source]
    for step in data.preprocess:
        if isinstance(step, Pca):
            features = step.components
        elif isinstance(step, HogSettings):
            features = hog_width(step.shape)
    return features, classes


def asked(case: Case) -> tuple[Facts, Goal, Limits, Preset]:
    """What the planner receives for a case: what is public of it (sizes, shape, γ, ε, the task, λ),
    and its T, K and participants as the most that one can afford; no record."""
    data, plan, privacy = case.settings.data, case.settings.plan, case.settings.privacy
    assert privacy is not None and isinstance(privacy.epsilon, float)
    facts = Facts(sizes_of(data), *shape_of(data), getattr(data, "similarity", None))
    limits = Limits(plan.rounds, plan.local_steps, floor_share(plan.user_ratio, facts.users))
    goal = Goal(privacy.epsilon, "server", privacy.delta, "poisson")
    preset = Preset(
        regularisation=plan.regularisation,
        task=case.settings.task.build(facts),
        secure=case.settings.secure,
    )
    return facts, goal, limits, preset


def planned(case: Case, folder: Path, rounds: int, device: str) -> float:
    """Make the plan and write it with the row's data and task, ready for ``train``; seconds."""
    facts, goal, limits, preset = asked(case)
    limits = replace(limits, rounds=min(rounds, limits.rounds))
    begun = time.perf_counter()
    title = f"planning {case.labels['row']}, ε = {goal.epsilon:g}"
    found = dpscaffold.plan(facts, goal, limits, preset, device=device, tell=Progress(title))
    seconds = time.perf_counter() - begun
    given = {name: case.tables[name] for name in ("data", "task") if name in case.tables}
    write_plan(found, folder, given)
    (folder / "seconds.json").write_text(json.dumps(seconds))  # last: the plan is complete
    return seconds


def trained(settings: Configuration, seeds: int, device: str, title: str) -> list[float]:
    """The test accuracy of the averaged model, by seed, of the plan as it is written."""
    federation = load_federation(settings.data)
    first = settings.setting(federation)
    runs = [replace(first, plan=first.plan.changed(seed=seed)) for seed in range(seeds)]
    say(f"{title}: training {first.label}, {first.plan.rounds} rounds, {seeds} seeds")
    outcomes = train_stack(runs, [federation] * seeds, Schedule(), device, Progress(title))
    return [0.0 if o.diverged else float(o.average["test_accuracy"]) for o in outcomes]


def cell(row: str, epsilon: float, arguments: argparse.Namespace) -> None:
    """Plan and train one place, unless that was done."""
    number = next(n for n, name in ROWS.items() if name == row)
    folder, title = arguments.out / f"row{number}-epsilon{epsilon:g}", f"{row}, ε = {epsilon:g}"
    if (folder / "trained.json").exists():
        say(f"{title}: trained already")
        return
    case = case_of(row, epsilon)
    try:
        seconds = float(json.loads((folder / "seconds.json").read_text()))
        say(f"{title}: planned already")
    except (OSError, ValueError):
        seconds = planned(case, folder, arguments.rounds, arguments.device)
    settings = load(folder / "plan.toml")
    accuracies = trained(settings, arguments.seeds, arguments.device, title)
    assert settings.privacy is not None
    plan = settings.plan
    rate, clip = plan.learning_rate, settings.privacy.clip
    assert isinstance(rate, float) and not isinstance(clip, str) and clip is not None
    result = Trained(
        row,
        epsilon,
        settings.algorithm.name,
        plan.rounds,
        plan.local_steps,
        clip,
        rate,
        json.loads((folder / "plan.json").read_text())["noise"],
        tuple(accuracies),
        round(seconds, 1),
        device_name(arguments.device),
        plan.averaged_share,
    )
    write_text(folder / "trained.json", json.dumps(asdict(result), ensure_ascii=False) + "\n")
    say(f"{title}: {100 * fmean(accuracies):.2f} %")


def device_name(device: str) -> str:
    chosen = torch.device(device)
    return torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else "CPU"


def finished(folder: Path) -> list[Trained]:
    """Every place that is done, in the order of rows and ε: those of FOLDER/plans.json, which may
    have come from another machine alone, and those of the folders, which may be newer."""
    rows = json.loads(read) if (read := _text(folder / "plans.json")) else []
    rows += [json.loads(_text(path)) for path in sorted(folder.glob("row*/trained.json"))]
    found = {}
    for values in rows:
        one = Trained(**{**values, "accuracies": tuple(values["accuracies"])})
        found[one.row, one.epsilon] = one
    order = list(ROWS.values())
    return sorted(found.values(), key=lambda one: (order.index(one.row), one.epsilon))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def frontier() -> dict[tuple[str, str], Best]:
    """The best mean over seeds of the averaged model, by row and column, over all that was tried
    in the frontiers."""
    import pyarrow.parquet

    keys = ("line", "local_steps", "clip", "learning_rate", "tail")
    runs: dict[tuple[str, str], dict[tuple[Any, ...], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for name in FRONTIERS:
        end = SECURE if name == "frontier-secure" else ""
        for line in pyarrow.parquet.read_table(MEASURED / name / "results.parquet").to_pylist():
            if line["output"].startswith("average") and line["line"] != OWN_PLAN:
                choice = tuple(line.get(key) for key in keys)
                place = runs[line["row"] + end, line["column"]]
                place[choice].append(float(line["test_accuracy"] or 0))
    found = {}
    for where, choices in runs.items():
        chosen = max(choices, key=lambda choice: fmean(choices[choice]))
        name, steps, clip, rate, tail = chosen
        found[where] = Best(
            name, int(steps), float(clip or "nan"), float(rate), tail, tuple(choices[chosen])
        )
    return found


def lines(done: Sequence[Trained]) -> Iterator[str]:
    """The table, and what it comes to."""
    best = frontier()
    yield "| row | ε | plan | accuracy | best of the frontier | its accuracy | difference |"
    yield "|---|---|---|---|---|---|---|"
    differences: dict[str, list[float]] = {}
    for one in done:
        top = best[one.row, f"{one.epsilon:g} poisson"]
        difference = 100 * (fmean(one.accuracies) - fmean(top.accuracies))
        differences.setdefault(FEATURES[frontier_of(one.row)], []).append(difference)
        yield (
            f"| {one.row} | {one.epsilon:g} | {one.algorithm}, T = {one.rounds}, "
            f"K = {one.local_steps}, C = {one.clip:g}, η₀ = {one.learning_rate:g}"
            f"{_averaged(one.tail)} | {shown(one.accuracies)} | {top} | {shown(top.accuracies)} "
            f"| {difference:+.2f} |"
        )
    if differences:
        yield ""
        yield " ".join(
            f"Over {len(some)} plans {where} the difference is {fmean(some):+.2f} points on "
            f"average, {min(some):+.2f} at worst, and {sum(d >= -2 for d in some)} of them lose at "
            f"most 2."
            for where, some in differences.items()
        )


def shown(accuracies: Sequence[float]) -> str:
    """Mean and deviation over seeds, in per cent."""
    return f"{100 * fmean(accuracies):.2f} ± {100 * pstdev(accuracies):.2f}"


def report(done: Sequence[Trained]) -> str:
    """The page of results."""
    devices = ", ".join(sorted({one.device for one in done}))
    rounds = max((one.rounds for one in done), default=0)
    seeds = max((len(one.accuracies) for one in done), default=0)
    planning = [one.planning_seconds for one in done] or [0.0]
    parts = [
        "# Whole plans, trained as they are",
        "`python benchmarks/plans.py --out FOLDER --device cuda --data-dir DATA`, then `--out "
        "FOLDER --write docs`.",
        "Each plan was made from public facts alone (users, sizes, features, classes, γ where the "
        "data are split by similarity, the task, λ, ε towards the server at δ = 1/records, at "
        "most 400 rounds, the row's K and participants, Poisson batches), written "
        f"and trained as it is, {seeds} seeds; accuracy is that of the averaged model, in per "
        "cent, ± the deviation over seeds. Next to it is the best of the frontier "
        "(docs/results/frontier) at the same ε: the best of all algorithms, step sizes, clips, K "
        "and averaged shares of the rounds that were tried there, 400 rounds each, **with the test "
        "data in view**.",
        "\n".join(lines(done)),
        f"Device: {devices}; largest T {rounds}; a plan took {min(planning):.0f} to "
        f"{max(planning):.0f} s while others ran.",
    ]
    return "\n\n".join(parts) + "\n"


def write(done: Sequence[Trained], folder: Path) -> None:
    """plans.md and plans.json."""
    rows: list[dict[str, Any]] = [asdict(one) for one in done]
    text = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    write_text(folder / "plans.json", f"[\n {text}\n]\n")
    try:
        write_text(folder / "plans.md", report(done))
    except (ImportError, OSError) as error:  # the page is written where the frontier can be read
        say(f"plans.md is not written here ({error})")


def write_docs(done: Sequence[Trained]) -> None:
    """The results, and the table between its marks in docs/planning.md."""
    write(done, RESULTS)
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    said = (
        "**Whole plans, trained as they are** (`python benchmarks/plans.py --out FOLDER --device "
        "cuda --data-dir DATA`, then `--out FOLDER --write docs`): made from public facts alone, "
        "with at most 400 rounds, the row's local steps and participants, and Poisson batches; "
        "test accuracy of the averaged model in per cent, three seeds, next to the best of the "
        "frontier at the same ε, chosen among all algorithms, η₀, C, K and averaged shares of "
        "the rounds that were tried there **with the test data in view**."
    )
    table = "\n".join(lines(done))
    write_text(PAGE, f"{before}{BEGIN}\n{said}\n\n{table}\n{END}{after}")
    say(f"{PAGE.relative_to(ROOT)} and benchmarks/results/plans.md hold {len(done)} plans")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, help="the folder that holds mnist and emnist47")
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--epsilons", type=float, nargs="+", choices=EPSILONS, default=EPSILONS)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", choices=["docs"])
    arguments = parser.parse_args()
    if arguments.write:
        done = finished(arguments.out)
        if not done:
            sys.exit(f"--out is {arguments.out}, which holds no trained plan; run without --write")
        write_docs(done)
        return
    if arguments.data_dir:
        os.environ["DPSCAFFOLD_DATA"] = str(arguments.data_dir.resolve())
    for number, epsilon in product(arguments.rows, arguments.epsilons):
        cell(ROWS[number], epsilon, arguments)
        write(finished(arguments.out), arguments.out)


if __name__ == "__main__":
    main()
