"""How a run ends on the console: quality, cause, privacy, what is outside it, and what is next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from dpscaffold.privacy.preparation import WITHIN
from dpscaffold.privacy.showing import digits_up, round_up
from dpscaffold.privacy.statement_types import Statement
from dpscaffold.runs.history import MetricValues
from dpscaffold.tasks.metrics import titled
from dpscaffold.training.evaluator import baseline
from dpscaffold.training.progress import duration

if TYPE_CHECKING:
    from dpscaffold.training import Result

#: What is protected by each neighbouring relation.
RELATIONS = {
    "replace-one": "replacing one",
    "zero-out": "removing the content of one",
    "add-remove": "adding or removing one",
}
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
    lines.append(f"privacy  {privacy_line(result.privacy)}")
    lines.append(f"outside  {', '.join(outside_names(result.privacy))}; see {folder}/privacy.md")
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


def privacy_line(said: Statement) -> str:
    """ε with its adversary, δ and neighbours, in one line; one number where two agree."""
    mechanism, first = said.mechanism, said.quoted
    if not said.guarantee or mechanism is None or first is None or said.delta is None:
        return said.reason or "no guarantee"
    unit = "site's whole data" if mechanism.unit == "user" else "record"
    shown = round_up(first.epsilon)
    text = (
        f"ε = {shown} at δ = {digits_up(said.delta)} for "
        f"{RELATIONS.get(mechanism.relation or '', 'one')} {unit}, against "
    )
    text += "everybody who knows who took part" if said.quotes_ledger else "the server"
    other = first.replace_one
    if other is not None and round_up(other) != shown:
        text += f"; {round_up(other)} for replacing it"
    if said.alone is not None:
        spent = said.alone.ledger if said.quotes_ledger else said.alone.epsilon
        text += f"; {round_up(spent)} if all other sites collude with it"
    third = said.third_party.epsilon
    if third is not None and round_up(third) != shown:
        text += f"; {round_up(third)} against anyone who sees only the model"
    if said.simulated:
        return f"a simulation, as its seed is stored; with secret noise {text}"
    return text


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
