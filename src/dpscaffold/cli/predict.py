"""``dpscaffold predict``: predictions for new rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpscaffold.cli.chosen_model import ModuleOption, chosen_model
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from dpscaffold.models.predict import FilesPredicted, PredictionCounts


def predict_command(
    run: Annotated[Path, typer.Argument(help="Run folder, or folder of a saved model.")],
    data: Annotated[
        list[Path],
        typer.Argument(help="Rows to predict: .csv or .parquet files, a folder or a pattern."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write (.csv or .parquet), or a folder with one file per input file. "
            "Default: print CSV."
        ),
    ] = None,
    keep: Annotated[
        str, typer.Option(help="Columns to copy to the output, separated by commas.")
    ] = "",
    probabilities: Annotated[
        bool | None,
        typer.Option(
            "--probabilities/--no-probabilities",
            help="Write a column probability_NAME per class. Default: yes if there are classes.",
        ),
    ] = None,
    module: ModuleOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --out: print the number of predicted rows as JSON.")
    ] = False,
) -> None:
    """Write a prediction for every row, in order. Columns are found by name.

    Example: dpscaffold predict runs/clinics new.csv --out predictions.csv
    """
    from dpscaffold.data.tables.dialect import is_many
    from dpscaffold.models.predict import Answer, predict_file, predict_files

    if as_json and out is None:
        raise BadInput(
            "missing-argument",
            "--json is given without --out, and CSV is printed then; name a file",
        )
    model = chosen_model(run, module)
    kept = [name.strip() for name in keep.split(",") if name.strip()]
    target = sys.stdout.buffer if out is None else out
    columns = Answer(model, tuple(kept), probabilities).shape().names
    if len(data) > 1 or is_many(data[0]):
        _report(predict_files(model, data, target, kept, probabilities), out, columns, as_json)
    else:
        _report(predict_file(model, data[0], target, kept, probabilities), out, columns, as_json)


def _report(
    done: PredictionCounts | FilesPredicted, out: Path | None, columns: list[str], as_json: bool
) -> None:
    """Report how many rows were predicted, of one file or of many."""
    from dpscaffold.data.tables.rows import named
    from dpscaffold.models.predict import FilesPredicted

    files = done.files if isinstance(done, FilesPredicted) else ()
    if as_json and out is not None:
        found = _of_many(done, out, columns) if isinstance(done, FilesPredicted) else {}
        one = {"file": str(out)} | _counted(done) | {"columns": columns}
        typer.echo(json.dumps(found or one, indent=2))
        return
    for note in done.notes if isinstance(done, FilesPredicted) else ():
        typer.echo(note, err=True)
    if out is not None:
        count = f" of {len(files)} file{'' if len(files) == 1 else 's'}" if files else ""
        typer.echo(f"{done.rows} rows{count}: {out}", err=True)
    if done.incomplete:
        lacking = [f"{f.name} {f.predicted.incomplete}" for f in files if f.predicted.incomplete]
        where = f" ({named(lacking)})" if lacking else ""
        many = f"{done.incomplete} of {done.rows} rows have no prediction{where}"
        typer.echo(f"{many}: the model was trained without such records ({done.gap})", err=True)


def _of_many(done: FilesPredicted, out: Path, columns: list[str]) -> dict[str, Any]:
    """What JSON says of many files."""
    from dpscaffold.models.predict import FILE, is_folder

    entries = [
        {"file": file.name}
        | ({} if file.out is None else {"out": str(file.out)})
        | _counted(file.predicted)
        for file in done.files
    ]
    folder = is_folder(out)
    said = {"folder" if folder else "file": str(out)} | _counted(done)
    said |= {"columns": columns if folder else [FILE, *columns]}
    return said | {"files": entries, "left_aside": done.aside, "notes": done.notes}


def _counted(done: PredictionCounts | FilesPredicted) -> dict[str, Any]:
    return {"rows": done.rows, "without_prediction": done.incomplete, "why": done.gap}
