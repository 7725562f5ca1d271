"""``dpscaffold evaluate``: how good a trained model is on labelled rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscaffold.cli.chosen_model import ModuleOption, chosen_model

if TYPE_CHECKING:
    from dpscaffold.evaluation import Evaluation
    from dpscaffold.model import Model


def evaluate_command(
    run: Annotated[Path, typer.Argument(help="run folder, or a folder with a saved model")],
    data: Annotated[
        Path | None,
        typer.Argument(help="labelled rows (.csv, .parquet); default: the run's held-out records"),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="column of what is true; default: that of the training")
    ] = None,
    site: Annotated[
        str | None, typer.Option(help="column of whose each row is; default: that of the training")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="draw confusion and calibration (.png, .svg, .pdf)")
    ] = None,
    module: ModuleOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Metrics of the task, per site too, confusion and calibration; outside every guarantee."""
    from dpscaffold.books.written import plain
    from dpscaffold.evaluation import evaluate_file

    model = chosen_model(run, module)
    found = evaluate_file(model, data, label, site) if data else _held_out(run, model)
    if figure is not None:
        from dpscaffold.report.evaluation import draw_evaluation

        draw_evaluation(found, model.classes, figure)
    if as_json:
        typer.echo(json.dumps(plain(found.to_dict()), indent=2))
        return
    from rich.console import Console

    from dpscaffold.report.evaluation import evaluation_tables

    console = Console()
    for part in evaluation_tables(found, model.classes, console.width):
        console.print(part, highlight=False)
    if figure is not None:
        console.print(f"figure: {figure}", highlight=False)


def _held_out(run: Path, model: Model) -> Evaluation:
    """The records that the run's own data hold out."""
    from dpscaffold.config import load
    from dpscaffold.data.loading import load_federation
    from dpscaffold.errors import BadInput
    from dpscaffold.evaluation import evaluate, score_held_out

    path = run / "config.toml"
    if not path.exists():
        raise BadInput(f"{run} is no run folder, so it has no records held out; name a data file")
    return evaluate(model, score_held_out(model, load_federation(load(path).data)))
