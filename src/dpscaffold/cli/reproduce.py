"""``dpscaffold reproduce``: the paper's figures and tables, one command each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dpscaffold.cli.usage import interrupted, refuse_given
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    import torch

    from dpscaffold.paper.definition import Experiment
    from dpscaffold.paper.reproduce import ReproduceRequest


def reproduce_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of an experiment (see --list), or all.",
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the experiments and their sizes.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds. Default: 3, as in the paper.")
    ] = None,
    scale: Annotated[
        float, typer.Option(help="Run a smaller version with this share of the users and rounds.")
    ] = 1.0,
    device: Annotated[
        str | None, typer.Option(help="Device: cpu (default), cuda, cuda:N or auto.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the results, with one subfolder per experiment. Default: reproduction."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            help="Folder of the datasets. Default: $DPSCAFFOLD_DATA.",
        ),
    ] = None,
    row: Annotated[
        list[str] | None, typer.Option(help="Only this row of the figure or table.")
    ] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the list, or what was written, as JSON.")
    ] = False,
) -> None:
    """Reproduce a figure or table of the paper; finished runs are not run again."""
    from dpscaffold.engine.device import pick_device
    from dpscaffold.paper.definition import experiment, names
    from dpscaffold.paper.reproduce import ReproduceRequest

    rows, place = tuple(row or ()), out or Path("reproduction")
    if list_ or not any(experiment(one).reads_files for one in names(name or "all", rows)):
        refuse_given({"--data-dir": data_dir}, "and no file would be read; leave it out")
    request = ReproduceRequest(place, seeds, scale, device or "cpu", rows, data_dir)
    _refuse_contradictions(name, list_, rows)
    if list_:
        unread: dict[str, object] = {"--quiet": quiet, "--out": out, "--device": device}
        refuse_given(unread, "which the list does not depend on; leave it out")
        _list(request, as_json)
        return
    if name is None:
        raise BadInput(
            "missing-argument",
            "no experiment was named; give one of dpscaffold reproduce --list, or all",
        )
    chosen = [experiment(one) for one in names(name, rows)]
    device_used = pick_device(request.device)
    written = {one.name: _reproduce(one, request, device_used, quiet, as_json) for one in chosen}
    if as_json:
        folders = {one: str(request.out / one) for one in written}
        typer.echo(json.dumps({"folders": folders, "files": written}, indent=2))


def _refuse_contradictions(name: str | None, list_: bool, rows: tuple[str, ...]) -> None:
    if rows and (list_ or name == "all"):
        raise BadInput(
            "not-applicable",
            f"--row is {rows[0]!r}, a row of one experiment; name that experiment instead of all "
            f"or --list",
        )
    if list_ and name is not None:
        raise BadInput(
            "conflicting-arguments",
            f"--list is given together with {name!r}; it lists all, give one or the other",
        )


def _list(request: ReproduceRequest, as_json: bool) -> None:
    from dpscaffold.paper.listing import as_table, listing

    rows = listing(request)
    Console().print_json(data=rows) if as_json else Console().print(as_table(rows))


def _reproduce(
    chosen: Experiment, request: ReproduceRequest, device: torch.device, quiet: bool, silent: bool
) -> list[str]:
    from dpscaffold.engine.device import stop_signals
    from dpscaffold.paper.progress import ReproductionProgress
    from dpscaffold.paper.reproduce import reproduce
    from dpscaffold.training.events import StopRequested

    console = Console(highlight=False, soft_wrap=True, stderr=silent)
    with stop_signals() as caught:

        @contextmanager
        def show(title: str, work: float) -> Iterator[ReproductionProgress]:
            with ReproductionProgress(title, work, caught, quiet or silent) as bars:
                yield bars

        try:
            files = reproduce(chosen, request, device, show)
        except StopRequested as stopped:
            console.print(
                f"{chosen.name}: stopped by {stopped}; what is finished is kept, the same command "
                f"continues it"
            )
            raise interrupted(str(stopped)) from None
    if not silent:
        console.print(f"{chosen.name}: {request.out / chosen.name} holds {', '.join(files)}")
    return files
