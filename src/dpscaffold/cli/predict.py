"""``dpscaffold predict``: predictions for new rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpscaffold.cli.chosen_model import ModuleOption, RunArgument, chosen_model
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from dpscaffold.models.model import Model
    from dpscaffold.models.predict import FilesPredicted, PredictionCounts


RowsArgument = Annotated[
    list[Path],
    typer.Argument(help="Rows to predict: .csv or .parquet files, a folder or a pattern."),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="File to write (.csv or .parquet), with a column 'file' if several are read. "
        "Default: print CSV."
    ),
]
KeepOption = Annotated[
    str, typer.Option(help="Columns to copy to the output, separated by commas.")
]
ProbabilitiesOption = Annotated[
    bool | None,
    typer.Option(
        "--probabilities/--no-probabilities",
        help="Write a column probability_NAME per class. Default: yes if there are classes.",
    ),
]
CountsOption = Annotated[
    bool, typer.Option("--json", help="With --out: print the number of predicted rows as JSON.")
]


def predict_command(
    run: RunArgument,
    data: RowsArgument,
    out: OutOption = None,
    keep: KeepOption = "",
    probabilities: ProbabilitiesOption = None,
    module: ModuleOption = None,
    as_json: CountsOption = False,
) -> None:
    """Write a prediction for every row, in order. Columns are found by name.

    Example: dpscaffold predict runs/clinics new.csv --out predictions.csv
    """
    from dpscaffold.models.predict import is_many_files, predict_files

    if as_json and out is None:
        raise BadInput(
            "missing-argument",
            "--json is given without --out, and CSV is printed then; name a file",
        )
    model = chosen_model(run, module)
    _say_coverage(model)
    kept = [name.strip() for name in keep.split(",") if name.strip()]
    target = sys.stdout.buffer if out is None else out
    rows = data[0] if len(data) == 1 else data
    done = predict_files(model, rows, target, kept, probabilities)
    if as_json and out is not None:
        said = {"file": str(out)} | _counted(done) | {"columns": done.columns} | _by_file(done)
        typer.echo(json.dumps(said, indent=2))
    else:
        _report(done, out, is_many_files(rows))


def _say_coverage(model: Model) -> None:
    """Say whether ε covers the answers of a personal model."""
    if model.origin.personal is not None:
        from dpscaffold.models.personal import coverage

        typer.echo(coverage(model), err=True)


def _report(done: FilesPredicted, out: Path | None, many: bool) -> None:
    """Report how many rows were predicted; of several files, in which rows had no prediction."""
    from dpscaffold.data.tables.rows import named

    files = done.files
    for note in done.notes:
        typer.echo(note, err=True)
    if out is not None:
        count = f" of {len(files)} file{'' if len(files) == 1 else 's'}" if many else ""
        typer.echo(f"{done.rows} rows{count}: {out}", err=True)
    if done.incomplete:
        lacking = [f"{f.name} {f.predicted.incomplete}" for f in files if f.predicted.incomplete]
        where = f" ({named(lacking)})" if many else ""
        count = f"{done.incomplete} of {done.rows} rows have no prediction{where}"
        why = f"the model was trained without such records ({done.reason})"
        typer.echo(f"{count}: {why}", err=True)


def _by_file(done: FilesPredicted) -> dict[str, Any]:
    """The JSON of each file."""
    files = [{"file": file.name} | _counted(file.predicted) for file in done.files]
    return {"files": files, "skipped": done.skipped, "notes": done.notes}


def _counted(done: PredictionCounts | FilesPredicted) -> dict[str, Any]:
    return {"rows": done.rows, "without_prediction": done.incomplete, "why": done.reason}
