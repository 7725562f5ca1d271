"""``dpscaffold personalise``: a model for one site, from a common model and the site's table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscaffold.cli.chosen_model import ModuleOption, RunArgument, chosen_model
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from dpscaffold.models.personal import SitesCompared, Strength


OutOption = Annotated[Path, typer.Option(help="Folder of the personal model to write.")]
StrengthOption = Annotated[
    str,
    typer.Option(
        help="How strongly the model is kept near the common one: a number, or 'auto' to "
        "choose it by rows that are held out."
    ),
]


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
    module: ModuleOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fit a model to one site's rows, near the common model. ε does not cover it."""
    from dpscaffold.models.personal import compare_rows, personal_model, read_site, split

    chosen, name = parse_strength(strength), site or data.stem
    model = chosen_model(run, module)
    if model.origin.personal is not None:
        raise BadInput(
            "not-a-common-model",
            f"{run} holds the personal model of '{model.origin.personal}'; name the common model "
            f"that it was made from",
        )
    rows = read_site(model, data, label)
    fitted, tested = split(rows)
    compared = compare_rows(model, [fitted], [tested], [name], chosen)
    personal_model(model, rows, name, chosen).save(out)
    show_personal(compared, out, as_json)


def show_personal(compared: SitesCompared, out: Path, as_json: bool) -> None:
    """Print the three numbers of one site, where its model is, and that nothing covers it."""
    from dpscaffold.models.personal import NOT_COVERED
    from dpscaffold.runs.written import plain

    if as_json:
        found = {**compared.to_dict(), "model": str(out), "note": NOT_COVERED}
        typer.echo(json.dumps(plain(found), indent=2))
        return
    one = compared.sites[0]
    typer.echo(
        f"{one.site}: {compared.metric.replace('_', ' ')} on {one.rows} held-out rows: local "
        f"{one.local:.3f}, global {one.common:.3f}, personal {one.personal:.3f}"
    )
    typer.echo(one.sentence)
    typer.echo(f"personal model: {out}")
    typer.echo(NOT_COVERED)


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
