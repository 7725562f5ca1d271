"""How good a trained model is on labelled rows: metrics, sites, confusion and calibration.

All of it is computed on the rows as they are and stands outside every privacy guarantee if the
rows are private and the numbers are published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dpscaffold.data.tables.codec import read_labels
from dpscaffold.data.tables.dialect import TableFile
from dpscaffold.data.tables.rows import (
    coding_of,
    differing_columns,
    file_columns,
    named,
    named_problem,
    require_columns,
    row_files,
    skipped_note,
    tables_among,
)
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation import Federation
from dpscaffold.federation.labels import unpack
from dpscaffold.federation.schema import Target
from dpscaffold.models.model import Model
from dpscaffold.tasks.metrics import METRICS, Metric, constant_report, metrics_for, report

if TYPE_CHECKING:
    import pyarrow as pa
else:
    from dpscaffold.data.tables.arrow import pa

#: What every evaluation says.
NOT_COVERED = (
    "These numbers are computed from the rows as they are: where the rows are private, ε does not "
    "cover them."
)
#: Bins of a calibration curve, and classes up to which a confusion matrix is kept.
BINS, MOST_CLASSES = 10, 20


@dataclass(frozen=True)
class ScoredRows:
    """Scores (N, outputs), what is true (N,), whose row each is (N,), and the sites' names."""

    scores: Tensor
    targets: Tensor
    site: Tensor
    sites: Sequence[str]
    left_out: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Bin:
    """Rows of similar predicted probability: its mean, how often it came true, and how many."""

    predicted: float
    observed: float
    rows: int


@dataclass(frozen=True)
class Evaluation:
    """What is known of a model on some rows.

    ``metrics`` are those of the target, ``baseline`` the same of the best answer for all rows
    alike, ``reason`` why the first row that was left out was, ``sites`` one entry a site,
    ``confusion`` counts (true class, predicted class), ``by_class`` recall, precision and
    F1 of every class (of every label accuracy next to its majority baseline and AUC, too),
    ``calibration`` the bins of predicted probability (of the second of two classes, of every label,
    else of the class that is predicted).
    """

    rows: int
    left_out: int
    metrics: dict[str, float | None]
    baseline: dict[str, float | None]
    sites: tuple[dict[str, Any], ...]
    by_class: tuple[dict[str, Any], ...]
    confusion: tuple[tuple[int, ...], ...]
    calibration: tuple[Bin, ...]
    note: str = NOT_COVERED
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def score_file(model: Model, data: Path, label: str | None) -> ScoredRows:
    """Scores and truths of a file's rows."""
    return _joined((str(data),), [score_rows(model, data, label, None)])


def score_rows(
    model: Model, data: Path | TableFile, label: str | None, site: str | None, whose: str = "all"
) -> ScoredRows:
    """Scores and truths of the rows of a file that have a prediction. Where the file has no column
    of sites, all are ``whose``."""
    wanted = label_columns(model, data, label)
    coding = coding_of(model.preparation, model.columns)
    if site is None and model.origin.site in file_columns(data):
        site = model.origin.site
    scores, truths, owners, left_out, reason = [], [], [], 0, ""
    for part in model.parts(data, [*wanted, *([site] if site else [])]):
        left_out += int((~part.complete).sum())
        reason = reason or part.reason
        if not part.complete.any():
            continue
        scores.append(model.scores_of(part.features))
        held, reader = part.others.filter(pa.array(part.complete)), coding.reader(part.decimal)
        labels = read_labels(model.target, {name: held.column(name) for name in wanted}, reader)
        truths.append(torch.from_numpy(labels.require()))
        if site:
            owners.append(reader.texts(site, held.column(site))[0].fill_null("(none)"))
    number, sites = torch.zeros(sum(map(len, truths)), dtype=torch.int64), (whose,)
    if not scores:
        return ScoredRows(torch.empty(0, 0), torch.empty(0), number, (), left_out, reason)
    if site:
        coded = pa.chunked_array(owners).combine_chunks().dictionary_encode()
        sites = tuple(coded.dictionary.to_pylist())
        number = torch.from_numpy(np.array(coded.indices)).long()
    return ScoredRows(torch.cat(scores), torch.cat(truths), number, sites, left_out, reason)


