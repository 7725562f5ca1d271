"""``dpscaffold report``: a one-page report to share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpscaffold.errors import BadInput


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders. Several are compared side by side.")
    ],
    out: Annotated[
        Path, typer.Option(help="The page to write; its Markdown is written next to it.")
    ] = Path("report.html"),
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
    """Write a one-page report as HTML and as Markdown: metrics, curves and the privacy statement.

    Example: dpscaffold report runs/clinics --out report.html
    """
    from dpscaffold.atomic import write_text
    from dpscaffold.report.card import as_markdown
    from dpscaffold.report.html import as_html
    from dpscaffold.report.story import page_of

    html, markdown = _both(out)
    page = page_of(runs, with_metrics)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(html, as_html(page))
    write_text(markdown, as_markdown(page))
    if as_json:
        typer.echo(json.dumps({"report": str(html), "markdown": str(markdown)}, indent=2))
        return
    typer.echo(f"{html}\n{markdown}")


def _both(out: Path) -> tuple[Path, Path]:
    """Where the page and its Markdown go."""
    if out.suffix not in (".html", ".htm"):
        raise BadInput("wrong-file-type", f"--out is {out}; name a .html file")
    found = out, out.with_suffix(".md")
    for path in found:
        if path.is_dir():
            raise BadInput("not-a-file", f"{path} is a folder; choose another name with --out")
    return found
