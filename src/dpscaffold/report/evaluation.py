"""An evaluation as tables for the terminal and as a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from dpscaffold.errors import BadInput
from dpscaffold.models.evaluate import Evaluation
from dpscaffold.models.personal import SitesCompared
from dpscaffold.report.drawing import new_figure, save_figure
from dpscaffold.tasks.metrics import titled

#: How many sites and classes a terminal is shown.
SHOWN = 20


def evaluation_tables(found: Evaluation, classes: Sequence[str], width: int = 80) -> Iterator[Any]:
    """The metrics next to their baseline, then classes, confusion and sites as far as they fit into
    this many columns."""
    table = _table(f"{found.rows} rows", "metric", "value", "baseline")
    for name, value in found.metrics.items():
        table.add_row(titled(name), _shown(value), _shown(found.baseline.get(name)))
    yield table
    yield f"baseline: the best answer for all rows alike ({_constant(classes)})"
    if found.left_out:
        yield f"{found.left_out} rows were left out, as in the training ({found.reason})"
    if found.by_class:
        yield _rows("classes", found.by_class, width)
    if found.confusion:
        table = _table("confusion: true class down, predicted across", "", *classes)
        for name, row in zip(classes, found.confusion, strict=True):
            table.add_row(name, *map(str, row))
        yield table
    if found.sites:
        yield _rows("sites", found.sites, width)
    yield found.note


def joining_tables(compared: SitesCompared, width: int = 80) -> Iterator[Any]:
    """A local, the global and a personal model at every site, and whether joining helps."""
    shown = [
        {key: value for key, value in one.items() if key != "sentence"}
        for one in compared.to_dict()["sites"]
    ]
    yield _rows(f"{titled(compared.metric)} by site: alone, and after joining", shown, width)
    means = [compared.mean(which) for which in ("local", "common", "personal")]
    yield "mean over sites: local {:.4f}, global {:.4f}, personal {:.4f}".format(*means)
    yield compared.sentence
    yield compared.note


def _constant(classes: Sequence[str]) -> str:
    """How the baseline answers."""
    if not classes:
        return "the mean; for MAE the median"
    return (
        "the most frequent class; for F1 always the positive one"
        if len(classes) == 2
        else ("the most frequent")
    )


def _rows(title: str, entries: Sequence[dict[str, Any]], width: int) -> Table:
    shown = entries[:SHOWN]
    keys = _fitting(shown, width)
    more = [f"first {SHOWN} of {len(entries)}"] if len(entries) > SHOWN else []
    more += [f"{len(keys)} of {len(entries[0])} columns"] if len(keys) < len(entries[0]) else []
    said = f"{title}, {', '.join(more)} (all with --json)" if more else title
    table = _table(said, *(key.replace("_", " ") for key in keys))
    for entry in shown:
        table.add_row(*(_shown(entry[key]) for key in keys))
    return table


def _fitting(entries: Sequence[dict[str, Any]], width: int) -> list[str]:
    """The first columns that a terminal of this width shows whole; never less than the name and
    two more."""
    keys, used = list(entries[0]), 0
    for place, key in enumerate(keys):
        longest = max(map(len, key.split("_")))  # a head may be broken between its words
        used += 3 + max(longest, *(len(_shown(entry[key])) for entry in entries))
        if used > width and place > 2:
            return keys[:place]
    return keys


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for k, column in enumerate(columns):  # folded where it must be: a cut name may be any
        table.add_column(column, justify="left" if k == 0 else "right", overflow="fold")
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _draw_calibration(axis: Any, found: Evaluation) -> None:
    axis.plot([0, 1], [0, 1], color="0.6", linestyle=":", label="perfect")
    points = [(b.predicted, b.observed) for b in found.calibration]
    axis.plot(*zip(*points, strict=True), marker="o", label="model")
    axis.set(xlabel="predicted probability", ylabel="how often it is true")
    axis.legend(frameon=False)


def _draw_sites(axis: Any, found: Evaluation) -> None:
    """The first metric by site."""
    name = next(key for key in found.sites[0] if key not in ("site", "rows"))
    axis.bar([s["site"] for s in found.sites], [s[name] or 0 for s in found.sites])
    axis.set(ylabel=titled(name))
    axis.tick_params(axis="x", rotation=90)


def _draw_joining(axis: Any, compared: SitesCompared) -> None:
    """Local, global and personal metric by site; sites are sorted by their local one."""
    sites = sorted(compared.sites, key=lambda one: one.local)
    lines = {"local": "local", "global": "common", "personal": "personal"}
    for name, which in lines.items():
        axis.plot([getattr(one, which) for one in sites], marker=".", label=name)
    axis.set(xlabel="site, sorted by its local model", ylabel=titled(compared.metric))
    axis.legend(frameon=False)


def draw_evaluation(
    found: Evaluation, classes: Sequence[str], path: Path, joining: SitesCompared | None = None
) -> None:
    """Confusion and calibration, or for numbers the error by site; and whether joining helps."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise BadInput("wrong-file-type", f"--figure is {path}; name a .png, .svg or .pdf file")
    if not found.calibration and not found.sites:
        raise BadInput(
            "nothing-to-draw",
            "there is nothing to draw: the target is a number, and there are no sites",
        )
    figure = new_figure(9 if joining is None else 13, 4)
    count = (2 if found.confusion else 1) + (joining is not None)
    axes = figure.subplots(1, count, squeeze=False)
    last = axes[0, -1 if joining is None else -2]
    if found.confusion:
        _draw_confusion(axes[0, 0], np.array(found.confusion), classes)
    if found.calibration:
        _draw_calibration(last, found)
    else:
        _draw_sites(last, found)
    if joining is not None:
        _draw_joining(axes[0, -1], joining)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, 150)


def _draw_confusion(axis: Any, table: np.ndarray, classes: Sequence[str]) -> None:
    share = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    axis.imshow(share, cmap="Blues", vmin=0, vmax=1)
    axis.set_xticks(range(len(classes)), classes, rotation=90)
    axis.set_yticks(range(len(classes)), classes)
    for i, row in enumerate(table):
        for j, count in enumerate(row):
            shade = "white" if share[i, j] > 0.5 else "black"
            axis.text(j, i, str(count), ha="center", va="center", color=shade, fontsize=8)
    axis.set(xlabel="predicted", ylabel="true")
