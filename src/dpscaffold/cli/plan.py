"""``dpscaffold plan``: hyperparameters from public facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dpscaffold.cli.folder import refuse_unwritable
from dpscaffold.cli.usage import interrupted
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from rich.console import Console

    from dpscaffold.config import Configuration, FactsSettings
    from dpscaffold.config.gaussian import View
    from dpscaffold.deployment.server.config import ServerConfiguration
    from dpscaffold.planning.facts import Facts, Limits
    from dpscaffold.planning.recommendation import Goal, Preset, Recommendation
    from dpscaffold.privacy.mechanism import Sampling, Unit


def plan_command(
    users: Annotated[int | None, typer.Option(help="M, the number of users.")] = None,
    records: Annotated[
        str | None,
        typer.Option(help="Training records per user: one number, or a list such as 300,500,120."),
    ] = None,
    features: Annotated[
        int | None, typer.Option(help="Number of features after preprocessing.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="Number of classes; 0 if a number is predicted.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="The ε to keep.")] = None,
    view: Annotated[
        str | None,
        typer.Option(help="Adversary: server, third-party or participant. Default: server."),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ. Default: 1/(10 × all records).")] = None,
    sampling: Annotated[
        str | None, typer.Option(help="Batches: poisson (default) or fixed.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="What is protected: record (default) or user.")
    ] = None,
    secure_sums: Annotated[
        bool,
        typer.Option("--secure-sums", help="Secure sums are available; use them if better."),
    ] = False,
    similarity: Annotated[
        str | None, typer.Option(help="Similarity of the users in per cent, or unknown.")
    ] = None,
    row_norm: Annotated[
        str | None, typer.Option(help="Largest norm of a row, or none. Default: 1.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Largest number of rounds. Default: 400.")
    ] = None,
    local_steps: Annotated[
        int | None, typer.Option(help="Largest number of local steps. Default: 10.")
    ] = None,
    cohort_size: Annotated[
        int | None,
        typer.Option(
            "--participants",
            help="Largest number of users in a round. Default: all up to 200, then a fifth.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Configuration file with the constraints and [facts]. Its data are not read."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for plan.toml, plan.json and plan.png.")] = Path(
        "plan"
    ),
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:N or auto.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")] = False,
) -> None:
    """Choose algorithm and hyperparameters from public facts. No record is read.

    Example: dpscaffold plan --users 20 --records 200 --features 40 --classes 10 --epsilon 2
    """
    from rich.console import Console

    from dpscaffold.report import planning
    from dpscaffold.runs.written import plain

    refuse_unwritable(out)
    _refuse_own_output(config, out)
    asked = _asked(
        config,
        {
            "users": users,
            "records": None if records is None else _sizes(records),
            "features": features,
            "classes": classes,
            "similarity": _number_or(similarity, "--similarity", "unknown"),
            "row_norm": _number_or(row_norm, "--row-norm", "none"),
        },
        (epsilon, view, delta, sampling, unit),
        (rounds, local_steps, cohort_size),
        secure_sums,
    )
    console = Console(highlight=False, soft_wrap=True)
    found = _recommended(asked, device, as_json or quiet, console)
    files = planning.write_plan(found, out, asked.tables)
    if as_json:
        typer.echo(json.dumps(plain(planning.as_json(found)), indent=2, ensure_ascii=False))
    elif not quiet:
        if view is None and "view" not in asked.tables.get("privacy", {}):
            console.print("no view was named: ε is against the server")
        console.print("\n".join(planning.plan_lines(found)), markup=False)
        console.print(f"{out} holds {', '.join(files)}")
        if _needs_copy(asked.settings, out):
            console.print(
                f"copy your own file next to {out / 'plan.toml'}, where train looks for it"
            )


@dataclass(frozen=True)
class _PlanRequest:
    """What is planned for: the tables and settings of a configuration, and what they say."""

    tables: dict[str, Any]
    settings: Configuration | ServerConfiguration
    facts: Facts
    goal: Goal
    limits: Limits
    preset: Preset


def _asked(
    config: Path | None,
    options: Mapping[str, Any],
    goal_options: tuple[float | None, str | None, float | None, str | None, str | None],
    limit_options: tuple[int | None, int | None, int | None],
    secure_sums: bool,
) -> _PlanRequest:
    """What the configuration and the options say."""
    from dpscaffold.config import parse, read_tables
    from dpscaffold.deployment.server.config import load_served
    from dpscaffold.planning.facts import facts_of

    tables = read_tables(config) if config else {}
    # keys and values are checked before they are planned on
    served = load_served(config) if config and "schema" in tables else None
    settings = served or parse(tables, config.parent if config else None)
    told = served.public_facts().model_dump(exclude_none=True) if served else None
    asked = _given_facts(tables.get("facts", {}) if told is None else told, **options)
    facts = facts_of(asked)
    goal = _goal(tables, *goal_options)
    limits = _limits(tables, facts.users, *limit_options)
    preset = _preset(tables, settings, facts, goal, secure_sums)
    if goal_options[0] is None and settings.privacy and isinstance(settings.privacy.epsilon, dict):
        preset = replace(preset, budgets=settings.privacy.epsilon)
    return _PlanRequest(tables, settings, facts, goal, limits, preset)


def _recommended(
    asked: _PlanRequest, device: str, silent: bool, console: Console
) -> Recommendation:
    """The plan."""
    from dpscaffold import planning
    from dpscaffold.engine.device import pick_device, stop_signals
    from dpscaffold.report.tuning_progress import Rounds
    from dpscaffold.training.events import StopRequested

    given = (asked.facts, asked.goal, asked.limits, asked.preset)
    with stop_signals() as caught, Rounds(caught, silent, "planning") as watcher:
        try:
            return planning.plan(*given, device=pick_device(device), tell=watcher)
        except StopRequested as stopped:
            console.print(f"stopped by {stopped} before a plan was found; nothing was written")
            raise interrupted(str(stopped)) from None


def _needs_copy(settings: Configuration | ServerConfiguration, out: Path) -> bool:
    """Whether the configuration names files of your own that lie in another folder."""
    home = getattr(settings, "home", None)
    return home is not None and Path(home) != out.absolute()


def _refuse_own_output(config: Path | None, out: Path) -> None:
    """The plan must not overwrite the configuration that it is made of."""
    if config and config.exists() and config.resolve() == (out / "plan.toml").resolve():
        raise BadInput(
            "overwrites-input",
            f"--out is {out}, whose plan.toml is the configuration that is planned on; name "
            f"another folder",
        )


def _given_facts(given: Mapping[str, Any], **options: Any) -> FactsSettings:
    """Options before what a configuration says."""
    from dpscaffold.config import FactsSettings, parse

    said = {name: value for name, value in options.items() if value is not None}
    return parse({"facts": {**given, **said}}).facts or FactsSettings()


def _sizes(text: str) -> int | list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(
            "not-a-whole-number",
            f"--records is {text!r}; give a whole number, or one for each user: 300,500,120",
        ) from None
    return found[0] if len(found) == 1 else found


def _number_or(text: str | None, name: str, word: str) -> float | str | None:
    if text is None or text == word:
        return text
    try:
        return float(text)
    except ValueError:
        raise BadInput("not-a-number", f"{name} is {text!r}; give a number, or {word}") from None


def _goal(
    tables: Mapping[str, Any],
    epsilon: float | None,
    view: str | None,
    delta: float | None,
    sampling: str | None,
    unit: str | None,
) -> Goal:
    from dpscaffold.planning.recommendation import Goal

    given = tables.get("privacy", {})
    asked = given.get("epsilon") if epsilon is None else epsilon
    if isinstance(asked, dict):
        asked = asked.get("default", median_low(asked.values()))  # of users: the usual one
    if asked is None:
        raise BadInput(
            "missing-argument",
            "epsilon is not given; say --epsilon, or privacy.epsilon with --config",
        )
    protected = given.get("unit", "record") if unit is None else unit
    return Goal(
        float(asked),
        cast("View", given.get("view", "server") if view is None else view),
        given.get("delta") if delta is None else delta,
        cast("Sampling", given.get("sampling", "poisson") if sampling is None else sampling),
        cast("Unit", protected),
    )


def _limits(
    tables: Mapping[str, Any],
    users: int,
    rounds: int | None,
    local_steps: int | None,
    cohort_size: int | None,
) -> Limits:
    from dpscaffold.checks import floor_share
    from dpscaffold.planning.facts import Limits
    from dpscaffold.privacy.numbers import digits_up

    plan = tables.get("plan", {})
    ratio = plan.get("user_ratio")
    if cohort_size is None and ratio is not None:
        cohort_size = floor_share(ratio, users)
        if cohort_size < 1:
            raise BadInput(
                "no-participants",
                f"plan.user_ratio is {ratio:g}, which takes none of {users} users; use at least "
                f"{digits_up(1 / users, 4)}, or say --participants",
            )
    return Limits(
        plan.get("rounds", Limits.rounds) if rounds is None else rounds,
        plan.get("local_steps", Limits.local_steps) if local_steps is None else local_steps,
        cohort_size,
    )


def _preset(
    tables: Mapping[str, Any],
    settings: Configuration | ServerConfiguration,
    facts: Facts,
    goal: Goal,
    available: bool,
) -> Preset:
    """What a configuration settles: the algorithm, the task, C, s, λ, whatever of the plan is not
    chosen, and the limits that σ_g is solved under. At deployed sites sizes are declared with
    Poisson batches, and anybody may stay away."""
    from dpscaffold.config import Configuration
    from dpscaffold.config.secure import Secure
    from dpscaffold.planning.recommendation import Preset
    from dpscaffold.runs.ledger import MAY_STAY_AWAY

    plan, privacy = tables.get("plan", {}), settings.privacy
    clip = tables.get("privacy", {}).get("clip")
    if isinstance(clip, str):
        raise BadInput(
            "median-clip",
            "privacy.clip is 'median', which has no noise to plan with; give a number",
        )
    if isinstance(settings, Configuration):
        declared = settings.data.declared_sizes is not None
        absent, remarks = None, _remarks(settings) if "data" in tables else ()
    else:
        declared, absent, remarks = goal.sampling == "poisson", MAY_STAY_AWAY, ()
    return Preset(
        settings.algorithm.build() if tables.get("algorithm") else None,
        clip,
        plan.get("data_ratio"),
        plan.get("weighting"),
        plan.get("regularisation", 0.0),
        settings.task.build(facts) if "task" in tables else None,
        settings.plan,
        privacy,
        declared,
        absent,
        remarks,
        settings.secure,
        Secure() if available else None,
    )


def _remarks(settings: Configuration) -> tuple[str, ...]:
    """What a plan does not count, its data being closed: the cost of preparing them privately."""
    data = settings.data
    steps = [getattr(step, "fit", None) for step in getattr(data, "preprocess", ())]
    fills = getattr(data, "missing", None)
    tables = isinstance(fills, dict) and any(hasattr(rule, "fill") for rule in fills.values())
    if "private" in steps or tables:
        return (
            "The data are prepared privately, which costs privacy too: train solves a larger σ_g, "
            "so that both together keep ε.",
        )
    if data.source == "saved":
        return (
            "If the stored data were prepared privately, that costs privacy too: train solves a "
            "larger σ_g then, so that both together keep ε.",
        )
    return ()
