"""The model that ``predict``, ``evaluate`` and ``export`` are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dpscaffold.models.model import Model

RunArgument = Annotated[Path, typer.Argument(help="Run folder, or folder of a saved model.")]
ModuleOption = Annotated[
    str | None,
    typer.Option(
        "--module",
        help="For a model of your own module: my_file:factory. This runs that file.",
    ),
]


def chosen_model(run: Path, module: str | None) -> Model:
    """The model of a run folder or of a folder of its own.

    Reading one runs no code. The code of your own module is not stored with it, so it is run only
    where it is named; the file is looked for where the run's configuration lay, in the working
    folder, then among what Python can import.
    """
    from dpscaffold.config.reading import home
    from dpscaffold.config.task import own_module
    from dpscaffold.models.loading import load_model

    if module is None:
        return load_model(run)
    return load_model(run, own_module(module, home(run / "config.toml"), "--module"))
