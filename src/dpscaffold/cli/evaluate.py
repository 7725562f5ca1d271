"""``dpscaffold evaluate``: metrics of a model on labelled rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscaffold.cli.chosen_model import ModuleOption, RunArgument, chosen_model
from dpscaffold.cli.usage import refuse_given
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from dpscaffold.models.evaluate import Evaluation, FilesEvaluation
    from dpscaffold.models.model import Model
    from dpscaffold.models.personal import SitesCompared


FigureOption = Annotated[
    Path | None,
    typer.Option(help="Figure of confusion matrix and calibration to write (.png, .svg or .pdf)."),
]
MetricsOption = Annotated[bool, typer.Option("--json", help="Print all metrics as JSON.")]


def evaluate_command(
    run: RunArgument,
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
    figure: FigureOption = None,
    personal: Annotated[
        bool,
        typer.Option(
            "--personal",
            help="Compare a local, the global and a personal model at every site. Default: where "
            "the configuration has [personal].",
        ),
    ] = False,
    module: ModuleOption = None,
    as_json: MetricsOption = False,
) -> None:
    """Print metrics of a model, overall and per site. ε does not cover these numbers."""
    from dpscaffold.models.evaluate import evaluate_files

    _refuse_together(data, label, site, personal)
    model = chosen_model(run, module)
    files = evaluate_files(model, data, label, site) if data else None
    joining = None if data else _joining(run, model, personal)
    found = noted(files.whole if files else _held_out(run, model), model)
    show_evaluation(model, files, found, figure, as_json, joining)


def show_evaluation(
    model: Model,
    files: FilesEvaluation | None,
    found: Evaluation,
    figure: Path | None,
    as_json: bool,
    joining: SitesCompared | None = None,
) -> None:
    """Print metrics: tables for people, or JSON."""
    from dpscaffold.runs.written import plain

    if figure is not None:
        from dpscaffold.report.evaluation import draw_evaluation

        draw_evaluation(found, model.classes, figure, joining)
    if as_json:
        said = (replace(files, whole=found) if files else found).to_dict()
        more = {} if joining is None else {"joining": joining.to_dict()}
        typer.echo(json.dumps(plain({**said, **more}), indent=2))
        return
    for note in files.notes if files else ():
        typer.echo(note, err=True)
    _show(found, model, figure, joining)


def _refuse_together(
    data: list[Path] | None, label: str | None, site: str | None, personal: bool
) -> None:
    """Refuse options that mean nothing without files, or with them."""
    if not data:
        why = "a column of a data file, and no file is named; name one, or leave the option out"
        refuse_given({"--label": label, "--site": site}, why)
    elif personal:
        raise BadInput(
            "not-applicable",
            "--personal compares models on the records of the run, and files are named; leave them "
            "out, or use 'dpscaffold personalise' for the table of one site",
        )


def noted(found: Evaluation, model: Model) -> Evaluation:
    """The evaluation, which says so where the model is a personal one."""
    from dpscaffold.models.personal import coverage

    personal = model.origin.personal is not None
    return replace(found, note=f"{coverage(model)} {found.note}") if personal else found


def _show(
    found: Evaluation, model: Model, figure: Path | None, joining: SitesCompared | None
) -> None:
    from rich.console import Console

    from dpscaffold.report.evaluation import evaluation_tables, joining_tables

    console = Console()
    parts = [*evaluation_tables(found, model.classes, console.width)]
    if joining is not None:
        parts += joining_tables(joining, console.width)
    for part in parts:
        console.print(part, highlight=False)
    if figure is not None:
        console.print(f"figure: {figure}", highlight=False)


def _joining(run: Path, model: Model, asked: bool) -> SitesCompared | None:
    """The three numbers of every site, where they are asked for."""
    from dpscaffold.config import load
    from dpscaffold.data.loading import load_federation
    from dpscaffold.models.personal import compare_sites, stored_models

    settings = load(_config_of(run))
    if not asked and settings.personal is None:
        return None
    federation, chosen = load_federation(settings.data), settings.personal
    if chosen is not None and chosen.kind == "mean-regularised":
        own = stored_models(run, federation.users, model.params)
        return compare_sites(model, federation, own=own)
    return compare_sites(model, federation, "auto" if chosen is None else chosen.strength)


def _held_out(run: Path, model: Model) -> Evaluation:
    """The records that the run's own data hold out."""
    from dpscaffold.config import load
    from dpscaffold.data.loading import load_federation
    from dpscaffold.models.evaluate import evaluate, score_held_out

    return evaluate(model, score_held_out(model, load_federation(load(_config_of(run)).data)))


def _config_of(run: Path) -> Path:
    path = run / "config.toml"
    if not path.exists():
        raise BadInput(
            "not-a-run", f"{run} is no run folder, so it has no records held out; name a data file"
        )
    return path