def label_columns(model: Model, data: Path | TableFile, label: str | None) -> tuple[str, ...]:
    """The columns of what is true: of several labels those of their names, else the one that is
    given or that of the training."""
    if model.target.kind == "labels":
        if label is not None:
            raise BadInput(
                "not-applicable",
                f"--label is '{label}', and the model has {model.target}, which are found by their "
                f"names; leave it out",
            )
        return model.classes
    wanted = label or model.origin.label
    path = data if isinstance(data, Path) else data.path
    if wanted is None:
        raise BadInput(
            "missing-argument",
            f"which column of {path} holds what is true is not known; give --label",
        )
    names = file_columns(data)
    if wanted not in names:
        near = nearest(wanted, names) if label else ""  # a similar feature would mislead
        raise BadInput(
            "unknown-column",
            f"{path} has no column '{wanted}'{near} with the true answers; name their column "
            f"(--label), or use 'dpscaffold predict' for rows without answers",
        )
    return (wanted,)


def score_held_out(model: Model, federation: Federation) -> ScoredRows:
    """Scores and truths of the records that a federation holds out."""
    test = federation.test
    site = torch.repeat_interleave(torch.arange(test.users), test.sizes)
    scores = model.scores_of(test.features.numpy())
    return ScoredRows(scores, federation.target.restored(test.labels), site, federation.names)


def evaluate(model: Model, scored: ScoredRows, metrics: Sequence[Metric] = ()) -> Evaluation:
    """All that is said of a model from its scores."""
    target = model.target
    chosen = tuple(metrics) or metrics_for(target)
    given = (scored.targets, scored.site, len(scored.sites))
    classes = target.kind == "class"
    confusion = confusion_matrix(model, scored) if classes else ()
    return Evaluation(
        len(scored.targets),
        scored.left_out,
        report(chosen, scored.scores, *given),
        constant_report(chosen, scored.targets, target, *given),
        _by_site(chosen, scored) if len(scored.sites) > 1 else (),
        _by_label(scored, target) if target.kind == "labels" else _by_class(confusion, target),
        confusion if len(target.classes) <= MOST_CLASSES else (),
        calibration(model, scored) if target.classes else (),
        reason=scored.reason,
    )


def _by_site(metrics: Sequence[Metric], scored: ScoredRows) -> tuple[dict[str, Any], ...]:
    count = len(scored.sites)
    rows = torch.bincount(scored.site, minlength=count)
    values = {
        metric.name: metric.by_group(scored.scores, scored.targets, scored.site, count)
        for metric in metrics
    }
    return tuple(
        {"site": name, "rows": int(rows[k])}
        | {metric: _defined(found[k]) for metric, found in values.items()}
        for k, name in enumerate(scored.sites)
    )


def confusion_matrix(model: Model, scored: ScoredRows) -> tuple[tuple[int, ...], ...]:
    """How many rows of each true class (first index) were taken for each class (second)."""
    count = len(model.classes)
    pairs = scored.targets * count + model.predicted(scored.scores)
    table = torch.bincount(pairs, minlength=count * count).view(count, count)
    return tuple(tuple(row) for row in table.tolist())


def _by_class(confusion: tuple[tuple[int, ...], ...], target: Target) -> tuple[dict[str, Any], ...]:
    if not confusion:
        return ()
    table = np.array(confusion)
    right, true, taken = table.diagonal(), table.sum(1), table.sum(0)
    return tuple(
        {
            "class": name,
            "rows": int(true[k]),
            "recall": _ratio(right[k], true[k]),
            "precision": _ratio(right[k], taken[k]),
            "f1": _ratio(2 * right[k], true[k] + taken[k]),
        }
        for k, name in enumerate(target.classes)
    )


def _by_label(scored: ScoredRows, target: Target) -> tuple[dict[str, Any], ...]:
    """Each label by itself, accuracy next to that of the commoner answer."""
    true = unpack(scored.targets, len(target.classes))
    said = (scored.scores[:, : len(target.classes)] > 0).long()
    entries = []
    for j, name in enumerate(target.classes):
        held, taken = true[:, j], said[:, j]
        rows, right = int(held.sum()), int((held * taken).sum())
        share = rows / len(held)
        entries.append(
            {
                "label": name,
                "rows": rows,
                "accuracy": float((held == taken).double().mean()),
                "baseline": max(share, 1 - share),
                "auc": _number(METRICS["auc"].of(scored.scores[:, j : j + 1], held)),
                "recall": _ratio(right, rows),
                "precision": _ratio(right, int(taken.sum())),
                "f1": _ratio(2 * right, rows + int(taken.sum())),
            }
        )
    return tuple(entries)


