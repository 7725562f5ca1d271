"""The paper's experiments as data: TOML files that say which runs stand in which place.

A definition has ``base`` tables (a configuration) and up to four lists, ``rows``, ``columns``,
``lines`` and
``choices``, whose entries have a ``label`` and dotted keys to ``set``. The experiment is their
product: every row × column × line × choice × seed is a run. ``choices`` are the values of
hyperparameters of which the best is shown; a line or a column may have ``rates``, the η₀ to choose
from. An entry may differ ``by_row``. ``chosen`` names the best choice of a place, found with the
test data in view (``docs/paper-tuning.md``): there it alone is run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import product
from typing import Any, Literal

from dpscaffold.errors import BadInput, nearest
from dpscaffold.paper.cases import Case, scaled
from dpscaffold.paper.published import published_rounds
from dpscaffold.paper.solving import solved_rounds
from dpscaffold.training.stack import Schedule

Kind = Literal["curves", "table", "frontier", "sweep"]

#: Row, column and line.
Place = tuple[str, str, str]

#: The order in which experiments are listed and run.
ORDER = (
    "table1",
    "table2",
    "figure1",
    "figure2",
    "accuracy",
    "dissimilarity",
    "varying-alpha",
    "varying-beta",
    "femnist-accuracy",
    "femnist-dissimilarity",
    "tradeoff-l",
    "tradeoff-s",
    "frontier",
    "frontier-secure",
    "frontier-hog",
    "warm-start",
    "clip",
    "table1-balanced",
)


@dataclass(frozen=True)
class Level:
    """One row, column, line or choice: its label and what it sets.

    ``only`` limits it to some rows, ``rates`` are η₀ to choose from, ``epsilon`` asks for the
    largest T at that published ε, and ``by_row`` holds what differs in a row.
    """

    label: str
    set: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    epsilon: float | None = None
    by_row: dict[str, dict[str, Any]] = field(default_factory=dict)
    level: str = ""  # the label before a row changed it

    @classmethod
    def read(cls, table: dict[str, Any]) -> Level:
        """From a TOML table."""
        return cls(
            table["label"],
            dict(table.get("set", {})),
            tuple(table.get("only", ())),
            tuple(table.get("rates", ())),
            table.get("solve_epsilon"),
            dict(table.get("by_row", {})),
        )

    def at(self, row: str) -> Level | None:
        """The entry as it is in a row; None where it is not shown there."""
        if self.only and row not in self.only:
            return None
        own = self.by_row.get(row, {})
        return replace(
            self,
            label=own.get("label", self.label),
            level=self.label,
            set=self.set | own.get("set", {}),
            rates=tuple(own.get("rates", self.rates)),
        )


ONE_LEVEL = (Level(""),)


@dataclass(frozen=True)
class Experiment:
    """A figure or table: what it shows and the runs it is made of."""

    name: str
    title: str
    paper: str
    kind: Kind
    metric: str
    label: str
    base: dict[str, Any]
    rows: tuple[Level, ...]
    columns: tuple[Level, ...]
    lines: tuple[Level, ...]
    choices: tuple[Level, ...]
    schedule: Schedule
    published: str | None = None
    folds: int = 0
    seeds: int = 3
    notes: tuple[str, ...] = ()
    optimum: bool = False
    tuned_at: str | None = None
    brief: str = ""
    about: tuple[str, ...] = ()  # paragraphs above the tables
    also: tuple[str, ...] = ()  # experiments that are reproduced with this one
    chosen: dict[Place, Level] = field(default_factory=dict)  # the best choice of a place

    @property
    def reads_files(self) -> bool:
        """Whether any of its rows has data from files."""
        sources = {row.set.get("data.source", self.base["data"]["source"]) for row in self.rows}
        return sources != {"synthetic"}

    def cases(self, seeds: int | None = None, scale: float = 1.0) -> list[Case]:
        """All runs, those that can share a stack near each other."""
        count = self.seeds if seeds is None else seeds
        found: list[Case] = []
        for row in self.rows:
            for column, line in product(_at(self.columns, row), _at(self.lines, row)):
                choices = self._choices(row, column, line)
                for seed, choice in product(range(count), choices):
                    found.append(self._case(row, column, line, choice, seed))
        return [scaled(case, scale) for case in found]

    def _choices(self, row: Level, column: Level, line: Level) -> list[Level]:
        """The best choice of a place where it is known, else all that are to be tried there."""
        best = self.chosen.get((row.label, column.label, line.label))
        if best is not None:
            return [best]
        return _rates(line) or _rates(column) or _at(self.choices, row)

    def folded(self, scale: float = 1.0) -> list[Case]:
        """The cross-validation of the choices, with the first seed; empty where the experiment has
        none."""
        whole = self.cases(1, scale) if self.folds else []
        return [replace(case, fold=(k, self.folds)) for case in whole for k in range(self.folds)]

    def _case(self, row: Level, column: Level, line: Level, choice: Level, seed: int) -> Case:
        labels = {
            "row": row.label,
            "column": column.label,
            "level": column.level,
            "line": line.label,
            "choice": choice.label,
        }
        case = Case(labels | {"seed": seed}, self.base, self.schedule)
        case = case.with_set({"plan.averaging": "tail"})
        for entry in (row, column, line, choice):
            case = case.with_set(entry.set)
        if self.published and self.kind in ("table", "sweep"):
            noise, steps = case.tables["privacy"]["noise"], case.tables["plan"]["local_steps"]
            case = case.with_set({"plan.rounds": published_rounds(self.published, noise, steps)})
        epsilons = [e.epsilon for e in (row, column, line, choice) if e.epsilon is not None]
        if epsilons:
            case = solved_rounds(replace(case, solve_epsilon=epsilons[-1]))
        return case.with_set({"plan.seed": seed})


def _at(entries: tuple[Level, ...], row: Level) -> list[Level]:
    """The entries that a row shows, as it shows them."""
    return [found for entry in entries if (found := entry.at(row.label)) is not None]


def _rates(entry: Level) -> list[Level]:
    """The step sizes of a line or column as choices."""
    return [Level(rate_label(rate), {"plan.learning_rate": rate}) for rate in entry.rates]


def rate_label(
    rate: float, steps: int | None = None, clip: float | None = None, tail: float | None = None
) -> str:
    """The label of a step size as a choice, with K, C and the averaged share of the rounds where
    they are others than the entry's.

    >>> rate_label(0.5), rate_label(0.5, 1), rate_label(0.5, 1, 0.75)
    ('η₀ = 0.5', 'η₀ = 0.5 (K = 1)', 'η₀ = 0.5 (K = 1, C = 0.75)')
    >>> rate_label(0.5, tail=0.25)
    'η₀ = 0.5 (tail = 0.25)'
    """
    others = [f"K = {steps}"] if steps is not None else []
    others += [f"C = {clip:g}"] if clip is not None else []
    others += [f"tail = {tail:g}"] if tail is not None else []
    return f"η₀ = {rate:g}" + (f" ({', '.join(others)})" if others else "")


def names(asked: str = "all", rows: Sequence[str] = ()) -> tuple[str, ...]:
    """All experiments, or one and those that are reproduced with it, where they have the rows.

    >>> names("frontier"), names("table1")
    (('frontier', 'frontier-secure', 'frontier-hog'), ('table1',))
    """
    if asked == "all":
        return ORDER
    also = experiment(asked).also
    known = {one: [row.label for row in experiment(one).rows] for one in also}
    return (asked, *(one for one in also if set(rows) <= set(known[one])))


@cache
def experiment(name: str) -> Experiment:
    """The experiment of that name.

    >>> experiment("table1").paper
    'Table 1'
    >>> experiment("tabel1")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    dpscaffold.errors.BadInput: no experiment is called 'tabel1' (did you mean 'table1'?)...
    """
    if name not in ORDER:
        raise BadInput(
            "unknown-experiment",
            f"no experiment is called {name!r}{nearest(name, ORDER)}; --list shows all",
        )
    tables = _read(name)
    if "same_runs_as" in tables:
        tables = _read(tables.pop("same_runs_as")) | tables
    return _build(name, tables)


def _read(name: str) -> dict[str, Any]:
    text = (
        resources.files("dpscaffold.paper")
        .joinpath("definitions", f"{name}.toml")
        .read_text(encoding="utf-8")
    )
    return tomllib.loads(text)


def _build(name: str, tables: dict[str, Any]) -> Experiment:
    schedule = Schedule(**tables.get("schedule", {}))
    return Experiment(
        name=name,
        title=tables["title"],
        paper=tables["paper"],
        kind=tables["kind"],
        metric=tables["metric"],
        label=tables["label"],
        base=tables["base"],
        rows=_entries(tables, "rows"),
        columns=_entries(tables, "columns"),
        lines=_entries(tables, "lines"),
        choices=_entries(tables, "choices"),
        schedule=schedule,
        published=tables.get("published"),
        folds=tables.get("folds", 0),
        seeds=tables.get("seeds", 3),
        notes=tuple(tables.get("notes", ())),
        optimum=tables.get("optimum", False),
        tuned_at=tables.get("tuned_at"),
        brief=tables["brief"],
        about=tuple(tables.get("about", ())),
        also=tuple(tables.get("also", ())),
        chosen=_chosen(tables.get("chosen", ())),
    )


def _chosen(entries: Sequence[Sequence[Any]]) -> dict[Place, Level]:
    """The best choices by place, from entries ``[row, column, line, {key = value}]``."""
    found = {}
    for row, column, line, keys in entries:
        label = rate_label(
            keys["plan.learning_rate"],
            keys.get("plan.local_steps"),
            keys.get("privacy.clip"),
            keys.get("plan.averaging"),
        )
        found[row, column, line] = Level(label, keys)
    return found


def _entries(tables: dict[str, Any], axis: str) -> tuple[Level, ...]:
    """The entries of an axis; ``product`` of two lists of choices is spelled out with joined
    labels."""
    given = tables.get(axis)
    if not given:
        return ONE_LEVEL
    if isinstance(given, dict):  # a grid: dotted keys with lists of values
        keys = list(given)
        return tuple(
            Level(
                ", ".join(f"{_short(k)} = {v:g}" for k, v in zip(keys, values, strict=True)),
                dict(zip(keys, values, strict=True)),
            )
            for values in product(*given.values())
        )
    return tuple(Level.read(table) for table in given)


def _short(key: str) -> str:
    """The paper's symbol for a key that is often swept."""
    symbols = {
        "plan.learning_rate": "η₀",
        "privacy.clip": "C",
        "plan.regularisation": "λ",
        "plan.server_rate": "η_g",
    }
    return symbols.get(key, key)
