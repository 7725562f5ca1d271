"""``dpscaffold sums``: a federation by e-mail, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="sums", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)
PlanFile = Annotated[Path, typer.Argument(help="the plan that all sites share")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


@app.callback()
def sums() -> None:
    """Train a model by e-mail: each site sends one signed file of noised sums."""


@app.command()
def keys(
    plan: PlanFile,
    name: Annotated[str, typer.Option(help="this site's name in the plan")],
    out: Annotated[Path | None, typer.Option(help="the site's folder; default: its name")] = None,
    as_json: AsJson = False,
) -> None:
    """Make this site's folder, if it is new, and a key file to e-mail to the other sites."""
    from dpscaffold.sums.plan import load_plan
    from dpscaffold.sums.site import make_keys

    path = make_keys(load_plan(plan), name, out or Path(name))
    if as_json:
        typer.echo(json.dumps({"site": str(path.parent / "site.toml"), "keys": str(path)}))
        return
    typer.echo(f"{path.parent / 'site.toml'}: name the data and set the policy")
    typer.echo(f"{path}: for masked sums, e-mail it to all other sites (it is public)")


@app.command()
def make(
    plan: PlanFile,
    site: Annotated[Path, typer.Option(help="this site's file")] = Path("site.toml"),
    keys: Annotated[
        list[Path] | None,
        typer.Option(help="a folder with the key files of all sites, or each file"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the file to write; default: NAME.sums")] = None,
    as_json: AsJson = False,
) -> None:
    """Write this site's file of noised sums, after a line in its ledger."""
    from dpscaffold.privacy.numbers import digits_up, round_up
    from dpscaffold.sums.plan import load_plan
    from dpscaffold.sums.site import make_sums

    made = make_sums(load_plan(plan), site, keys or (), out)
    if as_json:
        said = {"file": str(made.path), "again": made.again, "epsilon": made.epsilon}
        said |= {"epsilon_alone": made.epsilon_alone, "delta": made.delta}
        typer.echo(json.dumps(said, indent=2))
        return
    for note in made.notes:
        typer.echo(note)
    cost = f"ε = {round_up(made.epsilon)} at δ = {digits_up(made.delta)}"
    if made.epsilon_alone is not None:
        cost += f", and {round_up(made.epsilon_alone)} if all other sites collude"
    typer.echo(
        f"{made.path}: the same file as before; nothing was spent again"
        if made.again
        else f"{made.path}: e-mail it to whoever combines; the ledger has {cost}"
    )


@app.command()
def combine(
    plan: PlanFile,
    files: Annotated[list[Path], typer.Argument(help="the .sums files of all sites")],
    out: Annotated[Path, typer.Option(help="a new folder for the model and its statement")],
    as_json: AsJson = False,
) -> None:
    """Add up the files of all sites and write the model and its statement."""
    from dpscaffold.privacy import line
    from dpscaffold.sums.combine import combine as add_up
    from dpscaffold.sums.combine import write_run
    from dpscaffold.sums.plan import load_plan

    agreed = load_plan(plan)
    made = add_up(agreed, files)
    said = write_run(agreed, made, out)
    if as_json:
        typer.echo(json.dumps({"run": str(out), "records": made.records}, indent=2))
        return
    typer.echo(f"{out}: a model of {len(files)} sites, about {made.records:.0f} records")
    typer.echo(f"Whoever has the files is the server of this sentence: {line(said)}")


@app.command()
def check(
    plan: PlanFile,
    files: Annotated[list[Path], typer.Argument(help=".sums and .sumkey files")],
    as_json: AsJson = False,
) -> None:
    """Check files against the plan, and print the fingerprints to compare by telephone."""
    from dpscaffold.deployment.protocol.messages import fingerprint
    from dpscaffold.sums.combine import check_file
    from dpscaffold.sums.files import read_key_file, read_sums
    from dpscaffold.sums.plan import load_plan

    agreed, found = load_plan(plan), []
    for path in files:
        if path.suffix == ".sumkey":
            file = read_key_file(path)
            found.append((file.key.name, fingerprint(file.public), file.plan == agreed.digest))
        else:
            sums = read_sums(path)
            check_file(agreed, path, sums)
            found.append((sums.site, sums.fingerprint, True))
    if as_json:
        typer.echo(json.dumps([{"site": n, "fingerprint": f, "ok": ok} for n, f, ok in found]))
    else:
        for name, print_, good in found:
            typer.echo(f'{name} = "{print_}"' + ("" if good else "  # of another plan"))
    if not all(good for _, _, good in found):
        raise typer.Exit(1)
