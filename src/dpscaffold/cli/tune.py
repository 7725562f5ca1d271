"""``dpscaffold tune``: choose hyperparameters by cross-validation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscaffold.cli.folder import refuse_unwritable
from dpscaffold.cli.usage import interrupted

if TYPE_CHECKING:
    from rich.console import Console

    from dpscaffold.config import Configuration
    from dpscaffold.tuning.settings import TuneSettings
    from dpscaffold.tuning.tuning import TuningResult


def tune_command(
    config: Annotated[Path, typer.Argument(help="Configuration file (TOML) with a [tune] table.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override a key, for example tune.folds=3. Can be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result. Default: tuning/NAME.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:N or auto.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress.")] = False,
) -> None:
    """Choose hyperparameters by cross-validation within each user's training records.

    This reads private records outside ε, unless with tune.trials or [tune.public].
    """
    from rich.console import Console

    from dpscaffold.report.tuning import tuning_table, write_tuning
    from dpscaffold.runs.written import plain
    from dpscaffold.tuning.tuning import read_tuning

    folder = out or Path("tuning") / config.stem
    console = Console(highlight=False, soft_wrap=True)
    settings, table = read_tuning(config, set_ or [])
    refuse_unwritable(folder)
    if table.private:
        _tune_privately(settings, table, folder, device, console, as_json, quiet)
        return
    tuned = _tuned(settings, table, device, as_json or quiet, console)
    files = write_tuning(tuned, folder, " ".join(["dpscaffold", *sys.argv[1:]]))
    if as_json:
        scores = [vars(score) | {"mean": score.mean} for score in tuned.scores]
        found = {
            "best": tuned.best.values,
            "scores": scores,
            "privacy": tuned.privacy_note,
            "folder": str(folder),
        }
        typer.echo(json.dumps(plain(found), indent=2))
        return
    console.print(tuning_table(tuned, console.width))
    for key in tuned.at_edge:
        console.print(f"the best value of {key} is at the edge of the grid; widen it to be sure")
    console.print(tuned.privacy_note, markup=False)
    console.print(
        f"{folder} holds {', '.join(files)}; train with dpscaffold train {folder / 'best.toml'}"
    )


def _tuned(
    settings: Configuration, table: TuneSettings, device: str, silent: bool, console: Console
) -> TuningResult:
    """The scores of the grid."""
    from dpscaffold.engine.device import pick_device, stop_signals
    from dpscaffold.report.tuning_progress import Rounds
    from dpscaffold.training.events import StopRequested
    from dpscaffold.tuning.tuning import tune

    with stop_signals() as caught, Rounds(caught, quiet=silent) as watcher:
        try:
            return tune(settings, table, pick_device(device), watcher)
        except StopRequested as stopped:
            console.print(f"stopped by {stopped} before the grid was finished; nothing was written")
            raise interrupted(str(stopped)) from None


def _tune_privately(
    settings: Configuration,
    table: TuneSettings,
    folder: Path,
    device: str,
    console: Console,
    as_json: bool,
    quiet: bool,
) -> None:
    """Trials at random, the winner in a folder of its own, and what each adversary learns."""
    from dpscaffold.engine.device import pick_device, stop_signals
    from dpscaffold.privacy.numbers import digits_up, round_up
    from dpscaffold.report.private_tuning import (
        refuse_earlier,
        shown_winner,
        write_private_tuning,
    )
    from dpscaffold.report.tuning_progress import Rounds
    from dpscaffold.runs.written import plain
    from dpscaffold.tuning.private_tuning import StoppedTrials, tune_privately

    refuse_earlier(folder)
    with stop_signals() as caught, Rounds(caught, quiet=as_json or quiet) as watcher:
        try:
            tuned = tune_privately(settings, table, pick_device(device), watcher)
        except StoppedTrials as stopped:
            spent = stopped.spent
            most = round_up(spent.all_trials["server"])
            console.print(
                f"stopped by {stopped}: nothing was written, but the server has learnt from the "
                f"trials that ran: epsilon is at most {most} at delta "
                f"= {digits_up(spent.trials.delta)}, which adds to whatever comes next"
            )
            raise interrupted(str(stopped)) from None
    files = write_private_tuning(tuned, folder)
    if as_json:
        found = {
            "winner": tuned.released(),
            "server": tuned.seen_by_server(),
            "statement": tuned.privacy_note,
            "folder": str(folder),
        }
        typer.echo(json.dumps(plain(found), indent=2))
        return
    console.print(shown_winner(tuned), markup=False)
    console.print(tuned.privacy_note, markup=False)
    console.print(
        f"{folder} holds {', '.join(files)}: {folder / 'winner'} may be published, server.json "
        f"is the server's alone"
    )
