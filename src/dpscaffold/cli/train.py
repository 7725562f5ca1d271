"""``dpscaffold train``: one run from a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dpscaffold.cli.demo import DEMO
from dpscaffold.config import Settings, load
from dpscaffold.data.loading import load_federation
from dpscaffold.engines import Hardware
from dpscaffold.machine import pick_device
from dpscaffold.report.progress import Progress
from dpscaffold.report.runs import summary_lines
from dpscaffold.runfolder import plain
from dpscaffold.training import Result, run, summarise


def train_command(
    config: Annotated[
        Path | None, typer.Argument(help="TOML configuration; without one the demo is trained")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="override, e.g. plan.rounds=100")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="run folder; default: runs/NAME")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto")] = "cpu",
    engine: Annotated[
        str, typer.Option(help="simulator (fast) or loop (the readable oracle)")
    ] = "simulator",
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Train a model and write a run folder."""
    settings = load(config, set_ or [], base=DEMO)
    folder = out or Path("runs") / (config.stem if config else "train")
    result = run_settings(settings, folder, resume, device, engine, quiet=as_json)
    if as_json:
        typer.echo(
            json.dumps(
                plain(summarise(result) | {"folder": str(folder), "privacy": result.privacy}),
                indent=2,
            )
        )
    else:
        Console().print("\n".join(summary_lines(result)), highlight=False)
    if result.ended == "interrupted":
        raise typer.Exit(143 if "SIGTERM" in result.message else 130)


def run_settings(
    settings: Settings,
    folder: Path | None,
    resume: bool = False,
    device: str = "cpu",
    engine: str = "simulator",
    quiet: bool = False,
    federation: Any = None,
) -> Result:
    """Load the data, train with a progress line, return the result."""
    federation = federation if federation is not None else load_federation(settings.data)
    setting = settings.setting(federation)
    with Progress(setting.label, setting.plan.rounds, quiet) as progress:
        return run(
            setting,
            federation,
            Hardware.on(pick_device(device)),
            engine=engine,
            optimum=settings.task.optimum,
            out=folder,
            resume=resume,
            listener=progress,
            config=settings.resolved(setting),
        )
