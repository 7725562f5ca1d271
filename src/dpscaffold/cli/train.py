"""``dpscaffold train``: one run from a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpscaffold.cli.example import DEMO
from dpscaffold.cli.usage import interrupted
from dpscaffold.engine.launcher import launched_rank, launched_ranks, restarted
from dpscaffold.errors import BadInput, nearest
from dpscaffold.runs.earlier import refuse_old

if TYPE_CHECKING:
    from dpscaffold.config import Configuration
    from dpscaffold.training.result import Result
    from dpscaffold.training.tracking import Mlflow, TensorBoard


@dataclass(frozen=True)
class TrainRequest:
    """Which configuration is run, and in which folder."""

    config: Path | None
    folder: Path
    resume: bool


def train_command(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Configuration file (TOML), or with --resume a run folder. Default: the demo."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key, for example plan.rounds=100. Can be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to write. Default: runs/NAME.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the given folder, or in --out.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:N or auto.")] = "cpu",
    data_key: Annotated[
        Path | None,
        typer.Option(
            "--data-key",
            help="Key file, created if missing. 'privacy RUN RUN' can then tell whether runs "
            "have the same records.",
        ),
    ] = None,
    track: Annotated[
        str | None, typer.Option(help="Log metrics to tensorboard or mlflow (extra [track]).")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Simulate with this many seeds, in OUT/seed-0, OUT/seed-1, …, and report mean "
            "and standard deviation."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the configuration with all defaults.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Print what was read and what will be run.")
    ] = False,
) -> None:
    """Train a model and write a run folder.

    Example: dpscaffold train clinics.toml --set plan.rounds=50
    """
    if dry_run:
        typer.echo(_spelled_out(_settings(config, set_ or []), as_json))
        return
    from dpscaffold.training.train import run

    request = requested(config, out, resume or restarted())
    settings = _settings(request.config, set_ or [])
    printing = launched_rank() == 0
    silent = as_json or quiet or not printing

    def say(sentence: str) -> None:
        if not silent and (verbose or sentence.startswith("warning:")):
            _say(sentence)

    how: dict[str, Any] = {"device": device, "progress": not silent, "data_key": data_key}
    if seeds is not None:
        _refuse_ranks(seeds)
        _refuse_with_seeds(seeds, config, {"--track": track})
        _run_seeds(settings, request, seeds, how, quiet, as_json)
        return
    followed = _tracker(track, request, settings) if track and printing else None
    if followed is not None:
        how["on_round"] = followed
    result = run(
        settings, out=request.folder, resume=request.resume, say=say, distributed=None, **how
    )
    if followed is not None:
        followed.close(result.ended)
    if printing:
        _tell(result, request.folder, as_json, quiet)
    if result.ended == "interrupted":
        raise interrupted(result.message)


def _tracker(track: str, request: TrainRequest, settings: Configuration) -> TensorBoard | Mlflow:
    from dpscaffold.training.tracking import tracker

    made = tracker(track, request.folder, settings)
    _say(
        f"warning: --track {track} hands on every round's metrics, which are computed from private "
        f"records without noise; epsilon does not cover them, so let nobody else read them"
    )
    return made


def _refuse_ranks(seeds: int) -> None:
    """Ranks share one run."""
    if launched_ranks() > 1:
        raise BadInput(
            "not-applicable",
            f"--seeds is {seeds}, and {launched_ranks()} processes were started to share one run; "
            f"leave --seeds out, or start it without torchrun",
        )


def _run_seeds(
    settings: Configuration,
    request: TrainRequest,
    seeds: int,
    how: dict[str, Any],
    quiet: bool,
    as_json: bool,
) -> None:
    """The same run with several seeds, and one table of them."""
    from dpscaffold.cli.compare import show
    from dpscaffold.training.train import run_seeds

    run_seeds(settings, request.folder, seeds, request.resume, **how)
    if not quiet:
        show([request.folder], None, as_json)


def _settings(config: Path | None, set_: list[str]) -> Configuration:
    """The configuration with ``set_``; the demo's where none names its data."""
    from dpscaffold.config import load, read_tables

    base = DEMO if config is None and not _names_a_source(set_) else {}
    for change in set_:
        key, sign, value = change.partition("=")
        if sign and not value.strip():
            _require_known(key.strip(), read_tables(config) if config else base)
    return load(config, set_, base)


