"""Commands of ``dpscaffold site`` that use the model of a finished run. Nothing is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscaffold.cli import evaluate as evaluating
from dpscaffold.cli import export as exporting
from dpscaffold.cli import predict as predicting
from dpscaffold.cli.personalise import (
    EpsilonOption,
    NoisedOption,
    OutOption,
    StepSizeOption,
    StepsOption,
    StrengthOption,
    noise_of,
    parse_strength,
    show_noised,
    show_personal,
)
from dpscaffold.cli.site_runs import File
from dpscaffold.cli.usage import refuse_given

if TYPE_CHECKING:
    from dpscaffold.models.model import Model

Run = Annotated[str | None, typer.Option(help="Identifier of the run. Default: the latest.")]


def predict(
    file: Annotated[Path, typer.Argument(help="The file site.toml.")],
    data: predicting.RowsArgument,
    run: Run = None,
    out: predicting.OutOption = None,
    keep: predicting.KeepOption = "",
    probabilities: predicting.ProbabilitiesOption = None,
    as_json: predicting.CountsOption = False,
) -> None:
    """Predict new rows with the model of a finished run."""
    predicting.predict_with(lambda: _model(file, run), data, out, keep, probabilities, as_json)


def evaluate(
    file: File = Path("site.toml"),
    data: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Labelled rows: .csv or .parquet files, a folder or a pattern. Default: this "
            "site's records, as they are used in training."
        ),
    ] = None,
    run: Run = None,
    label: Annotated[
        str | None, typer.Option(help="Column with the true label. Default: as in the plan.")
    ] = None,
    figure: evaluating.FigureOption = None,
    personal: Annotated[
        bool,
        typer.Option(
            "--personal",
            help="Compare a local, the global and a personal model here. Nothing is sent.",
        ),
    ] = False,
    as_json: evaluating.MetricsOption = False,
) -> None:
    """Evaluate the model of a finished run on this site's records, or on other rows."""
    if personal:
        refuse_given({"--label": label, "--figure": figure}, "which --personal does not have")
        _show_joining(file, data or [], run, as_json)
        return
    if not data:
        why = "for the rows of a data file, and none is named; name one, or leave the option out"
        refuse_given({"--label": label, "--figure": figure}, why)
        _require()
        from dpscaffold.deployment.site.operation import evaluate_site

        own = evaluate_site(file, run)
        lines = [
            f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}"
            for name, value in own.items()
        ]
        typer.echo(json.dumps(own, indent=2) if as_json else "\n".join(lines))
        return
    from dpscaffold.models.evaluate import evaluate_files

    model = _model(file, run)
    found = evaluate_files(model, data, label, None)
    evaluating.show_evaluation(model, found, found.whole, figure, as_json)


def _show_joining(file: Path, data: list[Path], run: str | None, as_json: bool) -> None:
    """Whether joining helped this site."""
    _require()
    from rich.console import Console

    from dpscaffold.deployment.site.personal import after_run
    from dpscaffold.report.evaluation import joining_tables
    from dpscaffold.runs.written import plain

    compared = after_run(file, run).compared("auto", data)
    if as_json:
        typer.echo(json.dumps(plain(compared.to_dict()), indent=2))
        return
    console = Console()
    for part in joining_tables(compared, console.width):
        console.print(part, highlight=False)


def personalise(
    file: File = Path("site.toml"),
    run: Run = None,
    out: OutOption = Path("personal"),
    strength: StrengthOption = "auto",
    noised: NoisedOption = False,
    epsilon: EpsilonOption = None,
    steps: StepsOption = None,
    step_size: StepSizeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fit this site's own model near that of a finished run. Nothing is sent."""
    _require()
    from dpscaffold.deployment.site.personal import after_run
    from dpscaffold.models.personal import coverage

    noise, chosen = noise_of(noised, epsilon, steps, step_size), parse_strength(strength)
    here = after_run(file, run)
    if noise is not None:
        model = here.noised(noise.epsilon, noise.steps, noise.step_size, chosen)
        model.save(out)
        show_noised(model, out, as_json)
        return
    model, compared = here.personal(chosen), here.compared(chosen)
    model.save(out)
    show_personal(compared, out, as_json, coverage(model))


def export(
    file: File = Path("site.toml"),
    to: exporting.FormatOption = "onnx",
    run: Run = None,
    out: exporting.OutOption = None,
    as_json: exporting.WrittenOption = False,
) -> None:
    """Write the model of a finished run, including its preprocessing, for other software."""
    exporting.export_with(lambda: _model(file, run), to, out, False, as_json)
    typer.echo(
        "the exported model has no privacy statement: the server's run folder has that of all "
        "sites, and 'dpscaffold site ledger' has this site's ε",
        err=True,
    )


def _model(file: Path, run: str | None) -> Model:
    _require()
    from dpscaffold.deployment.site.model import stored_model

    return stored_model(file, run)


def _require() -> None:
    from dpscaffold.deployment.transports import flower

    flower.require()
