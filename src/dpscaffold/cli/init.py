"""``dpscaffold init``: look at data and draft a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from dpscaffold.data.drafts.profile import TableProfile


#: How many rows are looked at by default.
ROWS = 2000


def init_command(
    data: Annotated[
        Path,
        typer.Argument(help="A table (CSV or Parquet), or a folder with one file per site."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Configuration file to write. Default: NAME.toml.")
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            help="Column to predict. Several columns of 0 and 1, separated by commas, make "
            "several labels."
        ),
    ] = None,
    user: Annotated[str | None, typer.Option(help="Column with the site of each record.")] = None,
    epsilon: Annotated[float, typer.Option(help="The ε to spend, against the server.")] = 1.0,
    rows: Annotated[
        int | None, typer.Option(help="Number of rows to look at. Default: 2000.")
    ] = None,
    release: Annotated[
        bool,
        typer.Option("--release", help="Draft a release, with blanks for what must be public."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a configuration that already exists.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the guesses as JSON.")] = False,
) -> None:
    """Look at data and draft a commented configuration.

    The draft is made by looking at private data, which ε does not cover.

    Example: dpscaffold init clinics --label readmitted --epsilon 2
    """
    from dpscaffold.atomic import write_text
    from dpscaffold.data.drafts.draft import OUTSIDE, draft
    from dpscaffold.data.drafts.profile import look

    _check_numbers(epsilon, rows)
    target = _target(data, out, force)
    found = look(data, label, user, rows or ROWS)
    text = draft(found, epsilon, release)
    blanks = _check(text)
    write_text(target, text)
    for note in found.notes:
        typer.echo(note, err=True)
    if as_json:
        guessed = [vars(column) for column in found.columns]
        said = {"configuration": str(target), "columns": guessed, "outside": OUTSIDE}
        typer.echo(json.dumps(said, indent=2))
        return
    _tell_columns(found)
    typer.echo(OUTSIDE)
    fill = f"fill in {', '.join(blanks)}, check the rest" if blanks else "check it"
    option = " --release" if release else ""
    typer.echo(f"{target} is written; {fill}, then run dpscaffold train {target}{option}")


def _target(data: Path, out: Path | None, force: bool) -> Path:
    """The file to write, which must not be there unless ``force``."""
    target = out or Path(f"{data.stem.strip('*?') or data.parent.name or 'data'}.toml")
    if target.exists() and not force:
        raise BadInput(
            "file-exists", f"{target} is there already; name another with --out, or add --force"
        )
    return target


def _check_numbers(epsilon: float, rows: int | None) -> None:
    if not 0 < epsilon < float("inf"):
        raise BadInput("out-of-range", f"--epsilon is {epsilon}; give a number above 0")
    if rows is not None and rows < 20:
        raise BadInput("out-of-range", f"--rows is {rows}; look at 20 or more")


def _tell_columns(found: TableProfile) -> None:
    """The role of every column and why; a site that dominates the others is named."""
    from dpscaffold.data.drafts.draft import loud_site

    for column in found.columns:
        typer.echo(f"{column.name or '(a column without a name)'}: {column.role} ({column.why})")
    loud = loud_site(found.sizes)
    if loud:
        typer.echo(f'{loud}; weighting = "records" keeps it quiet')


def _check(text: str) -> list[str]:
    """The blanks of what was drafted; without them it must be a configuration."""
    import tomllib

    from dpscaffold.config import parse
    from dpscaffold.config.reading import blanks_in

    tables = tomllib.loads(text)
    blanks = blanks_in(tables)
    if not blanks:
        parse(tables)
    return blanks
