"""``dpscaffold export``: a trained model for other software."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscaffold.cli.chosen_model import ModuleOption, RunArgument, chosen_model

if TYPE_CHECKING:
    from dpscaffold.models.model import Model


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
    export_with(lambda: chosen_model(run, module), to, out, only_protected, as_json)


def export_with(
    read_model: Callable[[], Model], to: str, out: Path | None, only_protected: bool, as_json: bool
) -> None:
    """Export the model that ``read_model`` returns; the rest as in the command."""
    from dpscaffold.checks import choice
    from dpscaffold.models.export import FORMATS, export

    choice("--to", to, tuple(FORMATS))
    model = read_model()
    path = export(model, to, out or Path(FORMATS[to]), only_protected)
    if as_json:
        said = {"model": str(path), "format": to, "leaves_unprotected": list(model.unprotected)}
        typer.echo(json.dumps(said, indent=2))
        return
    for sentence in model.unprotected:
        typer.echo(f"leaves with the model, unprotected: {sentence}", err=True)
    typer.echo(f"{path}")
