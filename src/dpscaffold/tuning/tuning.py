"""Tuning by cross-validation within each user's training records, the whole grid stacked in the
simulator.

The paper tunes η₀ over ten values by 5-fold cross-validation, at the lowest heterogeneity. Here any
keys of a configuration may be tuned: runs that share shapes (step sizes, clips, noises, λ) run side
by side.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from dpscaffold.config import Configuration, Run, override, parse
from dpscaffold.data.config import DataSettings, Images
from dpscaffold.data.loading import load_federation
from dpscaffold.data.sentences import mistake_of
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.federation.schema import Target
from dpscaffold.tasks.metrics import METRICS, Metric, metrics_for, shown_metric, titled
from dpscaffold.training.events import Listener, StackBegun, silence
from dpscaffold.training.stack import Outcome, Schedule, split, train_stack
from dpscaffold.tuning.folds import fold_federation
from dpscaffold.tuning.settings import TuneSettings


@dataclass(frozen=True)
class Score:
    """One point of the grid: its values, the validation accuracy (or, for numbers, the RMSE) of
    every fold, and the folds that diverged."""

    values: dict[str, Any]
    accuracies: tuple[float, ...]
    diverged: int

    @property
    def mean(self) -> float:
        """Mean over folds; −∞ where a fold diverged."""
        return -math.inf if self.diverged else sum(self.accuracies) / len(self.accuracies)

    @property
    def deviation(self) -> float:
        """Standard deviation over folds."""
        if self.diverged:
            return math.nan
        mean = self.mean
        return math.sqrt(sum((a - mean) ** 2 for a in self.accuracies) / len(self.accuracies))


@dataclass(frozen=True)
class TuningResult:
    """The scores of the whole grid, and the best one."""

    settings: Configuration
    tune: TuneSettings
    scores: tuple[Score, ...]
    title: str
    metric: Metric = METRICS["accuracy"]

    @property
    def output(self) -> str:
        """What was validated, in a word: the last iterates, or the average of iterates."""
        return judged_output(self.settings)

    @property
    def best(self) -> Score:
        """The best mean of the validation metric; the first of equals."""
        sign = 1 if self.metric.better == "higher" else -1
        best = max(self.scores, key=lambda s: -math.inf if s.diverged else sign * s.mean)
        if best.diverged:
            raise BadInput(
                "all-diverged",
                "every point of tune.grid diverged; try smaller values of plan.learning_rate",
            )
        return best

    @property
    def at_edge(self) -> list[str]:
        """Keys whose best value is the first or last of at least three numbers: the grid may be too
        narrow."""
        found = []
        for key, values in self.tune.grid.items():
            numbers = [v for v in values if isinstance(v, int | float)]
            if len(numbers) >= 3 and self.best.values[key] in (min(numbers), max(numbers)):
                found.append(key)
        return found

    @property
    def privacy_note(self) -> str:
        """What tuning cost, for statements and reports."""
        if self.tune.public is not None:
            return f"Tuned on public records ({self.title}): no privacy was spent on tuning."
        return (
            "Tuned on the private training records: this stands outside the privacy guarantee (as "
            "in the paper). Give [tune.public] a table of public data to avoid it."
        )

    def best_tables(self) -> dict[str, Any]:
        """The configuration with the best values set."""
        best = with_values(self.settings, self.best.values)
        return best.model_dump(mode="json", exclude_none=True)


def read_tuning(path: Path, overrides: Sequence[str] = ()) -> tuple[Configuration, TuneSettings]:
    """A configuration and its ``[tune]`` table."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = (
            f"the configuration {path} cannot be read: {error.strerror}; give the path of a "
            f"TOML file"
        )
        raise BadInput("file-unreadable", message) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(
            "not-toml", f"the configuration {path} is not valid TOML: {error}"
        ) from error
    for item in overrides:
        tables = override(tables, item)
    return parse_tuning(tables, path.parent)


def parse_tuning(
    tables: Mapping[str, Any], folder: Path | None = None
) -> tuple[Configuration, TuneSettings]:
    """Check the tables of a tuning.

    >>> settings, tune = parse_tuning({"plan": {"rounds": 5}, "tune": {"folds": 3}})
    >>> settings.plan.rounds, tune.folds, len(tune.grid["plan.learning_rate"])
    (5, 3, 10)
    """
    from pydantic import ValidationError

    rest = {name: table for name, table in tables.items() if name != "tune"}
    settings = parse(rest, folder)
    if settings.privacy is not None and settings.privacy.budget_file is not None:
        raise BadInput(
            "not-applicable",
            f"privacy.budget_file is {settings.privacy.budget_file!r}, and tuning reserves none of "
            f"its runs; leave it out, and count tuning on private records as outside the guarantee",
        )
    asked = tables.get("tune", {})
    if not isinstance(asked, Mapping):
        raise BadInput("not-a-table", f"tune is {asked!r}; write a table, as in tune.folds = 5")
    given = dict(asked)
    if isinstance(given.get("grid"), Mapping):
        given["grid"] = _flat(given["grid"])
    try:
        table = TuneSettings.model_validate(given)
        refuse_private_as_public(settings, table)
        return settings, table
    except ValidationError as error:
        raise BadInput(*mistake_of(error, TuneSettings, "tune")) from None


