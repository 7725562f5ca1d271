"""Take finished runs over from a ``results.csv`` or ``results.parquet``, so that they need not be
made again.

A tidy results file holds, of every run, the mean over the last 10 % of rounds and the averaged
model's metrics, and of those that were shown every evaluated round. A run is taken over where its
place, seed and η₀ are a case of the experiment and everything else that the file says (T, K, λ, C,
the averaged share of the rounds, and the noise that the case's ε asks for today) is equal. Such a
run was drawn by the random streams of the version that made it: it has the law of a run made now,
not the same numbers.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpscaffold.errors import BadInput
from dpscaffold.paper.archive import Archive, Finished
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import Experiment, Level
from dpscaffold.paper.results import ITERATE, LATE, METRICS, averaged
from dpscaffold.paper.solving import solved_noise
from dpscaffold.paper.widening import at_rate
from dpscaffold.setting.plan import Plan

#: Noises that differ by less than this, relatively, are the same solution of the same ε.
TOLERANCE = 1e-3

#: What the ``made`` of a run taken over says instead of a device.
TAKEN = "taken over from results.csv"

Row = dict[str, str]
Who = tuple[str, str, str, int]


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
    wanted = {(_who(case), _chosen(case)): case for case in cases}
    first = {_who(case): case for case in reversed(cases)}
    rows = {row.label: row for row in experiment.rows}
    taken: list[Finished] = []
    known, left = 0, dict[str, int]()
    for (who, chosen), printed in _runs(path).items():
        case = wanted.get((who, chosen))
        if case is None and who in first:
            case = _searched(rows[who[0]], first[who], chosen)
        why = "no case of the experiment" if case is None else _differs(case, printed[0])
        if case is None or why:
            left[why] = left.get(why, 0) + 1
        elif case in archive:
            known += 1
        else:
            taken.append(_finished(case, printed))
    archive.extend(taken)
    return Takeover(len(taken), known, left)


@dataclass(frozen=True)
class Chosen:
    """What a search chooses: η₀, K, C (None without a fixed one) and the averaged share."""

    rate: float
    steps: float
    clip: float | None
    tail: float


def _who(case: Case) -> Who:
    labels = case.labels
    return labels["row"], labels["column"], labels["line"], int(labels["seed"])


def _chosen(case: Case) -> Chosen:
    plan, privacy = case.tables["plan"], case.tables.get("privacy")
    clip = float(privacy["clip"]) if privacy and privacy["clip"] != "median" else None
    tail = float(plan.get("tail", Plan.tail))
    return Chosen(float(plan["learning_rate"]), float(plan["local_steps"]), clip, tail)


def _searched(row: Level, case: Case, chosen: Chosen) -> Case | None:
    """The case of the same place and seed with what was chosen, as far as its row may try it; None
    where it may not try that η₀."""
    own = _chosen(case)
    if chosen.rate not in (*row.ladder, *row.finer, own.rate):
        return None
    return at_rate(
        case,
        chosen.rate,
        int(chosen.steps) if chosen.steps in row.steps else None,
        chosen.clip if own.clip is not None and chosen.clip in row.clips else None,
        chosen.tail if chosen.tail in row.tails else None,
    )


def _runs(path: Path) -> dict[tuple[Who, Chosen], list[Row]]:
    """The rows of each run; a cross-validation's are passed over."""
    found: dict[tuple[Who, Chosen], list[Row]] = {}
    try:
        for row in _rows(path):
            if not row["fold"]:
                who = row["row"], row["column"], row["line"], int(row["seed"])
                run = Chosen(
                    float(row["learning_rate"]),
                    float(row["local_steps"]),
                    _number(row["clip"]),
                    _share(row),
                )
                found.setdefault((who, run), []).append(row)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(
            f"--take is {path}, which is no results.csv or results.parquet of an experiment "
            f"({error}); give one that 'dpscaffold reproduce' wrote"
        ) from error
    return found


def _rows(path: Path) -> list[Row]:
    """The rows of a file as text, an empty one for what is missing."""
    try:
        if path.suffix == ".parquet":
            return _parquet_rows(path)
        with path.open(newline="", encoding="utf-8") as stream:
            return list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(
            f"--take is {path}, which cannot be read ({error}); give a results.csv or "
            f"results.parquet"
        ) from error


def _parquet_rows(path: Path) -> list[Row]:
    from pyarrow import parquet

    rows = parquet.read_table(path).to_pylist()
    return [{key: "" if value is None else str(value) for key, value in r.items()} for r in rows]


def _share(row: Row) -> float:
    """The averaged share of a run's rounds; files without that column had the plan's own."""
    return float(row.get("tail") or Plan.tail)


def _differs(case: Case, row: Row) -> str:
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
    if _share(row) != settings.plan.tail:
        return "another tail"
    solved = solved_noise(case).settings.privacy
    noise, said = solved.noise if solved else None, _number(row["noise"])
    if (noise is None) != (said is None):
        return "another noise"
    if noise is not None and said is not None and abs(said - noise) > TOLERANCE * noise:
        return "another noise"
    return ""


def _finished(case: Case, rows: Sequence[Row]) -> Finished:
    """The run as the archive keeps it. Without its evaluated rounds, the mean over the last of them
    stands for them, and ``summarised`` says so."""
    by_output: dict[str, list[Row]] = {}
    for row in rows:
        by_output.setdefault(row["output"], []).append(row)
    rounds = int(rows[0]["rounds"])
    iterates = [{"round": int(r["round"])} | _metrics(r) for r in by_output.get(ITERATE, ())]
    late = [{"round": rounds} | _metrics(r) for r in by_output.get(LATE, ())]
    average = by_output.get(averaged(_share(rows[0])))
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


def _metrics(row: Row) -> dict[str, Any]:
    return {name: _number(row[name]) for name in METRICS if row.get(name)}


def _number(text: str) -> float | None:
    return float(text) if text else None
