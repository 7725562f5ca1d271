"""RESULT.md: our numbers, the paper's, the difference, the settings, ε by view and bound, and the
command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpscaffold.atomic import write_text
from dpscaffold.paper.archive import FinishedRun
from dpscaffold.paper.definition import Experiment, Place
from dpscaffold.paper.epsilons import epsilons
from dpscaffold.paper.frontier_page import frontier_parts
from dpscaffold.paper.published import caption, published
from dpscaffold.paper.results import Results, SeedSummary, average, last
from dpscaffold.paper.tables import sweep_parts, table_parts
from dpscaffold.paper.text import TUNING, Provenance, markdown, percent, rate
from dpscaffold.privacy.numbers import round_up
from dpscaffold.training.progress import duration


def write_result(results: Results, folder: Path, made: Provenance) -> str:
    """Write ``RESULT.md`` and return its name."""
    experiment = results.experiment
    parts = [
        f"# {title(experiment, made.scale, made.rows)}",
        f"Compared with the paper's {experiment.paper}."
        if _in_paper(experiment)
        else "This experiment is not in the paper.",
    ]
    if made.rows:
        every = ", ".join(row.label for row in experiment.rows)
        parts.append(f"**Only a part**: {', '.join(made.rows)} of the rows {every}.")
    for count, what in (
        (results.missing, "runs"),
        (results.missing_folds, "runs of the cross-validation"),
    ):
        if count:
            parts.append(
                f"**{count} {what} are not finished yet**; the same command continues with them."
            )
    parts += _PARTS[experiment.kind](results, made)
    parts += _privacy(results)
    parts += _settings(results, made)
    write_text(folder / "RESULT.md", "\n\n".join(parts) + "\n")
    return "RESULT.md"


def title(experiment: Experiment, scale: float, rows: tuple[str, ...] = ()) -> str:
    """The title, which says so where the experiment was scaled down or only a part of it is
    shown."""
    small = f" (scaled down to {scale:g} of the users and rounds)" if scale != 1 else ""
    part = f" (only {', '.join(rows)})" if rows else ""
    return f"{experiment.title}{part}{small}"


def _in_paper(experiment: Experiment) -> bool:
    return not experiment.paper.startswith("beyond")


def _curves(results: Results, made: Provenance) -> list[str]:
    """The end of every curve."""
    experiment = results.experiment
    said = caption(experiment.name)
    parts = ["## The end of every curve"]
    how = (
        "Means ± deviations over the seeds and the last 10 % of rounds; *average*: test accuracy "
        "of the model averaged over the last half."
    )
    if any(len(choices) > 1 for choices in results.places.values()):
        how += (
            f" η₀ was chosen for each algorithm at {_lowest(experiment)} by **test** accuracy and "
            f"kept for the others, as the paper keeps its choice; *best* shows the best η₀ of the "
            f"sweep for that panel alone, of both outputs. " + TUNING
        )
    parts.append(how)
    header = [
        "panel",
        "algorithm",
        "η₀",
        "T",
        "test accuracy (%)",
        "average (%)",
        "best (%)",
        "log₁₀ excess loss",
    ]
    header.append("dissimilarity")
    rows = [_end(results, place) for place in results.places]
    parts.append(markdown(header, rows))
    if said:
        parts.append("## What the paper says")
        parts.append(
            f"{said.pop('where')}. Its figures are curves without printed values; what it prints:"
        )
        parts.append(
            "\n".join(
                f"- {key.replace('_', ' ')}: {_spelled(value)}" for key, value in said.items()
            )
        )
    parts += _gaps(results)
    return parts


def _spelled(value: Any) -> str:
    """A printed value, or several by name."""
    return (
        "; ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    )


def _lowest(experiment: Experiment) -> str:
    """Where a choice was made, in words."""
    level = experiment.tuned_at
    return (
        "the lowest heterogeneity"
        if level in (None, "low")
        else f"{level} (the lowest heterogeneity)"
    )


def _end(results: Results, place: Place) -> list[str]:
    choice = results.chosen(place)
    runs = results.places[place][choice]

    def late(metric: str, pattern: str) -> str:
        summary = SeedSummary.of([run.finished.late(metric) for run in runs])
        return f"{summary.mean:{pattern}} ± {summary.deviation:{pattern}}" if summary.runs else ""

    found = [
        (results.summary(place, c, v), c) for v in (last, average) for c in [results.best(place, v)]
    ]
    best = max(found, key=lambda pair: pair[0].mean if pair[0].runs else -1)
    rates = len(results.places[place]) > 1
    return [
        f"{place[0]}, {place[1]}",
        place[2],
        f"{runs[0].case.settings.plan.learning_rate:g}",
        str(runs[0].finished.rounds),
        percent(results.summary(place, choice, last)),
        percent(results.summary(place, choice, average)),
        f"{percent(best[0])} ({rate(best[1])})" if rates else "",
        late("log10_gap", ".2f"),
        late("gradient_dissimilarity", ".3g"),
    ]


def _gaps(results: Results) -> list[str]:
    """How far DP-SCAFFOLD is ahead of DP-FedAvg in each panel."""
    rows = []
    for row in results.rows:
        for column in results.columns(row):
            for line in results.lines(row):
                other = line.replace("SCAFFOLD-warm", "FedAvg").replace("SCAFFOLD", "FedAvg")
                here, there = (row, column, line), (row, column, other)
                if line == other or here not in results.places or there not in results.places:
                    continue
                ours = results.summary(here, results.chosen(here), last).mean
                theirs = results.summary(there, results.chosen(there), last).mean
                rows.append([f"{row}, {column}", line, other, f"{100 * (ours - theirs):+.2f}"])
    header = ["panel", "algorithm", "against", "points of test accuracy"]
    return ["## SCAFFOLD against FedAvg", markdown(header, rows)] if rows else []


def _epsilons_by_plan(results: Results) -> dict[str, dict[str, float | None]]:
    """ε by bound, for each distinct private plan in words."""
    seen: dict[str, dict[str, float | None]] = {}
    for place, choices in results.places.items():
        case = next(iter(choices.values()))[0].case
        settings = case.settings
        if settings.privacy is None:
            continue
        found = epsilons(settings)
        plan = (
            f"σ_g = {settings.privacy.noise:g}, K = {settings.plan.local_steps}, T = "
            f"{settings.plan.rounds}"
        )
        who = "" if results.experiment.kind in ("table", "sweep") else f"{place[0]}, {place[2]}: "
        ratios = f"l = {settings.plan.user_ratio:g}, s = {settings.plan.data_ratio:g}"
        seen.setdefault(f"{who}{plan}, {ratios}", found)
    return seen


def _privacy(results: Results) -> list[str]:
    """ε by view and bound of every distinct private plan."""
    if results.experiment.kind == "frontier":
        return ["## Privacy", *_solved_for(results)]
    seen = _epsilons_by_plan(results)
    if not seen:
        return []
    names = list(dict.fromkeys(name for found in seen.values() for name in found))
    rows = [
        [plan, *(round_up(found.get(name)) if name in found else "" for name in names)]
        for plan, found in seen.items()
    ]
    note = (
        f"ε {_DELTA}, for replacing one record of one user by another, with participants and "
        f"batches of fixed size drawn at random. The columns *server* hold against everyone who "
        f"sees every upload. The column *as published* is the paper's number, for comparison only: "
        f"it does not hold for every loss."
    )
    return [
        "## Privacy: ε by view and bound",
        note + _outside(results),
        markdown(["plan", *names], rows),
    ]


def _solved_for(results: Results) -> list[str]:
    """Whom the ε of a frontier holds against and by which bound: of rows whose server sees every
    upload, and of rows whose server sees sums."""
    rows: dict[bool, dict[str, None]] = {}
    for case in (run.case for run in results.runs if run.case.private):
        rows.setdefault(case.settings.secure is not None, {})[case.labels["row"]] = None
    found = []
    for secure, labels in rows.items():
        sees = "only sums of uploads" if secure else "all uploads and who took part"
        bound = "the bound of secure sums (Theorem 4, " if secure else "random participation ("
        where = f"In {', '.join(f'*{label}*' for label in labels)} " if len(rows) > 1 else ""
        found.append(
            f"{where}ε is against the server (who sees {sees}) {_DELTA}, by {bound}PLD), for "
            f"participants and batches drawn at random and the neighbours that each line names. "
            f"The noise was solved for it."
        )
    return [*found[:-1], found[-1] + _outside(results)] if found else []


_DELTA = "at δ = 1/(all training records)"


def _outside(results: Results) -> str:
    """Names the preprocessing that no ε of these runs covers; empty where there is none."""
    found: dict[str, None] = {}
    for case in (run.case for run in results.runs if run.case.private):
        data = case.settings.data
        if data.source == "synthetic":  # the law itself standardises the pooled training records
            found["standardisation on synthetic"] = None
        for step in getattr(data, "preprocess", ()):
            if getattr(step, "fit", None) == "unprotected":
                found[f"{step.step} on {data.source}"] = None
    if not found:
        return ""
    return (
        f"\n\n**Outside every ε here**: the preprocessing ({', '.join(found)}) was fitted to all "
        f"training records without protection, as the paper does."
    )


def _settings(results: Results, made: Provenance) -> list[str]:
    """Everything needed to do it again."""
    experiment = results.experiment
    # A run may stand in several places: FedSGD has the same K in every row.
    finished = {run.case.digest: run.finished for run in [*results.runs, *results.folded]}
    folds = len({run.case.digest for run in results.folded})
    seeds = sorted({run.case.labels["seed"] for run in results.runs})
    lines = [
        f"- command: `{made.command}`{_elsewhere(made, finished)}",
        f"- seeds: {', '.join(map(str, seeds))} (of training; the data are the same); runs: "
        f"{len(finished) - folds}" + (f", and {folds} of the cross-validation" if folds else ""),
        *_machines(finished),
        f"- definition: `paper/definitions/{experiment.name}.toml` inside the package",
        "- base configuration: "
        + "; ".join(
            f"{name}.{key} = {value}"
            for name, part in experiment.base.items()
            for key, value in part.items()
        ),
    ]
    for (data, penalty), accuracy in made.optima.items():
        table = json.loads(data)
        levels = f"({table['alpha']:g}, {table['beta']:g}), λ = {penalty:g}"
        lines.append(
            f"- test accuracy of the central optimum x* on synthetic {levels}: "
            f"{100 * accuracy:.2f} %"
        )
    if _in_paper(experiment):
        lines.append(f"- the paper: {published()['source']}")
    lines += [f"- {note}" for note in experiment.notes]
    return ["## How it was made", "\n".join(lines)]


def _machines(finished: dict[str, FinishedRun]) -> list[str]:
    """How many runs each machine made, in what time, and with which versions."""
    groups: dict[tuple[str, str], list[FinishedRun]] = {}
    for run in finished.values():
        names = ("dpscaffold", "python", "torch", "numpy")
        versions = ", ".join(f"{name} {run.made[name]}" for name in names if name in run.made)
        groups.setdefault((str(run.made.get("device")), versions), []).append(run)
    return [
        f"- device: {device}, {len(runs)} runs in {duration(sum(run.seconds for run in runs))}; "
        f"versions: {versions}"
        for (device, versions), runs in sorted(groups.items())
    ]


def _elsewhere(made: Provenance, finished: dict[str, FinishedRun]) -> str:
    """Says that runs came from another device than the command would use."""
    devices = {str(run.made.get("device")) for run in finished.values()}
    if "--device" in made.command or devices <= {"cpu"}:
        return ""
    part = "some of its runs" if "cpu" in devices else "its runs"
    return f"; {part} were made on a GPU, with `--device cuda`"


_PARTS = {"table": table_parts, "sweep": sweep_parts, "curves": _curves, "frontier": frontier_parts}
