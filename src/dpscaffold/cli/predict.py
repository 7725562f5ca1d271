"""``dpscaffold predict``: what a trained model says of new rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpscaffold.cli.chosen_model import ModuleOption, chosen_model
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from dpscaffold.models.predict import PredictionCounts
    from dpscaffold.models.predict_files import FilesPredicted


def predict_command(
    run: Annotated[Path, typer.Argument(help="run folder, or a folder with a saved model")],
    data: Annotated[
        list[Path],
        typer.Argument(help="raw rows: .csv or .parquet files, a folder or pattern of such files"),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help=".csv or .parquet file to write, or for many files a folder with one of the same "
            "name for each; default: CSV is printed"
        ),
    ] = None,
    keep: Annotated[
        str, typer.Option(help="columns of the rows to copy, with commas between them")
    ] = "",
    probabilities: Annotated[
        bool | None,
        typer.Option(
            "--probabilities/--no-probabilities",
            help="one column probability_NAME per class; written by default where there are "
            "classes",
        ),
    ] = None,
    module: ModuleOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="with --out: print how many rows were predicted as JSON")
    ] = False,
) -> None:
    """Predict for every row of files, in order; columns are found by name."""
    from dpscaffold.data.tables.files import is_many
    from dpscaffold.models.predict import Answer, predict_file
    from dpscaffold.models.predict_files import predict_files

    if as_json and out is None:
        raise BadInput("--json is given without --out, and CSV is printed then; name a file")
    model = chosen_model(run, module)
    kept = [name.strip() for name in keep.split(",") if name.strip()]
    target = sys.stdout.buffer if out is None else out
    columns = Answer(model, tuple(kept), probabilities).shape().names
    if len(data) > 1 or is_many(data[0]):
        many = predict_files(model, data, target, kept, probabilities)
        _tell_files(many, out, columns, as_json)
    else:
        one = predict_file(model, data[0], target, kept, probabilities)
        _tell(one, out, columns, as_json)


def _tell(done: PredictionCounts, out: Path | None, columns: list[str], as_json: bool) -> None:
    """What became of a file."""
    if as_json:
        written = {"file": str(out)} | _counted(done) | {"columns": columns}
        typer.echo(json.dumps(written, indent=2))
        return
    if out is not None:
        typer.echo(f"{done.rows} rows: {out}", err=True)
    _tell_gaps(done, "")


def _tell_files(done: FilesPredicted, out: Path | None, columns: list[str], as_json: bool) -> None:
    """What became of many files."""
    from dpscaffold.data.tables.rowfiles import named
    from dpscaffold.models.predict_files import FILE, is_folder

    if as_json and out is not None:
        entries = [
            {"file": file.name}
            | ({} if file.out is None else {"out": str(file.out)})
            | _counted(file.predicted)
            for file in done.files
        ]
        written = columns if is_folder(out) else [FILE, *columns]
        said = {"folder" if is_folder(out) else "file": str(out)} | _counted(done)
        said |= {"columns": written}
        more = {"files": entries, "left_aside": done.aside, "notes": done.notes}
        typer.echo(json.dumps(said | more, indent=2))
        return
    for note in done.notes:
        typer.echo(note, err=True)
    if out is not None:
        files = "1 file" if len(done.files) == 1 else f"{len(done.files)} files"
        typer.echo(f"{done.rows} rows of {files}: {out}", err=True)
    lacking = [f"{f.name} {f.predicted.incomplete}" for f in done.files if f.predicted.incomplete]
    _tell_gaps(done, f" ({named(lacking)})")


def _counted(done: PredictionCounts | FilesPredicted) -> dict[str, Any]:
    return {"rows": done.rows, "without_prediction": done.incomplete, "why": done.gap}


def _tell_gaps(done: PredictionCounts | FilesPredicted, where: str) -> None:
    if done.incomplete:
        many = f"{done.incomplete} of {done.rows} rows have no prediction{where}"
        typer.echo(f"{many}: the model was trained without such records ({done.gap})", err=True)
