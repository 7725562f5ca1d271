"""``dpscaffold train``: one run from a configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscaffold.cli.example import DEMO
from dpscaffold.cli.keys import complete_setting, complete_unset
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from dpscaffold.config import Settings
    from dpscaffold.federation import Federation
    from dpscaffold.training import Result

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
class Wish:
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
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="print errors only")] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="say what was read and what will be run")
    ] = False,
) -> None:
    """Train a model and write a run folder."""
    from rich.console import Console

    from dpscaffold.config import load
    from dpscaffold.report.runs import summary_lines
    from dpscaffold.runfolder import plain
    from dpscaffold.training import summarise

    wish = wished(config, out, resume)
    base = DEMO if wish.config is None and not _names_a_source(set_ or []) else {}
    changes = [*(set_ or []), *(["privacy.release=true"] if release else [])]
    changes += [f"privacy.allow={json.dumps(allow)}"] if allow else []
    settings = load(wish.config, changes, base, unset or [])
    engine = engine or engine_of(wish)
    result = run_settings(
        settings, wish.folder, wish.resume, device, engine, as_json or quiet, verbose=verbose
    )
    if as_json:
        answer = summarise(result) | {"folder": str(wish.folder), "privacy": result.privacy}
        typer.echo(json.dumps(plain(answer), indent=2))
    elif not quiet:
        Console().print("\n".join(summary_lines(result)), highlight=False)
    if result.ended == "interrupted":
        raise typer.Exit(143 if "SIGTERM" in result.message else 130)


def wished(config: Path | None, out: Path | None, resume: bool) -> Wish:
    """Read ``train RUN --resume`` and ``train RUN/config.toml --resume`` as people mean them.

    >>> wished(Path("sites.toml"), None, resume=False).folder.as_posix()
    'runs/sites'
    """
    if config is not None and config.is_dir():
        inside = config / "config.toml"
        if not inside.exists():
            raise BadInput(f"{config} is a folder without a run; name a configuration (TOML)")
        if not resume:
            raise BadInput(f"{config} is a run folder; add --resume to go on with its run")
        return Wish(inside, out or config, True)
    if config is not None and out is None and resume and (config.parent / "run.json").exists():
        return Wish(config, config.parent, True)
    name = config.stem if config else "train"
    return Wish(config, out or Path("runs") / name, resume)


def engine_of(wish: Wish) -> str:
    """The engine that a resumed run began with; the simulator for a new one."""
    from dpscaffold.runfolder import RunFolder

    saved = RunFolder(wish.folder).read_json("run.json") if wish.resume else None
    return str((saved or {}).get("engine", "simulator"))


def _names_a_source(changes: list[str]) -> bool:
    return any(change.partition("=")[0].strip() == "data.source" for change in changes)


def run_settings(
    settings: Settings,
    folder: Path | None,
    resume: bool = False,
    device: str = "cpu",
    engine: str = "simulator",
    quiet: bool = False,
    federation: Federation | None = None,
    verbose: bool = False,
) -> Result:
    """Load the data, train with a progress line, return the result."""
    from dpscaffold.data.loading import load_federation
    from dpscaffold.engines import Hardware
    from dpscaffold.machine import pick_devices
    from dpscaffold.release import for_release
    from dpscaffold.report.progress import Progress
    from dpscaffold.training import run

    def notify(note: str) -> None:
        if verbose or (note.startswith("warning:") and not quiet):
            _say(note)

    if federation is None:
        federation = load_federation(settings.data, notify)
    settings = for_release(settings, federation, folder if resume else None)
    setting = settings.setting(federation)
    if verbose:
        _say(str(federation))
        noise = f", noise {setting.privacy.noise:g}" if setting.privacy else ", no privacy"
        _say(
            f"{setting.label}: {setting.plan.rounds} rounds of {setting.participants} of "
            f"{setting.users} users, {setting.plan.local_steps} steps each on "
            f"{int(setting.batches.min())} to {int(setting.batches.max())} records{noise}"
        )
    simulated = setting.privacy is not None and not setting.privacy.secret
    label = f"{setting.label}{' (simulated)' if simulated else ''}"
    with Progress(label, setting.plan.rounds, quiet) as progress:
        return run(
            setting,
            federation,
            Hardware(pick_devices(device)),
            engine=engine,
            optimum=settings.task.optimum,
            out=folder,
            resume=resume,
            listener=progress,
            config=settings.resolved(setting),
        )


def _say(sentence: str) -> None:
    typer.echo(sentence, err=True)
