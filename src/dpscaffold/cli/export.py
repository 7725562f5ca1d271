"""``dpscaffold export``: a trained model for other software."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscaffold.cli.chosen_model import ModuleOption, RunArgument, chosen_model

if TYPE_CHECKING:
    pass


FormatOption = Annotated[
    str, typer.Option(help="Format: onnx, torch (.pt2) or safetensors (a folder).")
]
OutOption = Annotated[
    Path | None, typer.Option(help="File or folder to write. Default: in the working folder.")
]
WrittenOption = Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")]


def export_command(
    run: RunArgument,
    to: FormatOption,
    out: OutOption = None,
    only_protected: Annotated[
        bool,
        typer.Option(
            "--only-protected",
            help="Refuse a model that is not completely covered by a privacy guarantee.",
        ),
    ] = False,
    module: ModuleOption = None,
    as_json: WrittenOption = False,
) -> None:
    """Write a trained model, including its preprocessing, for other software."""
    from dpscaffold.checks import choice
    from dpscaffold.models.export import FORMATS, export

    choice("--to", to, tuple(FORMATS))
    model = chosen_model(run, module)
    path = export(model, to, out or Path(FORMATS[to]), only_protected)
    if as_json:
        said = {"model": str(path), "format": to, "leaves_unprotected": list(model.unprotected)}
        typer.echo(json.dumps(said, indent=2))
        return
    for sentence in model.unprotected:
        typer.echo(f"leaves with the model, unprotected: {sentence}", err=True)
    typer.echo(f"{path}")
