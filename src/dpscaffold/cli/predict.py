"""``dpscaffold predict``: what a trained model says of new rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dpscaffold.cli.chosen_model import ModuleOption, chosen_model
from dpscaffold.errors import BadInput


def predict_command(
    run: Annotated[Path, typer.Argument(help="run folder, or a folder with a saved model")],
    data: Annotated[Path, typer.Argument(help="raw rows: a .csv or .parquet file")],
    out: Annotated[
        Path | None,
        typer.Option(help=".csv or .parquet file to write; default: CSV is printed"),
    ] = None,
    keep: Annotated[
        str, typer.Option(help="columns of the rows to copy, with commas between them")
    ] = "",
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="a column for the probability of every class")
    ] = False,
    module: ModuleOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="with --out: print how many rows were predicted as JSON")
    ] = False,
) -> None:
    """Predict for every row of a file, in its order; columns are found by name."""
    from dpscaffold.predicting import predict_file

    if as_json and out is None:
        raise BadInput("--json is given without --out, and CSV is printed then; name a file")
    model = chosen_model(run, module)
    kept = [name.strip() for name in keep.split(",") if name.strip()]
    target = sys.stdout.buffer if out is None else out
    done = predict_file(model, data, target, kept, probabilities)
    if as_json:
        said = {"file": str(out), "rows": done.rows, "without_prediction": done.incomplete}
        typer.echo(json.dumps(said | {"why": done.gap}, indent=2))
        return
    if out is not None:
        typer.echo(f"{done.rows} rows: {out}", err=True)
    if done.incomplete:
        many = f"{done.incomplete} of {done.rows} rows have no prediction"
        typer.echo(f"{many}: the model was trained without such records ({done.gap})", err=True)