def _require_known(key: str, tables: Mapping[str, Any]) -> None:
    """Refuse to leave out what is no key and does not stand in the tables (as a number of a user's
    own algorithm may): it would silently leave out nothing."""
    from dpscaffold.config.reference import keys

    held: Any = tables
    for part in key.split("."):
        held = held.get(part) if isinstance(held, Mapping) else None
    known = [one.path for one in keys()]
    if held is None and not any(f"{key}.".startswith(f"{name}.") for name in known):
        raise BadInput(
            "unknown-key",
            f"--set is '{key}=', which leaves out no key{nearest(key, known)}; name a table.key, "
            f"e.g. privacy.noise=",
        )


def _spelled_out(settings: Configuration, as_json: bool) -> str:
    """A configuration with every default."""
    from dpscaffold.runs.written import to_toml

    tables = settings.model_dump(mode="json", exclude_none=True)
    return json.dumps(tables, indent=2) if as_json else to_toml(tables).rstrip("\n")


def _tell(result: Result, folder: Path, as_json: bool, quiet: bool) -> None:
    from dpscaffold.report.ending import ending
    from dpscaffold.runs.written import plain
    from dpscaffold.training.result import summarise

    if as_json:
        answer = {
            **summarise(result).to_json(),
            "folder": str(folder),
            "privacy": result.privacy.to_json(),
            **({} if result.joining is None else {"joining": result.joining.to_dict()}),
        }
        typer.echo(json.dumps(plain(answer), indent=2))
    elif not quiet:
        typer.echo("\n".join(ending(result, folder)))


def requested(config: Path | None, out: Path | None, resume: bool) -> TrainRequest:
    """Read ``train RUN --resume`` and ``train RUN/config.toml --resume`` as people mean them.

    >>> requested(Path("sites.toml"), None, resume=False).folder.as_posix()
    'runs/sites'
    """
    if config is None:
        folder = Path("runs") / "train"
    elif config.is_dir():
        _check_run_folder(config, resume)
        config, folder = config / "config.toml", config
    elif resume and not config.suffix and not config.exists():
        raise BadInput("not-a-run", f"{config} holds no run to continue; name a run folder")
    elif resume and (config.parent / ".lock").exists():
        folder = config.parent
    else:
        folder = Path("runs") / config.stem
    return TrainRequest(config, out or folder, resume)


def _check_run_folder(folder: Path, resume: bool) -> None:
    refuse_old(folder)
    if not (folder / "config.toml").exists():
        raise BadInput(
            "not-a-run", f"{folder} is a folder without a run; name a configuration (TOML)"
        )
    if not resume:
        raise BadInput("run-exists", f"{folder} is a run folder; add --resume to continue its run")


def _refuse_with_seeds(seeds: int, config: Path | None, options: Mapping[str, object]) -> None:
    """A folder and options that are about one run."""
    if config is not None and config.is_dir():
        raise BadInput(
            "not-applicable",
            f"--seeds is {seeds}, and {config} is one run; name its configuration instead",
        )
    for name in [name for name, value in options.items() if value is not None]:
        raise BadInput(
            "conflicting-arguments",
            f"{name} is about one run and --seeds makes several; leave one of them out",
        )


def _names_a_source(changes: list[str]) -> bool:
    return any(change.partition("=")[0].strip() == "data.source" for change in changes)


def _say(sentence: str) -> None:
    typer.echo(sentence, err=True)
