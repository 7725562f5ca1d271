"""Finished runs read back from tidy results, where the runs themselves are not at hand.

``results.parquet`` (or ``results.csv``) is what is kept of an experiment. It holds the averaged
model and the last iterates of every run, and all evaluated rounds of the runs that are shown: all
that a page and a figure need. Plans are not taken from there, as the rows do not name their
algorithm: they are made and trained again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpscaffold.errors import BadInput
from dpscaffold.paper.archive import FinishedRun
from dpscaffold.paper.cases import Case
from dpscaffold.paper.results import ITERATE, LATE, METRICS, read_tidy, tidy_file
from dpscaffold.paper.whole_plans import LINE
from dpscaffold.runs.history import HistoryRow

#: What names a run in the tidy rows: where it stands, and its numbers.
LABELS = ("row", "column", "line")
RUN = ("seed", "fold", "rounds", "local_steps", "learning_rate", "regularisation", "clip", "tail")
#: What is read of the tidy rows.
COLUMNS = (*LABELS, *RUN, "output", "round", "diverged", "noise", *METRICS)

Key = tuple[object, ...]


class StoredRuns:
    """The finished runs of one experiment in ``folder``, found by their place and
    hyperparameters."""

    def __init__(self, folder: Path) -> None:
        path = tidy_file(folder)
        if path is None:
            raise BadInput(
                "no-finished-run",
                f"--stored has no results.parquet or results.csv in {folder}; name the folder that "
                f"holds {folder.name}",
            )
        self.made = _machines(folder / "RESULT.md")
        self._runs = _runs(path, self.made)

    def __call__(self, case: Case) -> FinishedRun | None:
        """The stored run of a case, or None."""
        plan, privacy = case.settings.plan, case.settings.privacy
        named = case.labels | {"fold": case.fold and case.fold[0], "clip": privacy and privacy.clip}
        values = {name: getattr(plan, name, None) for name in RUN} | named
        run = self._runs.get(_key(values))
        return replace(run, digest=case.digest) if run and _same_noise(case, run) else None


def checksum(folder: Path, names: Iterable[str]) -> str:
    """Of the stored results of these experiments, in which all ranks must find the same runs."""
    whole = hashlib.sha256()
    for name in names:
        path = tidy_file(folder / name)
        content = b"" if path is None else path.read_bytes()
        whole.update(f"{name} {len(content)}\n".encode() + content)
    return whole.hexdigest()


def _same_noise(case: Case, run: FinishedRun) -> bool:
    """Whether the stored run had the noise of the case; True where it was solved for ε."""
    privacy, stored = case.settings.privacy, run.made["noise"]
    if privacy is None:
        return stored is None
    return privacy.noise is None or privacy.noise == stored


def _runs(path: Path, made: list[str]) -> dict[Key, FinishedRun]:
    """The runs of a file of tidy rows, plans left out."""
    rows: dict[Key, list[Mapping[str, Any]]] = {}
    try:
        for row in _rows(path):
            if row["line"] != LINE:
                rows.setdefault(_key(row), []).append(row)
        found = {key: _finished(of_key, made) for key, of_key in rows.items()}
    except Exception as error:  # PyArrow's errors are of many kinds, and so is what a file may hold
        raise BadInput(
            "file-unreadable",
            f"--stored has {path}, which cannot be read as results of {path.parent.name} "
            f"({str(error)[:200]}); copy it or make it again on the machine that it came from, or "
            f"name another folder",
        ) from error
    if not found:
        raise BadInput(
            "no-finished-run",
            f"--stored has {path}, which holds no finished run; name another folder",
        )
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that has the columns of tidy rows, none of them cut short."""
    rows = read_tidy(path.parent)
    missing = [name for name in COLUMNS if rows and name not in rows[0]]
    if missing:
        raise ValueError(f"it has no column {', '.join(missing)}")
    for number, row in enumerate(rows, 2):
        if path.suffix == ".csv" and (None in row or None in row.values()):
            raise ValueError(f"line {number} has another length than its header")
    return rows


def _key(row: Mapping[str, Any]) -> Key:
    return (*(row[name] for name in LABELS), *(_number(row[name]) for name in RUN))


def _number(value: Any) -> object:
    """A number, whether it was stored as one or as text; other words as they are."""
    try:
        return None if value in (None, "") else float(value)
    except ValueError:
        return value


def _metrics(row: Mapping[str, Any]) -> dict[str, float | None]:
    values = {name: row[name] for name in METRICS if row[name] not in (None, "")}
    return {name: float(value) for name, value in values.items()}


def _finished(rows: list[Mapping[str, Any]], made: list[str]) -> FinishedRun:
    """Of a run that is not shown, the mean of its last iterates represents its rounds."""
    found = [row for row in rows if row["output"] == LATE]
    if len(found) != 1:
        where = ", ".join(str(rows[0][name]) for name in (*LABELS, "seed"))
        raise ValueError(f"the run {where} has {len(found)} rows {LATE!r}, and it must be one")
    late = found[0]
    averages = [_metrics(row) for row in rows if row["output"].startswith("average of")]
    rounds, diverged, noise = (late[name] for name in ("rounds", "diverged", "noise"))
    evaluated = [row for row in rows if row["output"] == ITERATE]
    history = [HistoryRow(int(row["round"]), _metrics(row)) for row in evaluated]
    return FinishedRun(
        "",
        history or [HistoryRow(int(rounds), _metrics(late))],
        averages[0] if averages else {},
        None if diverged in (None, "") else int(float(diverged)),
        0.0,
        {"rounds": int(rounds), "noise": _number(noise), "stored": made},
    )


def _machines(page: Path) -> list[str]:
    """What the stored page says on the machines that made its runs, or repeats from another."""
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    made = r"^(?:- device: |- .* stored results, whose page says: |  - )(.*)$"
    return re.findall(made, text, re.MULTILINE)
