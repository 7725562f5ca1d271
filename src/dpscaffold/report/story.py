"""What a report says of runs, in the words of people who were not there."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from dpscaffold.errors import BadInput
from dpscaffold.models.personal import JOINING
from dpscaffold.privacy import page
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.report.blocks import (
    BarChart,
    Block,
    Bullets,
    Code,
    Curves,
    Line,
    Page,
    Prose,
    Section,
    Table,
    Text,
    section,
)
from dpscaffold.report.outcome import PUBLIC, StoredRun, marked, numbered, results, tell
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.written import to_toml
from dpscaffold.tasks.metrics import titled

#: The curves that are drawn where a run has them, and what they are called.
COURSES = (
    ("train_loss", "training loss F(x)"),
    ("gradient_dissimilarity", "gradient dissimilarity"),
)


def page_of(paths: Sequence[Path], with_metrics: bool = False) -> Page:
    """The report of some run folders; several stand side by side.

    Of a run that keeps a promise it shows no metric of private records, which is outside ε, unless
    ``with_metrics`` asks for them.
    """
    runs = numbered([tell(path, with_metrics) for path in paths])
    if with_metrics and not any(stored.promises for stored in runs):
        raise BadInput(
            "not-applicable",
            "--with-metrics is given, but pages of runs without a guarantee show their metrics "
            "anyway; leave it out",
        )
    parts = [results(runs)]
    for stored in runs:
        promised = (
            _privacy(stored),
            _spending(stored),
        )
        parts += _named(promised, stored, runs)
    parts += [part for part in (_course(runs),) if part.blocks]
    for stored in runs:
        parts += _named((_joining(stored), _sites(stored), _again(stored)), stored, runs)
    subtitle = "A report on a model learnt from many parties, and on its privacy"
    return Page(_title(runs), subtitle, tuple(parts))


def _privacy(stored: StoredRun) -> Section:
    """The privacy statement, as it stands in the run folder."""
    said = stored.run.privacy
    return section("Privacy", [] if said is None else [Prose(page(said))])


def _title(runs: Sequence[StoredRun]) -> str:
    data = dict.fromkeys(stored.run.summary.data or "its data" for stored in runs)
    who = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return f"{who} on {' and '.join(data)}"


def _named(found: Sequence[Section], stored: StoredRun, runs: Sequence[StoredRun]) -> list[Section]:
    """The sections that say something; of several runs with the run's name."""
    suffix, of = (f": {stored.name}", stored.name) if len(runs) > 1 else ("", "")
    return [Section(part.title + suffix, part.blocks, of) for part in found if part.blocks]


def _course(runs: Sequence[StoredRun]) -> Section:
    metric = runs[0].run.metric
    levels = []
    for key, what in (("baseline", "constant baseline"), ("optimum", "best without privacy")):
        value = runs[0].reference(key, metric)
        if value is not None:
            levels.append((what, float(value)))
    figures = [_curve(runs, metric, f"test {titled(metric)}", tuple(levels))]
    figures += [_curve(runs, name, what) for name, what in COURSES]
    return section("The course of the training", figures)


def _curve(
    runs: Sequence[StoredRun], metric: str, what: str, levels: tuple[tuple[str, float], ...] = ()
) -> Curves | None:
    lines = []
    for stored in runs:
        rows = stored.run.history
        points = tuple(
            (float(row.round), value)
            for row in rows
            if (value := row.metrics.get(metric)) is not None
        )
        if points and stored.shows(metric):
            lines.append(Line(stored.name, points))
    if not lines:
        return None
    first = what[0].upper() if what[0].isascii() else what[0]
    caption = f"{first}{what[1:]} by round"
    caption = caption if metric in PUBLIC else marked(runs, caption)
    return Curves(caption, "round", what, tuple(lines), levels)


def _joining(stored: StoredRun) -> Section:
    """A local, the global and a personal model at every site: whether joining helps."""
    found = RunFolder(stored.run.folder).read_json(JOINING)
    if found is None or not stored.shows(f"test_{found['metric']}"):
        return Section("Whether joining helps", ())
    sites = sorted(found["sites"], key=lambda one: one["local"])
    lines = tuple(
        Line(name, tuple((float(k + 1), float(one[name])) for k, one in enumerate(sites)))
        for name in ("local", "global", "personal")
    )
    metric = titled(found["metric"])
    rows = tuple((name, f"{value:.4f}") for name, value in found["mean"].items())
    blocks: list[Block | None] = [
        Text(found["sentence"]),
        Table("Mean over sites", ("model", metric), rows),
        Curves(f"{metric} by site", "site, sorted by its local model", metric, lines),
        Text(found["note"], warning=True),
    ]
    return section("Whether joining helps", blocks)


