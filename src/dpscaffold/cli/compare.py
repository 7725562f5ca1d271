"""``dpscaffold compare``: several runs in one table and one figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dpscaffold.report.runs import comparison_table, draw_comparison, epsilon_note, read_run


def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="run folders")],
    out: Annotated[
        Path, typer.Option(help="where to write the figure (.png, .svg or .pdf)")
    ] = Path("comparison.png"),
    as_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
) -> None:
    """Compare runs: a table of their final metrics, and a figure of their course."""
    show(runs, out, as_json)


def show(folders: list[Path], figure: Path, as_json: bool = False) -> None:
    """Print the table and write the figure."""
    runs = [read_run(folder) for folder in folders]
    draw_comparison(runs, figure)
    if as_json:
        typer.echo(
            json.dumps({"runs": [run.row() for run in runs], "figure": str(figure)}, indent=2)
        )
        return
    console = Console()
    console.print(comparison_table(runs))
    note = epsilon_note(runs)
    if note:
        console.print(note, highlight=False)
    console.print(f"figure: {figure}", highlight=False)
