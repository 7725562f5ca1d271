"""What a report says of runs, in the words of people who were not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpscaffold.books.runfolder import RunFolder
from dpscaffold.privacy.showing import round_up
from dpscaffold.progress import duration
from dpscaffold.report.blocks import (
    Bars,
    Block,
    Bullets,
    Code,
    Curves,
    Grid,
    Line,
    Page,
    Section,
    Text,
    section,
)
from dpscaffold.report.promises import outside_section, person_section, privacy_section
from dpscaffold.report.runs import RunRecord, read_run
from dpscaffold.scoring import titled

#: The curves that are drawn where a run has them, and what they are called.
COURSES = (
    ("train_loss", "training loss F(x)"),
    ("gradient_dissimilarity", "gradient dissimilarity"),
)


@dataclass(frozen=True)
class Told:
    """A run and what else its folder says: configuration, versions, identity and model."""

    run: RunRecord
    config: str
    versions: dict[str, Any]
    identity: dict[str, Any]
    model: dict[str, Any]

    @property
    def name(self) -> str:
        """How the run is called in the report."""
        return self.run.label

    @property
    def final(self) -> dict[str, Any]:
        """The last evaluated round."""
        return dict(self.run.summary.get("final") or self.run.history[-1])


def tell(path: Path) -> Told:
    """Read a run folder for a report."""
    folder, run = RunFolder(path), read_run(path)
    index = folder.read_json("model/model.json") or {}
    text = folder.file("config.toml").read_text(encoding="utf-8")
    versions = folder.read_json("versions.json") or {}
    return Told(run, text, versions, folder.read_json("run.json") or {}, index)


def page_of(paths: Sequence[Path]) -> Page:
    """The report of some run folders; several stand side by side."""
    runs = [tell(path) for path in paths]
    first = runs[0]
    data = dict.fromkeys(str(told.run.summary.get("data") or "its data") for told in runs)
    title = f"{first.name} on {next(iter(data))}"
    if len(runs) > 1:
        title = f"{len(runs)} runs on {' and '.join(data)}"
    parts = [_results(runs), _course(runs)]
    for told in runs:
        suffix, of = (f": {told.name}", told.name) if len(runs) > 1 else ("", "")
        found = (
            _sites(told),
            privacy_section(told.run.privacy),
            person_section(told.run.privacy),
            _spending(told),
            outside_section(told.run.privacy),
            _again(told),
        )
        parts += [Section(part.title + suffix, part.blocks, of) for part in found if part.blocks]
    subtitle = "A report on a model learnt from many parties, and on its privacy"
    return Page(title, subtitle, tuple(parts))


def _results(runs: Sequence[Told]) -> Section:
    """What was learnt and how well, beside the baseline."""
    blocks: list[Block | None] = []
    for told in runs:
        blocks += [Text(_learnt(told)), *_warnings(told)]
    names = [name for told in runs for name in told.final if name.startswith("test_")]
    rows = []
    for name in dict.fromkeys(names):
        rows.append((titled(name), *(_number(told.final.get(name)) for told in runs)))
        baselines = [told.run.summary.get(f"baseline_{name}") for told in runs]
        if any(value is not None for value in baselines):
            what = f"{titled(name)} of the best answer that looks at no feature"
            rows.append((what, *map(_number, baselines)))
        optima = [told.run.summary.get(f"optimum_{name}") for told in runs]
        if any(value is not None for value in optima):
            what = f"{titled(name)} of the best model of this kind, without privacy"
            rows.append((what, *map(_number, optima)))
    rows.append(("training loss", *(_number(told.final.get("train_loss")) for told in runs)))
    rows.append(("ε towards the server", *(_epsilon(told) for told in runs)))
    rows.append(("rounds", *(str(told.final.get("round")) for told in runs)))
    rows.append(("time", *(_time(told) for told in runs)))
    caption = "On the records that were held out; averaged over users where a metric is a mean"
    head = ("", *(told.name for told in runs))
    blocks.append(Grid(caption, head, tuple(rows)))
    return section("What was learnt, and how well", blocks)


def _learnt(told: Told) -> str:
    model, summary = told.model, told.run.summary
    target = model.get("target") or {}
    classes = target.get("classes") or []
    shown = ", ".join(classes[:8]) + (", …" if len(classes) > 8 else "")
    what = "to predict a number" if target.get("kind") == "number" else "to tell classes apart"
    if target.get("kind") == "labels":
        what = f"which of {len(classes)} labels hold ({shown})"
    elif classes:
        what = f"to tell {len(classes)} classes apart ({shown})"
    columns = model.get("columns") or []
    listed = ", ".join(columns[:6]) + (", …" if len(columns) > 6 else "")
    of = f" from {len(columns)} columns ({listed})" if columns else ""
    ended = summary.get("ended", "unfinished")
    return (
        f"{told.name} learnt {what}{of} on {summary.get('data', 'its data')}. "
        f"The run is {ended}, with {told.final.get('round')} rounds evaluated."
    )


def _warnings(told: Told) -> list[Block]:
    summary, found = told.run.summary, []
    ended = summary.get("ended")
    if ended == "interrupted" or not summary:
        found.append("This run is not finished: its numbers are those of the last evaluated round.")
    elif ended == "budget":
        found.append(f"This run was ended by its privacy budget: {summary.get('message', '')}.")
    if told.run.privacy.get("guarantee") is False or not told.run.privacy:
        reason = str(told.run.privacy.get("reason") or "no privacy statement was found")
        found.append(f"{reason[0].upper()}{reason[1:]}. Nothing here protects a record.")
    if summary.get("warning"):
        found.append(str(summary["warning"]))
    return [Text(text, warning=True) for text in found]


def _course(runs: Sequence[Told]) -> Section:
    metric = runs[0].run.metric
    levels = []
    for key, what in (("baseline", "no features"), ("optimum", "best without privacy")):
        value = runs[0].run.summary.get(f"{key}_{metric}")
        if value is not None:
            levels.append((what, float(value)))
    figures = [_curve(runs, metric, f"test {titled(metric)}", tuple(levels))]
    figures += [_curve(runs, name, what) for name, what in COURSES]
    return section("The course of the training", figures)


def _curve(
    runs: Sequence[Told], metric: str, what: str, levels: tuple[tuple[str, float], ...] = ()
) -> Curves | None:
    lines = []
    for told in runs:
        rows = told.run.history
        points = tuple(
            (float(r["round"]), float(r[metric])) for r in rows if r.get(metric) is not None
        )
        if points:
            lines.append(Line(told.name, points))
    if not lines:
        return None
    return Curves(f"{what[0].upper()}{what[1:]} by round", "round", what, tuple(lines), levels)


def _sites(told: Told) -> Section:
    """The users, as far as they may be shown."""
    said = told.run.privacy
    mechanism = said.get("mechanism")
    if not mechanism:
        return Section("The sites", ())
    users = mechanism["users"]
    rows = [
        ("users (sites)", str(users)),
        ("taking part in a round", f"{mechanism['participants']}, drawn uniformly"),
        ("local steps of each", str(mechanism["local_steps"])),
    ]
    rate = mechanism.get("rate")
    if rate:
        low, high = rate["min"], rate["max"]
        share = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        rows.append(("share of its records in a batch", share))
    text = (
        "Nothing else of single sites is shown: their sizes, labels and metrics are read off "
        "private records, and no guarantee covers them."
    )
    return section("The sites", [Grid("Who took part", ("", "value"), tuple(rows)), Text(text)])


def _spending(told: Told) -> Section:
    """ε over rounds, and what users spent; who was left out and why."""
    said = told.run.privacy
    ledger, mechanism = said.get("ledger"), said.get("mechanism")
    if not mechanism or not said.get("guarantee"):
        return Section("What was spent", ())
    blocks: list[Block | None] = [_curve([told], "epsilon_server", "ε towards the server")]
    if ledger:
        spread = ledger["epsilon_over_users"]
        counts = {int(key): int(value) for key, value in ledger["participations"].items()}
        blocks += [
            Bars("How often users took part", "participations", "users", _binned(counts)),
            Text(
                f"Given who took part, the user who spent most spent "
                f"ε = {round_up(ledger['epsilon'])}, the median user "
                f"{round_up(spread['median'])} and the least {round_up(spread['min'])}."
            ),
            _left_out(counts, mechanism),
        ]
    return section("What was spent, and who was left out", blocks)


def _left_out(counts: dict[int, int], mechanism: dict[str, Any]) -> Bullets:
    said = []
    cap = mechanism.get("max_participations")
    if counts.get(0):
        said.append(f"{counts[0]} users were never drawn: the draw is uniform and blind to data.")
    if cap is not None:
        full = sum(users for times, users in counts.items() if times >= cap)
        said.append(
            f"A user takes part at most {cap} times; {full} users reached that and stayed away "
            f"from then on, so that they spend no more."
        )
    if mechanism.get("may_decline"):
        said.append(f"A drawn user may decline: {mechanism['may_decline']}.")
    nobody = "Nobody was left out: every user took part, and none was capped."
    return Bullets(tuple(said or [nobody]))


def _binned(counts: dict[int, int], most: int = 24) -> tuple[tuple[str, float], ...]:
    """Users by number of participations, joined where there are many numbers."""
    low, high = min(counts), max(counts)
    step = -(-(high - low + 1) // most)
    bins = []
    for start in range(low, high + 1, step):
        end = min(high, start + step - 1)
        users = sum(counts.get(k, 0) for k in range(start, end + 1))
        bins.append((str(start) if start == end else f"{start}–{end}", float(users)))
    return tuple(bins)


def _again(told: Told) -> Section:
    """Configuration, versions, and how to run it again."""
    rows = [(key, str(value)) for key, value in told.versions.items()]
    rows += [(f"{key} (identity)", str(value)) for key, value in told.identity.items()]
    command = "dpscaffold train config.toml --out runs/again"
    seed = (
        "With the same seed, machine and versions every number is repeated. A seed also gives the "
        "noise away: publish results of a simulation, not its seed."
    )
    return section(
        "How to reproduce it",
        [
            Text(f"Save the configuration as `config.toml` and run `{command}`. {seed}"),
            Code("The configuration, as resolved", told.config),
            Grid("What made it", ("", "value"), tuple(rows)) if rows else None,
        ],
    )


def _epsilon(told: Told) -> str:
    said = told.run.privacy
    value = (said.get("server") or {}).get("epsilon")
    if value is None:
        return "no guarantee"
    given = (said.get("ledger") or {}).get("epsilon")
    beside = "" if given is None else f" over the draw, {round_up(given)} given who took part"
    return f"{round_up(value)}{beside} (δ = {said['delta']:.2g})"


def _number(value: Any) -> str:
    return "–" if value is None else f"{float(value):.4f}"


def _time(told: Told) -> str:
    seconds = told.run.summary.get("seconds")
    return "–" if seconds is None else duration(seconds)
