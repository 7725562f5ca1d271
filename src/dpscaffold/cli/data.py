"""``dpscaffold data``: describe, prepare, download and list federations and datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpscaffold.cli import PLAIN
from dpscaffold.errors import BadInput, nearest

if TYPE_CHECKING:
    from dpscaffold.data import Description

app = typer.Typer(
    name="data",
    help="Describe, prepare and download data.",
    no_args_is_help=True,
    add_completion=False,
    **PLAIN,
)

Config = Annotated[
    Path | None,
    typer.Argument(help="Configuration file (TOML) with a [data] table.", show_default=False),
]
Source = Annotated[
    str | None,
    typer.Option(
        "--source",
        help="Instead of a file: a source by name, such as digits or mnist.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a key, for example data.users=20. Can be repeated.",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder of the datasets. Default: $DPSCAFFOLD_DATA."),
]
Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]

_SHADES = " ░▒▓█"
_MOST_USERS, _MOST_CLASSES = 20, 62
_FIGURES = (".png", ".svg", ".pdf")


@app.command("describe")
def describe_command(
    config: Config = None,
    source: Source = None,
    change: Changes = None,
    data_dir: Folder = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Figure to write (.png, .svg or .pdf).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show users, records, classes and heterogeneity of the data.

    The numbers are computed from private records without protection.
    """
    from dpscaffold.data import describe, load_federation

    if out is not None and out.suffix.lower() not in _FIGURES:
        raise BadInput("wrong-file-type", f"--out is {out}; a figure ends in {', '.join(_FIGURES)}")
    notes: list[str] = []
    description = describe(
        load_federation(_settings(config, source, change, data_dir), notes.append)
    )
    if out is not None:
        from dpscaffold.report.data_figures import save_description

        save_description(description, out)
    if as_json:
        typer.echo(json.dumps({**description.as_json(), "notes": notes}, ensure_ascii=False))
        return
    console = Console()
    console.print(summary_table(description))
    console.print(label_table(description))
    for sentence in (*notes, *description.preprocessing):
        console.print(f"· {sentence}", markup=False, highlight=False)
    if out is not None:
        console.print(f"figure: {out}", markup=False, highlight=False, soft_wrap=True)


