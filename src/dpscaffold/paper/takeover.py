"""Take finished runs over from a ``results.csv``, so that they need not be made again.

A tidy results file holds, of every run, the mean over the last 10 % of rounds and the averaged
model's metrics, and of those that were shown every evaluated round. A run is taken over where its
place, seed and η₀ are a case of the experiment and everything else that the file says (T, K, λ, C,
and the noise that the case's ε asks for today) is equal. Such a run was drawn by the random streams
of the version that made it: it has the law of a run made now, not the same numbers.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from dpscaffold.errors import BadInput
from dpscaffold.paper.archive import Archive, Finished
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import Experiment
from dpscaffold.paper.results import AVERAGE, ITERATE, LATE, METRICS
from dpscaffold.paper.solving import solved_noise
from dpscaffold.paper.widening import at_rate

#: Noises that differ by less than this, relatively, are the same solution of the same ε.
TOLERANCE = 1e-3

#: What the ``made`` of a run taken over says instead of a device.
TAKEN = "taken over from results.csv"

Key = tuple[str, str, str, int, float, float, float | None]


@dataclass(frozen=True)
class Takeover:
    """How many runs were taken over, how many were there already, and why others were left."""

    taken: int
    known: int
    left: dict[str, int]

    def __str__(self) -> str:
        parts = [f"{self.taken} runs taken over"]
        parts += [f"{self.known} were there already"] if self.known else []
        parts += [f"{count} left: {why}" for why, count in self.left.items()]
        return "; ".join(parts)


def take_over(
    experiment: Experiment, cases: Sequence[Case], archive: Archive, path: Path
) -> Takeover:
    """Add the runs of ``path`` that are cases of the experiment, its ladders included, to the
    archive."""
    wanted = {_key(case): case for case in [*cases, *_rungs(experiment, cases)]}
    alike = {key[:5]: case for key, case in reversed(wanted.items())}  # whatever its K and C
    taken: list[Finished] = []
    known, left = 0, dict[str, int]()
    for key, rows in _runs(path).items():
        case = wanted.get(key) or alike.get(key[:5])
        why = "no case of the experiment" if case is None else _differs(case, rows[0])
        if case is None or why:
            left[why] = left.get(why, 0) + 1
        elif case in archive:
            known += 1
        else:
            taken.append(_finished(case, rows))
    archive.extend(taken)
    return Takeover(len(taken), known, left)


def _rungs(experiment: Experiment, cases: Sequence[Case]) -> Iterable[Case]:
    """Every case at every η₀, K and C that its row may try."""
    rows = {row.label: row for row in experiment.rows}
    first: dict[tuple[Any, ...], Case] = {}
    for case in cases:
        first.setdefault(_key(case)[:4], case)
    for case in first.values():
        row = rows[case.labels["row"]]
        for rate in (*row.ladder, *row.finer):
            clips = row.clips if case.private else ()
            for steps, clip in product((None, *row.steps), (None, *clips)):
                yield at_rate(case, rate, steps, clip)


def _key(case: Case) -> Key:
    labels = case.labels
    rate = float(case.tables["plan"]["learning_rate"])
    steps = float(case.tables["plan"]["local_steps"])
    place = labels["row"], labels["column"], labels["line"], int(labels["seed"])
    return *place, rate, steps, _clip(case)


def _clip(case: Case) -> float | None:
    privacy = case.tables.get("privacy")
    return float(privacy["clip"]) if privacy and privacy["clip"] != "median" else None


def _runs(path: Path) -> dict[Key, list[dict[str, str]]]:
    """The rows of each run; a cross-validation's are passed over."""
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(
            f"--take is {path}, which cannot be read ({error}); give a results.csv"
        ) from error
    found: dict[Key, list[dict[str, str]]] = {}
    try:
        for row in rows:
            if not row["fold"]:
                key = (row["row"], row["column"], row["line"])
                chosen = float(row["learning_rate"]), float(row["local_steps"])
                run = (*key, int(row["seed"]), *chosen, _number(row["clip"]))
                found.setdefault(run, []).append(row)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(
            f"--take is {path}, which is no results.csv of an experiment ({error}); give one that "
            f"'dpscaffold reproduce' wrote"
        ) from error
    return found


def _differs(case: Case, row: dict[str, str]) -> str:
    """What of a run is not as the case asks; empty where all is."""
    settings = case.settings
    privacy = settings.privacy
    asked: dict[str, float | None] = {
        "rounds": settings.plan.rounds,
        "local_steps": settings.plan.local_steps,
        "regularisation": settings.plan.regularisation,
        "clip": float(privacy.clip) if privacy and privacy.clip != "median" else None,
    }
    for name, value in asked.items():
        if _number(row[name]) != value:
            return f"another {name}"
    solved = solved_noise(case).settings.privacy
    noise, said = solved.noise if solved else None, _number(row["noise"])
    if (noise is None) != (said is None):
        return "another noise"
    if noise is not None and said is not None and abs(said - noise) > TOLERANCE * noise:
        return "another noise"
    return ""


def _finished(case: Case, rows: Sequence[dict[str, str]]) -> Finished:
    """The run as the archive keeps it. Without its evaluated rounds, the mean over the last of them
    stands for them, and ``summarised`` says so."""
    by_output: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_output.setdefault(row["output"], []).append(row)
    rounds = int(rows[0]["rounds"])
    iterates = [{"round": int(r["round"])} | _metrics(r) for r in by_output.get(ITERATE, ())]
    late = [{"round": rounds} | _metrics(r) for r in by_output.get(LATE, ())]
    average = by_output.get(AVERAGE)
    diverged = rows[0]["diverged"]
    made = {
        "device": TAKEN,
        "rounds": rounds,
        "label": rows[0]["line"],
        "noise": _number(rows[0]["noise"]),
        "summarised": not iterates,
    }
    return Finished(
        case.digest,
        iterates or late,
        _metrics(average[0]) if average else {},
        int(diverged) if diverged else None,
        0.0,
        made,
    )


def _metrics(row: dict[str, str]) -> dict[str, Any]:
    return {name: _number(row[name]) for name in METRICS if row.get(name)}


def _number(text: str) -> float | None:
    return float(text) if text else None