def refuse_private_as_public(settings: Configuration, table: TuneSettings) -> None:
    """Records that are called public must not be the private ones: nothing would be counted for
    them. The same file, or the same built-in collection, is refused."""
    public, private = table.public, settings.data
    if public is None or not _same_records(public, private):
        return
    raise BadInput(
        "not-public",
        f"tune.public is {public.source!r} data from where the private records come from; give "
        f"records that are public and others than those of [data]",
    )


def _same_records(one: DataSettings, other: DataSettings) -> bool:
    published = isinstance(one, Images) or isinstance(other, Images)
    paths = [getattr(data, "path", None) for data in (one, other)]
    if None not in paths and not published:  # copies of published images are the same records
        first, second = (Path(str(path)).expanduser().resolve() for path in paths)
        return first == second
    if one.source != other.source:
        return False
    return one.source != "synthetic" or one == other  # another seed makes others


def _flat(grid: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys: ``[tune.grid.plan] learning_rate = […]`` or
    ``"plan.learning_rate" = […]``."""
    flat: dict[str, Any] = {}
    for key, value in grid.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list | tuple) else (value,)
    return flat


def with_values(settings: Configuration, values: Mapping[str, Any]) -> Configuration:
    """The configuration with dotted keys set, checked again."""
    tables = settings.model_dump(mode="json", exclude_none=True)
    if "algorithm.name" in values or "algorithm.server" in values:
        tables["algorithm"] = {}  # the numbers belong to the one that was configured
    for key, value in values.items():
        table, _, name = key.partition(".")
        inner = tables.setdefault(table, {})
        inner[name] = value
        if key == "privacy.noise":
            inner.pop("epsilon", None)
        if key == "privacy.epsilon":
            inner.pop("noise", None)
    return parse(tables, settings.algorithm.folder)


def _grid_points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def tune(
    settings: Configuration,
    table: TuneSettings,
    device: torch.device,
    tell: Listener = silence,
) -> TuningResult:
    """Run every point of the grid on every fold, stacked where shapes agree, and compare."""
    whole = load_federation(settings.data if table.public is None else table.public)
    metric = _metric_of(table, whole.target)
    folds = [fold_federation(whole, k, table.folds) for k in range(table.folds)]
    points = _grid_points(table.grid)
    runs = list(product(range(len(folds)), range(len(points))))
    configured = [with_values(settings, point) for point in points]
    outputs = [judged_output(one) for one in configured]
    built = [_setting(one, folds) for one in configured]
    stacked = [built[p][f] for f, p in runs]
    shown = f"test_{metric.name}"
    schedule = Schedule(late=10, full=shown != shown_metric(whole.target))
    found = _train_stacks(stacked, [folds[f] for f, _ in runs], schedule, device, tell)
    outcomes = dict(zip(runs, found, strict=True))
    scores = [
        _score(point, [outcomes[f, p] for f in range(len(folds))], outputs[p], shown)
        for p, point in enumerate(points)
    ]
    return TuningResult(settings, table, tuple(scores), whole.title, metric)


def _metric_of(table: TuneSettings, target: Target) -> Metric:
    """The metric that was asked for, or the usual one of the target."""
    metric = METRICS[table.metric] if table.metric else metrics_for(target)[0]
    metric.fits(target)
    return metric


def _score(point: dict[str, Any], outcomes: Sequence[Outcome], output: str, metric: str) -> Score:
    """The score of a grid point from its folds."""
    values = [_validated(outcome, output, metric) for outcome in outcomes]
    finite = tuple(value for value in values if value is not None)
    return Score(point, finite, len(values) - len(finite))


def _train_stacks(
    settings: Sequence[Run],
    data: Sequence[Federation],
    schedule: Schedule,
    device: torch.device,
    tell: Listener,
) -> list[Outcome]:
    """The outcome of every run, trained together where shapes agree."""
    outcomes: dict[int, Outcome] = {}
    stacks = split(settings, device)
    for number, stack in enumerate(stacks, 1):
        first = settings[stack[0]].plan
        work = float(sum(settings[k].cohort_size for k in stack)) * first.rounds * first.local_steps
        tell(StackBegun("tuning", number, len(stacks), first.rounds, work))
        held = [data[k] for k in stack]
        found = train_stack([settings[k] for k in stack], held, schedule, device, tell)
        outcomes |= zip(stack, found, strict=True)
    return [outcomes[k] for k in range(len(settings))]


def _setting(settings: Configuration, folds: Sequence[Federation]) -> list[Run]:
    """The run on every fold. Noise and step size are found once: folds have the same sizes up to
    one."""
    first = settings.setting(folds[0])
    return [replace(first, roster=fold.roster, plan=first.settled) for fold in folds]


def judged_output(settings: Configuration) -> Literal["last", "average"]:
    """Which output of a run is validated: the one that its plan gives out."""
    return "last" if settings.plan.averaging == "none" else "average"


def _validated(outcome: Outcome, output: str, metric: str) -> float | None:
    """The metric of one run on the records that its fold held out; None where it diverged."""
    if outcome.diverged is not None:
        return None
    value = outcome.average[metric] if output == "average" else outcome.late(metric)
    if value is None:
        raise BadInput(
            "metric-undefined",
            f"{titled(metric)} is not defined on the records that a fold holds out; set "
            f"tune.metric to another one or use fewer folds",
        )
    return value
