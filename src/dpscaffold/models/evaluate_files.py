"""How good a trained model is on the labelled rows of many files: on all of them, and on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpscaffold.data.tables.files import TableFile
from dpscaffold.data.tables.raw import coding_of, require_columns
from dpscaffold.data.tables.rowfiles import (
    RowFiles,
    differing_columns,
    left_aside_note,
    named,
    named_problem,
    row_files,
    tables_among,
)
from dpscaffold.errors import BadInput
from dpscaffold.models.evaluate import Evaluation, ScoredRows, evaluate, label_columns, score_rows
from dpscaffold.models.model import Model


@dataclass(frozen=True)
class FileEvaluation:
    """What is known of a model on the rows of one file: as many have a prediction, as many were
    left out, why the first was, the metrics and their baselines (none where no row is left)."""

    file: str
    rows: int
    left_out: int
    gap: str
    metrics: dict[str, float | None]
    baseline: dict[str, float | None]


@dataclass(frozen=True)
class FilesEvaluation:
    """An evaluation on the ``whole`` of many files, and on each in their order; ``aside`` are files
    of folders that are of another kind, ``notes`` what is worth a word."""

    whole: Evaluation
    files: tuple[FileEvaluation, ...]
    aside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON: those of the whole, with ``files`` beside them."""
        files = [dict(vars(file)) for file in self.files]
        return self.whole.to_dict() | {
            "files": files,
            "left_aside": self.aside,
            "notes": self.notes,
        }


def evaluate_files(
    model: Model,
    data: Path | str | Sequence[Path | str],
    label: str | None = None,
    site: str | None = None,
) -> FilesEvaluation:
    """Evaluate a model on the rows of CSV and Parquet files.

    Args:
        model: The model.
        data: Files, folders and patterns (``sites/*.csv``).
        label: The column with the true label; by default that of the training.
        site: The column with the site of each row; by default that of the training. A file without
            it is a site of its own, as in training.
    """
    given = [data] if isinstance(data, str | Path) else list(data)
    rows = tables_among(row_files(given), model.columns)
    coding = coding_of(model.preparation, model.columns)
    # What is wrong with a file's columns is said before any row is scored.
    columns = [
        require_columns(
            file, coding, [*label_columns(model, file, label), *([site] if site else [])]
        )
        for file in rows.files
    ]
    scored = [_scored(model, file, label, site) for file in rows.files]
    files = tuple(_entry(model, name, part) for name, part in zip(rows.names, scored, strict=True))
    notes = [left_aside_note(rows.aside), differing_columns(rows.names, columns), _without(files)]
    whole = evaluate(model, _together(rows, scored))
    return FilesEvaluation(whole, files, rows.aside, tuple(note for note in notes if note))


def _scored(model: Model, file: TableFile, label: str | None, site: str | None) -> ScoredRows:
    try:
        return score_rows(model, file, label, site, whose=file.user)
    except BadInput as problem:
        raise named_problem(file.path, problem) from None


def _entry(model: Model, name: str, scored: ScoredRows) -> FileEvaluation:
    if not len(scored.targets):
        return FileEvaluation(name, 0, scored.left_out, scored.gap, {}, {})
    found = evaluate(model, scored)
    return FileEvaluation(
        name, found.rows, found.left_out, found.gap, found.metrics, found.baseline
    )


def _without(files: Sequence[FileEvaluation]) -> str:
    """A word about files that count for nothing."""
    empty = [file for file in files if not file.rows]
    if not empty:
        return ""
    gap = next((f" ({file.file}, {file.gap})" for file in empty if file.gap), "")
    return f"warning: no row has a prediction in {named([file.file for file in empty])}{gap}"


def _together(rows: RowFiles, scored: Sequence[ScoredRows]) -> ScoredRows:
    """The rows of all files as one table; sites of the same name are the same."""
    first = (f"{name}, {s.gap}" for name, s in zip(rows.names, scored, strict=True) if s.gap)
    gap = next(first, "")
    full = [part for part in scored if len(part.targets)]
    if not full:
        raise BadInput(f"no file holds a row that has a prediction{f' ({gap})' if gap else ''}")
    sites = tuple(dict.fromkeys(site for part in full for site in part.sites))
    places = {site: place for place, site in enumerate(sites)}
    numbers = [torch.tensor([places[site] for site in part.sites])[part.site] for part in full]
    return ScoredRows(
        torch.cat([part.scores for part in full]),
        torch.cat([part.targets for part in full]),
        torch.cat(numbers),
        sites,
        sum(part.left_out for part in scored),
        gap,
    )
