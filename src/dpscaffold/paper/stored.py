"""Finished runs read back from tidy results, where the runs themselves are not at hand.

``results.parquet`` (or ``results.csv``) is what is kept of an experiment. It holds the averaged
model and the last iterates of every run, and all evaluated rounds of the runs that are shown: all
that a page and a figure need. Plans are not taken from there, as the rows do not name their
algorithm: they are made and trained again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpscaffold.errors import BadInput
from dpscaffold.paper.archive import FinishedRun
from dpscaffold.paper.cases import Case
from dpscaffold.paper.results import ITERATE, LATE, METRICS, read_tidy
from dpscaffold.paper.whole_plans import LINE
from dpscaffold.runs.history import HistoryRow

#: What names a run in the tidy rows: where it stands, and its numbers.
LABELS = ("row", "column", "line")
RUN = ("seed", "fold", "rounds", "local_steps", "learning_rate", "regularisation", "clip", "tail")

Key = tuple[object, ...]


class StoredRuns:
    """The finished runs of one experiment in ``folder``, found by their place and
    hyperparameters."""

    def __init__(self, folder: Path) -> None:
        self.made = _machines(folder / "RESULT.md")
        self._rows: dict[Key, list[Mapping[str, Any]]] = {}
        for row in read_tidy(folder):
            if row["line"] != LINE:
                self._rows.setdefault(_key(row), []).append(row)
        if not self._rows:
            raise BadInput(
                "no-finished-run",
                f"--stored has no results.parquet or results.csv in {folder}; name the folder that "
                f"holds {folder.name}",
            )

    def __call__(self, case: Case) -> FinishedRun | None:
        """The stored run of a case, or None."""
        plan, privacy = case.settings.plan, case.settings.privacy
        named = case.labels | {"fold": case.fold and case.fold[0], "clip": privacy and privacy.clip}
        values = {name: getattr(plan, name, None) for name in RUN} | named
        rows = self._rows.get(_key(values))
        return None if rows is None else _finished(case.digest, rows, self.made)


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


def _finished(digest: str, rows: list[Mapping[str, Any]], made: list[str]) -> FinishedRun:
    """Of a run that is not shown, the mean of its last iterates represents its rounds."""
    late = next(row for row in rows if row["output"] == LATE)
    averages = [_metrics(row) for row in rows if row["output"].startswith("average of")]
    rounds, diverged, noise = (late[name] for name in ("rounds", "diverged", "noise"))
    evaluated = [row for row in rows if row["output"] == ITERATE]
    history = [HistoryRow(int(row["round"]), _metrics(row)) for row in evaluated]
    return FinishedRun(
        digest,
        history or [HistoryRow(int(rounds), _metrics(late))],
        averages[0] if averages else {},
        None if diverged in (None, "") else int(float(diverged)),
        0.0,
        {"rounds": int(rounds), "noise": _number(noise), "stored": made},
    )


def _machines(page: Path) -> list[str]:
    """What the stored page says on the machines that made its runs, or repeats from another."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    made = re.compile(r"^- (?:device: |.* stored results, whose page says: )(.*)$", re.MULTILINE)
    return made.findall(text)
