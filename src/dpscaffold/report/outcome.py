"""What was learnt and how well, next to the best answer that looks at no feature."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpscaffold.errors import BadInput
from dpscaffold.privacy.numbers import digits_up, round_up
from dpscaffold.privacy.page import Statement
from dpscaffold.report.blocks import Block, Section, Table, Text, section
from dpscaffold.report.runs import RunRecord, read_run
from dpscaffold.runs.folder import RunFolder
from dpscaffold.tasks.metrics import titled
from dpscaffold.training.progress import duration

#: What a model stands next to: the key in a summary, and words for a column and for a row.
REFERENCES = (
    ("baseline", "constant baseline", "of the constant baseline"),
    ("optimum", "best without privacy", "of the best model of this kind, without privacy"),
)


#: Numbers of a run that any page may show: they depend on no record.
PUBLIC = frozenset({"round", "epsilon_server", "epsilon_everybody"})
#: What is said where metrics are left out, and where they are shown all the same.
LEFT_OUT = (
    "No metrics are shown: they would be computed on private records without noise, and no ε "
    "covers that."
)
OUTSIDE = (
    "This page shows what is outside ε: metrics that were computed on private records without "
    "noise, or that only the server sees. No number of the privacy section covers them."
)


@dataclass(frozen=True)
class StoredRun:
    """A run and what else its folder says: configuration, versions, engine and model.

    ``with_metrics`` says to show metrics of private records even where a promise is kept.
    """

    run: RunRecord
    config: str
    versions: dict[str, Any]
    engine: str | None
    model: dict[str, Any]
    with_metrics: bool = False
    number: int | None = None

    @property
    def name(self) -> str:
        """How the run is called in the report; with a number where several are called alike."""
        return self.run.label if self.number is None else f"{self.run.label} {self.number}"

    @property
    def final(self) -> dict[str, Any]:
        """The last evaluated round, as far as it may be shown."""
        found = dict(self.run.summary.final or self.run.history[-1])
        return {name: value for name, value in found.items() if self.shows(name)}

    @property
    def promises(self) -> bool:
        """Whether the run keeps a promise about its records: it is private and no simulation."""
        said = self.run.privacy
        return said is not None and said.guarantee and not said.seeded

    @property
    def exposed(self) -> bool:
        """Whether metrics are shown that its promise does not cover."""
        return self.promises and self.with_metrics

    def shows(self, name: str) -> bool:
        """Whether a number may be shown. A server of sites computes metrics on public rows."""
        scored = self.engine == "sites" and name.startswith("test_")
        return name in PUBLIC or scored or self.with_metrics or not self.promises

    def reference(self, key: str, metric: str) -> float | None:
        """What the metric stands next to: of the summary, the baseline's or the optimum's."""
        return self.run.summary.number(f"{key}_{metric}") if self.shows(metric) else None


def tell(path: Path, with_metrics: bool = False) -> StoredRun:
    """Read a run folder for a report. One that is named after its seed (``train --seeds``) is
    called as the folder around it: a seed gives the noise of a simulation away."""
    folder, run = RunFolder(path), read_run(path)
    if run.repeats:
        raise BadInput(
            "several-runs", f"{path} holds runs of several seeds; name one of its folders"
        )
    if re.fullmatch(r"seed-\d+", path.name):
        run = replace(run, folder=path.absolute().parent)
    index = folder.read_json("model/model.json") or {}
    described = folder.described
    text = folder.file("config.toml").read_text(encoding="utf-8").partition("\n[run]")[0]
    versions, engine = described.get("versions", {}), described.get("engine")
    return StoredRun(run, text, versions, engine, index, with_metrics)


def numbered(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs, with numbers where several are called alike."""
    names = [stored.name for stored in runs]
    return [
        replace(stored, number=names[: k + 1].count(stored.name))
        if names.count(stored.name) > 1
        else stored
        for k, stored in enumerate(runs)
    ]


def _leaves_out(stored: StoredRun) -> bool:
    """Whether the page of a run leaves its metrics out, which are outside ε."""
    return stored.promises and not stored.shows(stored.run.metric)


def results(runs: Sequence[StoredRun]) -> Section:
    """What was learnt and how well, next to the baseline."""
    blocks: list[Block | None] = []
    for stored in runs:
        blocks += [Text(_learnt(stored)), *_verdict(stored), *_warnings(stored)]
    names = dict.fromkeys(n for stored in runs for n in stored.final if n.startswith("test_"))
    if any(stored.exposed for stored in runs):
        blocks.insert(0, Text(OUTSIDE, warning=True))
    if names:
        blocks.append(
            _one_with_references(runs[0], [*names]) if len(runs) == 1 else _several(runs, [*names])
        )
    if any(map(_leaves_out, runs)):
        blocks.append(Text(LEFT_OUT))
    blocks.append(_circumstances(runs))
    return section("What was learnt, and how well", blocks)


def marked(runs: Sequence[StoredRun], text: str) -> str:
    """A caption, which says so where some of its numbers are outside ε."""
    outside = any(stored.exposed for stored in runs)
    return f"Outside ε: {text[0].lower()}{text[1:]}" if outside else text