@app.command("prepare")
def prepare_command(
    config: Config = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write.")] = None,
    source: Source = None,
    change: Changes = None,
    data_dir: Folder = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a prepared federation that already exists.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Prepare data once and store them in a folder, to be used as source = "saved"."""
    from dpscaffold.data import load_federation, prepare

    if out is None:
        raise BadInput("missing-argument", "--out is missing; name the folder to write")
    notes: list[str] = []
    folder = prepare(_settings(config, source, change, data_dir), out, overwrite, notes.append)
    federation = load_federation({"source": "saved", "path": str(folder)})
    if as_json:
        answer = {"folder": str(folder), "federation": str(federation), "notes": notes}
        typer.echo(json.dumps(answer, ensure_ascii=False))
        return
    console = Console()
    for note in notes:
        console.print(f"· {note}", markup=False, highlight=False)
    console.print(f"{federation}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f'use it with [data] source = "saved", path = "{folder}"', markup=False, soft_wrap=True
    )


@app.command("download")
def download_command(
    name: Annotated[
        str,
        typer.Argument(help="A dataset that 'data list' shows."),
    ],
    data_dir: Folder = None,
    mirror: Annotated[
        str | None, typer.Option("--mirror", help="Download from this address instead.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a published dataset and verify it."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TransferSpeedColumn,
    )

    from dpscaffold.data import download

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file)
            bars.update(tasks[file], completed=done, total=total)

        paths = download(name, data_dir, mirror, show)
    if as_json:
        typer.echo(json.dumps({"files": [str(path) for path in paths]}, ensure_ascii=False))
        return
    for path in paths:
        typer.echo(str(path))


@app.command("list")
def list_command(data_dir: Folder = None, as_json: Json = False) -> None:
    """List the published datasets, whether they are downloaded, and other [data] sources."""
    from dpscaffold.data import data_folder
    from dpscaffold.data.config import SOURCES
    from dpscaffold.data.sources.catalogue import CATALOGUE

    folder = data_folder(data_dir)
    rows: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "about": entry.about,
            "here": _is_here(folder / entry.name),
            "downloadable": bool(entry.places),
        }
        for entry in CATALOGUE.values()
    ]
    others = [name for name in SOURCES if name not in CATALOGUE]
    if as_json:
        typer.echo(
            json.dumps(
                {"data_dir": str(folder), "datasets": rows, "other_sources": others},
                ensure_ascii=False,
            )
        )
        return
    table = Table(title="Datasets", title_justify="left")
    for heading in ("name", "what it is", "here", "download"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            row["name"],
            row["about"],
            *("yes" if row[key] else "no" for key in ("here", "downloadable")),
        )
    console = Console()
    console.print(table)
    console.print(f"looked for in {folder}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"other sources: {', '.join(others)}", markup=False, highlight=False)


def _is_here(folder: Path) -> bool:
    """Whether a dataset's folder holds data files: IDX files or archives."""
    wanted = ("*ubyte*", "*.tar.gz", "gzip/*ubyte*")
    return any(
        path for pattern in wanted for path in folder.glob(pattern) if path.suffix != ".part"
    )


def _settings(
    config: Path | None, source: str | None, change: list[str] | None, data_dir: Path | None
) -> Any:
    """The [data] settings that a configuration and options come to."""
    from dpscaffold.config import load
    from dpscaffold.data.config import SOURCES, Images

    if config is not None and source is not None:
        raise BadInput(
            "conflicting-arguments", f"both {config} and --source {source} are given; give one"
        )
    changes = [] if source is None else [f"data.source={source}"]
    for item in change or []:
        if not item.startswith("data."):
            raise BadInput(
                "not-applicable",
                f"--set is {item!r}; only keys of [data] matter here, such as data.users=10",
            )
        changes.append(item)
    if source is not None and source not in SOURCES:
        raise BadInput(
            "unknown-source",
            f"--source is '{source}'{nearest(source, SOURCES)}; there are {', '.join(SOURCES)}",
        )
    settings = load(config, changes).data
    if data_dir is None:
        return settings
    if not isinstance(settings, Images):
        raise BadInput(
            "not-applicable",
            f"--data-dir is {data_dir}, the folder of published images, and the source is "
            f"'{settings.source}'; leave it out",
        )
    return settings.model_copy(update={"path": str(data_dir)})


#: What is counted where the target is no class.
_TARGETS = {
    "number": "a number, its tenths counted as labels below",
    "labels": "several labels; sets of them are counted as classes below, rare ones together",
}


def summary_table(description: Description) -> Table:
    """The federation in a dozen lines."""
    table = Table(title=description.title, title_justify="left", show_header=False)
    sizes = description.sizes
    score, iid = description.label_heterogeneity, description.label_heterogeneity_iid
    for name, value in (
        ("users", f"{description.users:,}"),
        ("train records", f"{description.train_records:,}"),
        ("test records", f"{description.test_records:,}"),
        ("features", f"{description.dimension:,}"),
        *(
            [("classes", f"{description.classes}")]
            if description.target == "class"
            else [("target", _TARGETS[description.target])]
        ),
        (
            "train records per user",
            f"{sizes['min']:g} to {sizes['max']:g}, median {sizes['median']:g}",
        ),
        ("classes per user", f"{description.classes_per_user:.1f} on average"),
        ("users with a single class", f"{description.single_class_users:,}"),
        (
            "label heterogeneity",
            f"{score:.3f} (i.i.d. users of these sizes: about {iid:.3f}; disjoint labels: near 1)",
        ),
    ):
        table.add_row(name, value)
    return table


def label_table(description: Description) -> Table:
    """Some users, evenly chosen, with their sizes and a shade for each label's share of their
    records."""
    from dpscaffold.report.fitting import shown_users

    chosen = shown_users(description.users, _MOST_USERS)
    title = "labels by user" + (
        f" ({len(chosen)} of {description.users:,})" if len(chosen) < description.users else ""
    )
    title += "; darkest: all of the user's records"
    table = Table(title=title, title_justify="left")
    table.add_column("user")
    table.add_column("train", justify="right")
    classes = min(description.classes, _MOST_CLASSES)
    table.add_column(f"labels 0 to {classes - 1}", no_wrap=True)
    for user in chosen:
        counts = description.counts[user]
        shares = counts[:classes] / counts.sum()
        # Square roots, so that a label with few records still shows.
        cells = "".join(_SHADES[min(4, int(4 * share**0.5 + 0.999))] for share in shares)
        table.add_row(Text(description.names[user]), f"{counts.sum():,}", cells)
    return table
