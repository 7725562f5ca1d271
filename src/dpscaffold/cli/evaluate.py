"""``dpscaffold evaluate``: metrics of a model on labelled rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscaffold.cli.chosen_model import ModuleOption, chosen_model
from dpscaffold.cli.usage import refuse_given
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from dpscaffold.models.evaluate import Evaluation, FilesEvaluation
    from dpscaffold.models.model import Model


def evaluate_command(
    run: Annotated[Path, typer.Argument(help="Run folder, or folder of a saved model.")],
    data: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Labelled rows: .csv or .parquet files, a folder or a pattern. Default: the "
            "run's test records."
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Column with the true label. Default: as in training.")
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(help="Column with the site of each row. Default: as in training."),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Figure of confusion matrix and calibration to write (.png, .svg or .pdf)."
        ),
    ] = None,
    module: ModuleOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all metrics as JSON.")] = False,
) -> None:
    """Print metrics of a model, overall and per site. ε does not cover these numbers."""
    from dpscaffold.runs.written import plain

    if not data:
        why = "a column of a data file, and no file is named; name one, or leave the option out"
        refuse_given({"--label": label, "--site": site}, why)
    model = chosen_model(run, module)
    files = _of_files(model, data, label, site) if data else None
    found = files.whole if files else _of_one(run, model, data, label, site)
    if figure is not None:
        from dpscaffold.report.evaluation import draw_evaluation

        draw_evaluation(found, model.classes, figure)
    if as_json:
        typer.echo(json.dumps(plain((files or found).to_dict()), indent=2))
        return
    for note in files.notes if files else ():
        typer.echo(note, err=True)
    _show(found, model, figure)


def _show(found: Evaluation, model: Model, figure: Path | None) -> None:
    from rich.console import Console

    from dpscaffold.report.evaluation import evaluation_tables

    console = Console()
    for part in evaluation_tables(found, model.classes, console.width):
        console.print(part, highlight=False)
    if figure is not None:
        console.print(f"figure: {figure}", highlight=False)


def _of_files(
    model: Model, data: list[Path], label: str | None, site: str | None
) -> FilesEvaluation | None:
    """The rows of many files; None where a single one is meant."""
    from dpscaffold.data.tables.dialect import is_many
    from dpscaffold.models.evaluate import evaluate_files

    return evaluate_files(model, data, label, site) if len(data) > 1 or is_many(data[0]) else None


def _of_one(
    run: Path, model: Model, data: list[Path] | None, label: str | None, site: str | None
) -> Evaluation:
    """The rows of a file, or those that were held out."""
    from dpscaffold.models.evaluate import evaluate_file

    return evaluate_file(model, data[0], label, site) if data else _held_out(run, model)


def _held_out(run: Path, model: Model) -> Evaluation:
    """The records that the run's own data hold out."""
    from dpscaffold.config import load
    from dpscaffold.data.loading import load_federation
    from dpscaffold.models.evaluate import evaluate, score_held_out

    path = run / "config.toml"
    if not path.exists():
        raise BadInput(
            "not-a-run", f"{run} is no run folder, so it has no records held out; name a data file"
        )
    return evaluate(model, score_held_out(model, load_federation(load(path).data)))
