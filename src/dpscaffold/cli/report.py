"""``dpscaffold report``: a one-page report to share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders. Several are compared side by side.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write. Default: report.html, or MODEL_CARD.md with --markdown."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write a model card in Markdown instead of HTML.")
    ] = False,
    with_metrics: Annotated[
        bool,
        typer.Option(
            "--with-metrics",
            help="Also show metrics of private records for a run with secret noise, marked as "
            "outside ε.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as JSON.")
    ] = False,
) -> None:
    """Write a one-page HTML report: metrics, curves and the privacy statement.

    Example: dpscaffold report runs/clinics --out report.html
    """
    from dpscaffold.atomic import write_text
    from dpscaffold.errors import BadInput
    from dpscaffold.report.card import as_markdown
    from dpscaffold.report.html import as_html
    from dpscaffold.report.story import page_of

    page = page_of(runs, with_metrics)
    path = out or Path("MODEL_CARD.md" if markdown else "report.html")
    if path.is_dir():
        raise BadInput("not-a-file", f"--out is {path}, which is a folder; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, as_markdown(page) if markdown else as_html(page))
    typer.echo(json.dumps({"report": str(path)}, indent=2) if as_json else str(path))