def calibration(model: Model, scored: ScoredRows, bins: int = BINS) -> tuple[Bin, ...]:
    """Predicted probability against how often it comes true, in bins of equal width."""
    chances = model.chances(scored.scores).double()
    if model.target.kind == "labels":
        predicted = chances.flatten()
        true = unpack(scored.targets, len(model.classes)).double().flatten()
    elif len(model.classes) == 2:
        predicted, true = chances[:, 1], (scored.targets == 1).double()
    else:
        predicted, said = chances.max(dim=1)
        true = (said == scored.targets).double()
    place = (predicted * bins).long().clamp_max(bins - 1)
    rows = torch.bincount(place, minlength=bins)
    empty = torch.zeros(bins, dtype=torch.float64)
    sums = [empty.index_add(0, place, values) for values in (predicted, true)]
    return tuple(
        Bin(float(sums[0][k] / rows[k]), float(sums[1][k] / rows[k]), int(rows[k]))
        for k in range(bins)
        if rows[k]
    )


def _ratio(a: Any, b: Any) -> float | None:
    return float(a) / float(b) if b else None


def _defined(value: Tensor) -> float | None:
    return _number(float(value))


def _number(value: float) -> float | None:
    return None if value != value else value


@dataclass(frozen=True)
class FileEvaluation:
    """What is known of a model on the rows of one file: as many have a prediction, as many were
    left out, why the first was, the metrics and their baselines (none where no row is left)."""

    file: str
    rows: int
    left_out: int
    reason: str
    metrics: dict[str, float | None]
    baseline: dict[str, float | None]


@dataclass(frozen=True)
class FilesEvaluation:
    """An evaluation on the ``whole`` of many files, and on each in their order; ``skipped`` are
    files of folders that are of another kind, ``notes`` what is worth a word."""

    whole: Evaluation
    files: tuple[FileEvaluation, ...]
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON: those of the whole, with ``files`` next to them."""
        files = [dict(vars(file)) for file in self.files]
        return self.whole.to_dict() | {
            "files": files,
            "skipped": self.skipped,
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
    notes = [skipped_note(rows.skipped), differing_columns(rows.names, columns), _without(files)]
    whole = evaluate(model, _joined(rows.names, scored))
    return FilesEvaluation(whole, files, rows.skipped, tuple(note for note in notes if note))


def _scored(model: Model, file: TableFile, label: str | None, site: str | None) -> ScoredRows:
    try:
        return score_rows(model, file, label, site, whose=file.user)
    except BadInput as problem:
        raise named_problem(file.path, problem) from None


def _entry(model: Model, name: str, scored: ScoredRows) -> FileEvaluation:
    if not len(scored.targets):
        return FileEvaluation(name, 0, scored.left_out, scored.reason, {}, {})
    found = evaluate(model, scored)
    return FileEvaluation(
        name, found.rows, found.left_out, found.reason, found.metrics, found.baseline
    )


def _without(files: Sequence[FileEvaluation]) -> str:
    """A word about files that count for nothing."""
    empty = [file for file in files if not file.rows]
    if not empty:
        return ""
    reason = next((f" ({file.file}, {file.reason})" for file in empty if file.reason), "")
    return f"warning: no row has a prediction in {named([file.file for file in empty])}{reason}"


def _joined(names: Sequence[str], scored: Sequence[ScoredRows]) -> ScoredRows:
    """The rows of all files as one table; sites of the same name are the same."""
    several = len(names) > 1
    first = (
        f"{name}, {s.reason}" if several else s.reason
        for name, s in zip(names, scored, strict=True)
        if s.reason
    )
    reason = next(first, "")
    full = [part for part in scored if len(part.targets)]
    if not full:
        which = "no file holds a row" if several else f"{names[0]} holds no row"
        why = f" ({reason})" if reason else ""
        raise BadInput("no-rows", f"{which} that has a prediction{why}")
    sites = tuple(dict.fromkeys(site for part in full for site in part.sites))
    places = {site: place for place, site in enumerate(sites)}
    numbers = [torch.tensor([places[site] for site in part.sites])[part.site] for part in full]
    return ScoredRows(
        torch.cat([part.scores for part in full]),
        torch.cat([part.targets for part in full]),
        torch.cat(numbers),
        sites,
        sum(part.left_out for part in scored),
        reason,
    )
