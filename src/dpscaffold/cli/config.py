"""``dpscaffold config``: what a configuration comes to, and what its keys mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dpscaffold.cli import PLAIN
from dpscaffold.cli.keys import (
    SERVED,
    SETTABLE,
    SetOption,
    every_name,
    known_keys,
    refuse_unknown,
)
from dpscaffold.errors import BadInput, nearest

app = typer.Typer(
    name="config",
    help="Show a configuration, or explain its keys.",
    no_args_is_help=True,
    add_completion=False,
    **PLAIN,
)
Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


@app.command("show")
def show_command(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Configuration file (TOML) or run folder. Default: all default values."
        ),
    ] = None,
    set_: SetOption = None,
    as_json: Json = False,
) -> None:
    """Show a configuration, or a file of a deployment, with all defaults. No data are read."""
    from dpscaffold.runs.written import to_toml

    tables = spelled_out(inside(config), set_ or [])
    typer.echo(json.dumps(tables, indent=2) if as_json else to_toml(tables).rstrip("\n"))


def inside(path: Path | None) -> Path | None:
    """The file itself, or that of a run folder."""
    if path is None or not (path / "config.toml").is_file():
        return path
    return path / "config.toml"


def _of_tuning(path: Path, set_: list[str]) -> dict[str, Any]:
    from dpscaffold.tuning.tuning import read_tuning

    settings, tune = read_tuning(path, set_)
    tables = {**settings.model_dump(mode="json"), "tune": tune.model_dump(mode="json")}
    return {name: table for name, table in tables.items() if table is not None}


def spelled_out(path: Path | None, set_: list[str]) -> dict[str, Any]:
    """The tables of a file with their defaults; its content says what it is."""
    from dpscaffold.config import load, read_tables

    held = read_tables(path) if path is not None else {}
    refuse_unknown(set_, lambda: held)
    if path is None or not {"schema", "deploy", "policy", "sites", "tune"} & set(held):
        return load(path, set_).model_dump(mode="json", exclude_none=True)
    if "sums" in held and not set_:
        from dpscaffold.sums.plan import load_plan

        return load_plan(path).to_dict()
    if "schema" in held or "deploy" in held:
        from dpscaffold.deployment.server.config import load_served

        return load_served(path, set_).resolved()
    if "tune" in held:
        return _of_tuning(path, set_)
    if set_:
        raise BadInput(
            "not-applicable", f"--set is {set_[0]}, and {path} is edited by hand; leave it out"
        )
    return _of_a_party(path, held)


def _of_a_party(path: Path, held: dict[str, Any]) -> dict[str, Any]:
    """``site.toml`` or ``federation.toml``."""
    from dataclasses import asdict

    if "policy" in held:
        from dpscaffold.deployment.site.file import read_site_file

        return read_site_file(path).model_dump(mode="json", exclude_none=True)
    from dpscaffold.deployment.provision import read_federation

    return asdict(read_federation(path))


@app.command("explain")
def explain_command(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key such as plan.rounds, or a table. Default: all keys.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a key: its meaning, allowed values, default and an example.

    Example: dpscaffold config explain plan.rounds
    """
    chosen = _chosen(key)
    if as_json:
        typer.echo(json.dumps(chosen, indent=2, ensure_ascii=False))
    elif key is None or any(entry["name"].startswith(f"{key}.") for entry in chosen):
        wide = max(len(entry["name"]) for entry in chosen)
        for entry in _once(chosen):
            typer.echo(f"{entry['name']:<{wide}}  {entry['about']}")
    else:
        for entry in _once(chosen):
            _explain(entry, [e["place"] for e in chosen if _sense(e) == _sense(entry)])


def _chosen(key: str | None) -> list[dict[str, Any]]:
    """The entries of a key, of a table, or all; a key may be given without its table."""
    if key is None:
        return list(known_keys())
    found = [entry for entry in known_keys() if _within(entry["name"], key)]
    found = found or [entry for entry in known_keys() if entry["name"].endswith(f".{key}")]
    if not found:
        hint = nearest(key, every_name()) or "; dpscaffold config explain lists them"
        raise BadInput("unknown-key", f"there is no key {key!r}{hint}")
    return found


def _within(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def _sense(entry: dict[str, Any]) -> tuple[str, ...]:
    return entry["name"], entry["kind"], str(entry["default"]), entry["about"]


def _once(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({_sense(entry): entry for entry in reversed(entries)}.values())[::-1]


def _explain(entry: dict[str, Any], places: list[str]) -> None:
    from dpscaffold.config.reference.values import shown, toml

    typer.echo(f"{entry['name']}: {entry['about']}")
    if any(places):
        typer.echo(f"  of:      {', '.join(places)}")
    typer.echo(f"  value:   {entry['kind']}")
    typer.echo(f"  default: {shown(entry['default'])}")
    table, _, rest = entry["name"].partition(".")
    given = f"--set {entry['name']}=" if table in {*SETTABLE, *SERVED} else f"{rest} = "
    typer.echo(f"  example: {given}{toml(entry['example'])}")
