"""``dpscaffold personalise``: a model for one site, from a common model and the site's table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscaffold.cli.chosen_model import ModuleOption, RunArgument, chosen_model
from dpscaffold.cli.usage import refuse_given
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from dpscaffold.models.model import Model
    from dpscaffold.models.personal import SitesCompared, Strength
    from dpscaffold.tasks.near import SiteRows


OutOption = Annotated[Path, typer.Option(help="Folder of the personal model to write.")]
StrengthOption = Annotated[
    str,
    typer.Option(
        help="How strongly the model is kept near the common one: a number, or 'auto' to "
        "choose it by rows that are held out."
    ),
]
NoisedOption = Annotated[
    bool,
    typer.Option(
        "--noised",
        help="Noise the steps, so that the model may leave at the composed ε. Needs --epsilon.",
    ),
]
EpsilonOption = Annotated[
    float | None, typer.Option(help="With --noised: ε of the steps, which is added to the run's.")
]
StepsOption = Annotated[
    int | None, typer.Option(help="With --noised: number of steps. Default: 50.")
]
StepSizeOption = Annotated[
    float | None, typer.Option(help="With --noised: size of a step. Default: 0.5.")
]


@dataclass(frozen=True)
class Noise:
    """What ``--noised`` is asked for with."""

    epsilon: float
    steps: int
    step_size: float


def personalise_command(
    run: RunArgument,
    data: Annotated[
        Path, typer.Argument(help="The site's labelled rows: a .csv or .parquet file.")
    ],
    out: OutOption = Path("personal"),
    site: Annotated[
        str | None, typer.Option(help="Name of the site. Default: the name of the file.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Column with the true label. Default: as in training.")
    ] = None,
    strength: StrengthOption = "auto",
    noised: NoisedOption = False,
    epsilon: EpsilonOption = None,
    steps: StepsOption = None,
    step_size: StepSizeOption = None,
    module: ModuleOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fit a model to one site's rows, near the common model. ε covers it only with --noised."""
    from dpscaffold.models.personal import compare_rows, personal_model, read_site, split

    noise = noise_of(noised, epsilon, steps, step_size)
    chosen, name = parse_strength(strength), site or data.stem
    model = chosen_model(run, module)
    if model.origin.personal is not None:
        raise BadInput(
            "not-a-common-model",
            f"{run} holds the personal model of '{model.origin.personal}'; name the common model "
            f"that it was made from",
        )
    rows = read_site(model, data, label)
    if noise is not None:
        personal = _noised(model, rows, run, name, chosen, noise)
        personal.save(out)
        show_noised(personal, out, as_json)
        return
    fitted, tested = split(rows)
    compared = compare_rows(model, [fitted], [tested], [name], chosen)
    personal_model(model, rows, name, chosen).save(out)
    show_personal(compared, out, as_json)


def show_personal(compared: SitesCompared, out: Path, as_json: bool, covered: str = "") -> None:
    """Print the three numbers of one site, where its model is, and what covers it."""
    from dpscaffold.models.personal import NOT_COVERED
    from dpscaffold.runs.written import plain

    covered = covered or NOT_COVERED
    if as_json:
        found = {**compared.to_dict(), "model": str(out), "note": covered}
        typer.echo(json.dumps(plain(found), indent=2))
        return
    one = compared.sites[0]
    typer.echo(
        f"{one.site}: {compared.metric.replace('_', ' ')} on {one.rows} held-out rows: local "
        f"{one.local:.3f}, global {one.common:.3f}, personal {one.personal:.3f}"
    )
    typer.echo(one.sentence)
    typer.echo(f"personal model: {out}")
    typer.echo(covered)


def show_noised(model: Model, out: Path, as_json: bool) -> None:
    """Print where a noised personal model is, and its composed ε."""
    from dpscaffold.models.personal import coverage
    from dpscaffold.runs.written import plain

    said = model.privacy
    assert said is not None
    if as_json:
        found = {
            "site": model.origin.personal,
            "model": str(out),
            "epsilon": said.server.epsilon,
            "delta": said.delta,
            "quote": said.quote,
            "note": coverage(model),
        }
        typer.echo(json.dumps(plain(found), indent=2))
        return
    typer.echo(f"personal model: {out}")
    typer.echo(said.quote)
    typer.echo(coverage(model))


def _noised(
    model: Model, rows: SiteRows, run: Path, site: str, strength: Strength, noise: Noise
) -> Model:
    """The model of noised steps; the journal of the common model has them before they are taken."""
    from dpscaffold.models.noised import composed, composed_personal, noised_fit, steps_after

    _refuse_budget_file(run)
    said = model.privacy
    if said is None or not said.guarantee or said.run is None:
        raise BadInput(
            "no-privacy",
            f"{run} has no guarantee, so noise on top gives none; leave --noised out and keep the "
            f"model at the site",
        )
    given = steps_after(
        said.run, len(rows), noise.epsilon, steps=noise.steps, step_size=noise.step_size
    )
    stated = composed(model, given, run, site)
    fit = noised_fit(model.task, rows, model.params, given, strength)
    return composed_personal(model, fit, site, stated)


def _refuse_budget_file(run: Path) -> None:
    """A budget file counts all that its records spend, and this would not be in it."""
    from dpscaffold.config import load

    config = run / "config.toml"
    settings = load(config) if config.exists() else None
    if settings is not None and settings.privacy is not None and settings.privacy.budget_file:
        raise BadInput(
            "not-applicable",
            f"--noised is given, and {run} spends from {settings.privacy.budget_file}, in which "
            f"the steps would not be counted; leave --noised out and keep the model at the site",
        )


def noise_of(
    noised: bool, epsilon: float | None, steps: int | None, step_size: float | None
) -> Noise | None:
    """The options of ``--noised``; None without it."""
    if not noised:
        given = {"--epsilon": epsilon, "--steps": steps, "--step-size": step_size}
        refuse_given(given, "which is for --noised; give that too, or leave it out")
        return None
    if epsilon is None:
        raise BadInput(
            "missing-argument",
            "--noised is given without --epsilon; say what the steps may spend, such as 1",
        )
    return Noise(epsilon, 50 if steps is None else steps, 0.5 if step_size is None else step_size)


def parse_strength(text: str) -> Strength:
    """``--strength`` as a number or ``"auto"``."""
    if text == "auto":
        return "auto"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise BadInput("out-of-range", f"--strength is {text}; give a number, 0 or more, or 'auto'")
    return value
