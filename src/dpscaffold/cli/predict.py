"""``dpscaffold predict``: what a trained model says of new rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dpscaffold.cli.chosen_model import ModuleOption, chosen_model


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
) -> None:
    """Predict for every row of a file, in its order; columns are found by name."""
    from dpscaffold.predicting import predict_file

    model = chosen_model(run, module)
    kept = [name.strip() for name in keep.split(",") if name.strip()]
    target = sys.stdout.buffer if out is None else out
    done = predict_file(model, data, target, kept, probabilities)
    if out is not None:
        typer.echo(f"{done.rows} rows: {out}", err=True)
    if done.incomplete:
        many = f"{done.incomplete} of {done.rows} rows have no prediction"
        typer.echo(f"{many}: the model was trained without such records ({done.gap})", err=True)
