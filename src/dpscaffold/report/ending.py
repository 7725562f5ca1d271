"""How a run ends on the console: quality, cause, privacy, what is outside it, and what is next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from dpscaffold.privacy import Statement, line
from dpscaffold.privacy.preparation import WITHIN
from dpscaffold.runs.history import MetricValues
from dpscaffold.tasks.metrics import titled
from dpscaffold.training.evaluator import baseline
from dpscaffold.training.progress import duration

if TYPE_CHECKING:
    from dpscaffold.training.result import Result

#: Short names of what preparation computes from the records, by a word of its sentence.
NAMES = {
    "categor": "categories",
    "label": "label names",
    "class": "label names",
    "standardis": "means and deviations",
    "mean": "means",
    "principal": "principal components",
    "missing": "missing values",
    "left out": "which records were left out",
    "range": "the target's range",
    "date": "dates",
    "guessed": "how the files are written",
}


def ending(result: Result, folder: Path) -> list[str]:
    """At most seven lines on a run, for whoever ran it."""
    from dpscaffold.training.result import baseline_verdict

    setting = result.setting
    lines = [
        f"{folder.name}: {result.rounds} rounds of {setting.label}, {setting.users} sites, "
        f"{sum(setting.roster.sizes):,} training records ({duration(result.seconds)})"
        + _stopped(result)
    ]
    if result.history:
        constant = baseline(result.federation)
        found, why = baseline_verdict(result, constant, named=True)
        sentence = f"{found.sentence}: " if found else ""
        optimum = result.optimum.metrics if result.optimum else {}
        lines.append(f"quality  {sentence}{_metrics(result.final.metrics, constant, optimum)}")
        lines += [f"         {why}"] if why else []
    if result.joining is not None:
        lines.append(f"joining  {result.joining.sentence}")
    lines.append(f"privacy  {line(result.privacy)}")
    lines.append(
        f"outside  {', '.join(outside_names(result.privacy))}; see dpscaffold privacy {folder}"
    )
    lines.append(f"next     dpscaffold evaluate {folder}, privacy {folder} or report {folder}")
    return lines


def _stopped(result: Result) -> str:
    if result.ended == "completed":
        return f"; {result.message}" if result.message else ""
    return f"; {result.message}" + ("; continue with --resume" * (result.ended == "interrupted"))


def _metrics(
    final: MetricValues,
    constant: MetricValues,
    optimum: MetricValues,
) -> str:
    """The pooled metrics, each next to the constant baseline, and to the central optimum where it
    was solved."""
    found: list[str] = []
    for name, value in constant.items():
        if not name.endswith("_per_user") and name in final:
            word = "constant " if not found else ""
            best = f", central optimum {_short(optimum[name])}" if name in optimum else ""
            found.append(f"{titled(name)} {_short(final[name])} ({word}{_short(value)}{best})")
    return ", ".join(found)


def _short(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def outside_names(said: Statement) -> list[str]:
    """What ε does not cover, in a word each."""
    names = ["metrics"]
    for step in said.preparation:
        if step.protection == "drafted":
            names.append("the drafted configuration")
        elif step.protection not in WITHIN:
            sentence = step.sentence
            found = [name for word, name in NAMES.items() if re.search(word, sentence, re.I)]
            names.append(found[0] if found else " ".join(sentence.split()[:4]).rstrip(".,"))
    return list(dict.fromkeys(names))