def _caption(runs: Sequence[StoredRun]) -> str:
    how = "averaged over users where a metric is a mean"
    if all(stored.engine == "sites" for stored in runs):
        return f"On public rows; {how}"
    return marked(runs, f"On the records that were held out; {how}")


def _one_with_references(stored: StoredRun, names: Sequence[str]) -> Table:
    """The metrics of one run, with what they stand next to in columns of their own."""
    found = [
        (words, [stored.reference(key, name) for name in names]) for key, words, _ in REFERENCES
    ]
    columns = [(words, values) for words, values in found if any(v is not None for v in values)]
    rows = tuple(
        (titled(name), _number(stored.final.get(name)), *(_number(v[k]) for _, v in columns))
        for k, name in enumerate(names)
    )
    return Table(_caption([stored]), ("", "this model", *(words for words, _ in columns)), rows)


def _several(runs: Sequence[StoredRun], names: Sequence[str]) -> Table:
    """The metrics of several runs; what they stand next to for the metric that is shown alone."""
    rows = []
    for name in names:
        rows.append((titled(name), *(_number(stored.final.get(name)) for stored in runs)))
        for key, _, words in REFERENCES if name == runs[0].run.metric else ():
            values = [stored.reference(key, name) for stored in runs]
            if any(value is not None for value in values):
                rows.append((f"{titled(name)} {words}", *map(_number, values)))
    return Table(_caption(runs), ("", *(stored.name for stored in runs)), tuple(rows))


def _loss_title(runs: Sequence[StoredRun]) -> str:
    return f"training loss{' (outside ε)' if any(stored.exposed for stored in runs) else ''}"


def _circumstances(runs: Sequence[StoredRun]) -> Table:
    losses = [stored.final.get("train_loss") for stored in runs]
    times = [_time(stored) if stored.shows("seconds") else "–" for stored in runs]
    rows: list[tuple[str, ...]] = [
        ("ε towards the server", *(_epsilon(stored) for stored in runs)),
        ("rounds", *(str(stored.final.get("round")) for stored in runs)),
    ]
    if set(losses) != {None}:
        rows.insert(0, (_loss_title(runs), *map(_number, losses)))
    if set(times) != {"–"}:
        rows.append(("time", *times))
    head = ("", *(stored.name for stored in runs)) if len(runs) > 1 else ("", "value")
    return Table("How it was learnt", head, tuple(rows))


def _listed(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _learnt(stored: StoredRun) -> str:
    model, summary = stored.model, stored.run.summary
    target = model.get("target") or {}
    classes = target.get("classes") or []
    shown = _listed(classes, 8)
    what = "to predict a number" if target.get("kind") == "number" else "to tell classes apart"
    if target.get("low") is not None:
        what += f" from {target['low']:g} to {target['high']:g}"
    if target.get("kind") == "labels":
        what = f"which of {len(classes)} labels hold ({shown})"
    elif classes:
        what = f"to tell {len(classes)} classes apart ({shown})"
    columns = model.get("columns") or []
    of = f" from {len(columns)} columns ({_listed(columns, 6)})" if columns else ""
    return (
        f"{stored.name} learnt {what}{of} on {summary.data or 'its data'}. "
        f"The run is {summary.ended}, with {stored.final.get('round')} rounds evaluated."
    )


def _verdict(stored: StoredRun) -> list[Block]:
    """Whether the model is of use, where its metrics may be shown."""
    found = stored.run.summary.verdict
    if not found or not stored.shows(stored.run.metric):
        return []
    return [Text(f"Verdict: {stored.name} is {found}.", strong=True)]


def _why_unprotected(said: Statement | None) -> str:
    """Why a run guarantees nothing; empty where it does."""
    if said is not None and said.guarantee:
        return ""
    return (said.reason if said else None) or "no privacy statement was found"


def _warnings(stored: StoredRun) -> list[Block]:
    summary, found = stored.run.summary, []
    if summary.ended == "interrupted" or summary.algorithm is None:
        found.append("This run is not finished: its numbers are those of the last evaluated round.")
    elif summary.ended == "budget":
        found.append(f"This run was ended by its privacy budget: {summary.message}.")
    reason = _why_unprotected(stored.run.privacy)
    if reason:
        found.append(f"{reason[0].upper()}{reason[1:]}. Nothing here protects a record.")
    if summary.warning and stored.shows("train_loss"):
        text = summary.warning
        found.append(f"{text[0].upper()}{text[1:]}.")
    return [Text(text, warning=True) for text in found]


def _epsilon(stored: StoredRun) -> str:
    said = stored.run.privacy
    if said is None or not said.guarantee or said.delta is None:
        return "no guarantee"
    server = said.guarantees[0]
    parts = [f"{round_up(server.epsilon)} over the draw"]
    if server.given is not None:
        parts.append(f"{round_up(server.given)} given who took part")
    if said.quotes_given:
        parts.reverse()
    simulated = "simulated: " if said.seeded else ""
    return f"{simulated}{', '.join(parts)} (δ = {digits_up(said.delta)})"


def _number(value: Any) -> str:
    return "–" if value is None else f"{float(value):.4f}"


def _time(stored: StoredRun) -> str:
    seconds = stored.run.summary.seconds
    return "–" if seconds is None else duration(seconds)
