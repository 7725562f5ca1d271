"""``dpscaffold train``: one run from a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dpscaffold.cli.example import DEMO
from dpscaffold.cli.keys import complete_setting, complete_unset, unset_keys
from dpscaffold.errors import BadInput

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="override, e.g. plan.rounds=100", autocompletion=complete_setting),
]
UnsetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--unset", help="leave a key or a table out, e.g. privacy", autocompletion=complete_unset
    ),
]


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
            help="TOML configuration, or with --resume a run folder; without one the demo is "
            "trained"
        ),
    ] = None,
    set_: SetOption = None,
    unset: UnsetOption = None,
    out: Annotated[Path | None, typer.Option(help="run folder; default: runs/NAME")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the run in the folder, or in --out")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto")] = "cpu",
    engine: Annotated[
        str | None, typer.Option(help="simulator (fast, default) or loop (the readable oracle)")
    ] = None,
    release: Annotated[
        bool,
        typer.Option(
            "--release",
            help="for a model that is handed out: secret noise, a draw that nobody chose, nothing "
            "left unprotected",
        ),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow", help="overrule --release: unprotected-preprocessing or median-clip"
        ),
    ] = None,
    data_key: Annotated[
        Path | None,
        typer.Option(
            "--data-key",
            help="file with a key, made if missing: `privacy RUN RUN` compares the records of runs "
            "with the same key",
        ),
    ] = None,
    stop_on: Annotated[
        Path | None,
        typer.Option(
            "--stop-on",
            help="public rows (.csv, .parquet) by which to stop early; ε stays that of all rounds",
        ),
    ] = None,
    track: Annotated[
        str | None, typer.Option(help="follow the run in tensorboard or mlflow (extra [track])")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="simulate with this many seeds, in OUT/seed-0, OUT/seed-1, …, and report the mean "
            "and the standard deviation"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="print errors only")] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="say what was read and what will be run")
    ] = False,
) -> None:
    """Train a model and write a run folder."""
    from dpscaffold.cli.compare import show
    from dpscaffold.config import load, read_tables
    from dpscaffold.report.ending import ending
    from dpscaffold.runs.written import plain
    from dpscaffold.training import summarise
    from dpscaffold.training.events import silence
    from dpscaffold.training.from_config import run_seeds, run_settings
    from dpscaffold.training.tracking import tracker

    request = requested(config, out, resume)
    base = DEMO if request.config is None and not _names_a_source(set_ or []) else {}
    changes = [*(set_ or []), *(["privacy.release=true"] if release else [])]
    changes += [f"privacy.allow={json.dumps(allow)}"] if allow else []
    changes += [f"stopping.path={json.dumps(str(stop_on))}"] if stop_on else []
    tables = partial(read_tables, request.config) if request.config else partial(dict, base)
    settings = load(request.config, changes, base, unset_keys(unset, set_, tables))
    engine = engine or (engine_of(request) if request.resume else "simulator")
    silent = as_json or quiet
    if seeds is not None:
        if config is not None and config.is_dir():
            raise BadInput(
                f"--seeds is {seeds}, and {config} is one run; name its configuration instead"
            )
        _refuse_with_seeds({"--track": track, "--stop-on": stop_on})
        run_seeds(
            settings,
            request.folder,
            seeds,
            request.resume,
            device=device,
            engine=engine,
            quiet=silent,
            say=_say if verbose else None,
            warn=None if silent else _say,
            data_key=data_key,
        )
        if not quiet:
            show([request.folder], None, as_json)
        return
    result = run_settings(
        settings,
        request.folder,
        request.resume,
        device,
        engine,
        silent,
        say=_say if verbose else None,
        warn=None if silent else _say,
        listener=tracker(track, request.folder, settings) if track else silence,
        data_key=data_key,
    )
    if as_json:
        answer = summarise(result) | {
            "folder": str(request.folder),
            "privacy": result.privacy.to_json(),
        }
        typer.echo(json.dumps(plain(answer), indent=2))
    elif not quiet:
        typer.echo("\n".join(ending(result, request.folder)))
    if result.ended == "interrupted":
        raise typer.Exit(143 if "SIGTERM" in result.message else 130)


def requested(config: Path | None, out: Path | None, resume: bool) -> TrainRequest:
    """Read ``train RUN --resume`` and ``train RUN/config.toml --resume`` as people mean them.

    >>> requested(Path("sites.toml"), None, resume=False).folder.as_posix()
    'runs/sites'
    """
    if config is not None and config.is_dir():
        inside = config / "config.toml"
        if not inside.exists():
            raise BadInput(f"{config} is a folder without a run; name a configuration (TOML)")
        if not resume:
            raise BadInput(f"{config} is a run folder; add --resume to go on with its run")
        return TrainRequest(inside, out or config, True)
    if resume and config is not None and not config.suffix and not config.exists():
        raise BadInput(f"{config} holds no run to go on with; name a run folder")
    if config is not None and out is None and resume and (config.parent / "run.json").exists():
        return TrainRequest(config, config.parent, True)
    name = config.stem if config else "train"
    return TrainRequest(config, out or Path("runs") / name, resume)


def engine_of(request: TrainRequest) -> str:
    """The engine that a resumed run began with; the simulator for a new one."""
    from dpscaffold.runs.folder import RunFolder

    saved = RunFolder(request.folder).read_json("run.json") if request.resume else None
    return str((saved or {}).get("engine", "simulator"))


def _refuse_with_seeds(options: Mapping[str, object]) -> None:
    """Options that are about one run."""
    for name in [name for name, value in options.items() if value is not None]:
        raise BadInput(f"{name} is about one run and --seeds makes several; leave one of them out")


def _names_a_source(changes: list[str]) -> bool:
    return any(change.partition("=")[0].strip() == "data.source" for change in changes)


def _say(sentence: str) -> None:
    typer.echo(sentence, err=True)
