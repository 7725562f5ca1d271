"""``dpscaffold compare``: several runs in one table and one figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def compare_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders written by 'train --seeds'.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Figure to write (.png, .svg or .pdf). Default: comparison.png, or none with "
            "--json."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Compare runs: a table of their final metrics and a figure of their curves."""
    show(runs, out if out is not None or as_json else Path("comparison.png"), as_json)


def show(folders: list[Path], figure: Path | None, as_json: bool = False) -> None:
    """Print the table and write the figure."""
    from rich.console import Console

    from dpscaffold.report.runs import comparison_table, draw_comparison, epsilon_note, read_run

    runs = [read_run(folder) for folder in folders]
    if figure is not None:
        draw_comparison(runs, figure)
    if as_json:
        shown = None if figure is None else str(figure)
        typer.echo(json.dumps({"runs": [run.row() for run in runs], "figure": shown}, indent=2))
        return
    console = Console()
    console.print(comparison_table(runs, console.width))
    note = epsilon_note(runs)
    if note:
        console.print(note, highlight=False)
    if figure is not None:
        console.print(f"figure: {figure}", highlight=False, soft_wrap=True)