def _sites(stored: StoredRun) -> Section:
    """The users, as far as they may be shown."""
    run = stored.run.privacy.run if stored.run.privacy else None
    if run is None:
        return Section("The sites", ())
    rows = [
        ("users (sites)", str(run.users)),
        ("taking part in a round", f"{run.cohort_size}, drawn uniformly"),
        ("local steps of each", str(run.local_steps)),
    ]
    if run.unit == "record":  # of a whole user not even the size may be revealed
        rates = [group.rate for group in run.groups]
        low, high = min(rates), max(rates)
        share = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        rows.append(("share of its records in a batch", share))
    text = (
        "Nothing else of single sites is shown: their sizes, labels and metrics are computed from "
        "private records, and no guarantee covers them."
    )
    return section("The sites", [Table("Who took part", ("", "value"), tuple(rows)), Text(text)])


def _spending(stored: StoredRun) -> Section:
    """ε over rounds, and what users spent; who was left out and why."""
    said = stored.run.privacy
    if said is None or said.run is None or not said.guarantee:
        return Section("What was spent", ())
    blocks: list[Block | None] = [_curve([stored], "epsilon_server", "ε towards the server")]
    counts = said.parts[-1].participations
    if len(counts) > 1:  # one bar would show nothing
        bars = _binned(counts)
        blocks.append(BarChart("How often users took part", "participations", "users", bars))
    if counts:
        blocks.append(_left_out(counts, said.run))
    return section("What was spent, and who was left out", blocks)


def _left_out(counts: Mapping[int, int], run: Mechanism) -> Bullets:
    said = []
    if counts.get(0):
        said.append(f"{counts[0]} users were never drawn: the draw is uniform and blind to data.")
    if run.declines:
        said.append(f"A drawn user may decline: {run.declines}.")
    nobody = "Nobody was left out: every user took part, and none was capped."
    return Bullets(tuple(said or [nobody]))


def _binned(counts: Mapping[int, int], most: int = 24) -> tuple[tuple[str, float], ...]:
    """Users by number of participations, joined where there are many numbers."""
    low, high = min(counts), max(counts)
    step = -(-(high - low + 1) // most)
    bins = []
    for start in range(low, high + 1, step):
        end = min(high, start + step - 1)
        users = sum(counts.get(k, 0) for k in range(start, end + 1))
        bins.append((str(start) if start == end else f"{start}–{end}", float(users)))
    return tuple(bins)


def _again(stored: StoredRun) -> Section:
    """Configuration, versions, and how to run it again."""
    rows = [(key, str(value)) for key, value in stored.versions.items()]
    rows += [("engine", stored.engine)] if stored.engine else []
    command = "dpscaffold train config.toml --out runs/again"
    seed = "With the same seed, machine and versions every number is repeated."
    config, said = stored.config, stored.run.privacy
    if stored.run.private:
        config = without_seed(config)
    if stored.run.private and said is not None and said.seeded:
        seed += (
            " The seed is left out here, because it gives the noise away: publish results of a "
            "simulation, not its seed."
        )
    elif stored.run.private:
        seed = (
            "Its noise came from the operating system and is kept nowhere, so another run has "
            "other noise of the same law. The seed of the draw is left out here: it would tell who "
            "took part."
        )
    return section(
        "How to reproduce it",
        [
            Text(f"Save the configuration as `config.toml` and run `{command}`. {seed}"),
            Code("The configuration, as resolved", config),
            Table("What made it", ("", "value"), tuple(rows)) if rows else None,
        ],
    )


def without_seed(config: str) -> str:
    """A configuration's text without ``plan.seed``.

    >>> without_seed("[data]\\nseed = 1\\n[plan]\\nseed = 2\\nrounds = 3\\n")
    '[data]\\nseed = 1\\n\\n[plan]\\nrounds = 3\\n'
    """
    tables = tomllib.loads(config)
    tables.get("plan", {}).pop("seed", None)
    return to_toml(tables)
