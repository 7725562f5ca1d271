"""``dpscaffold config``: what a configuration comes to, and what its keys mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dpscaffold.cli import PLAIN
from dpscaffold.cli.keys import complete_key, complete_setting, known_keys, names
from dpscaffold.errors import BadInput, nearest

app = typer.Typer(
    name="config", help="Show a configuration, or explain its keys.", no_args_is_help=True, **PLAIN
)
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command("show")
def show_command(
    config: Annotated[
        Path | None, typer.Argument(help="TOML configuration; plain defaults without one")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="override a key", autocompletion=complete_setting),
    ] = None,
    unset: Annotated[list[str] | None, typer.Option("--unset", help="leave a key out")] = None,
    as_json: Json = False,
) -> None:
    """Show a configuration with every default spelled out; no data are read."""
    from dpscaffold.config import load, to_toml

    settings = load(config, set_ or [], unset=unset or [])
    tables = settings.model_dump(mode="json", exclude_none=True)
    typer.echo(json.dumps(tables, indent=2) if as_json else to_toml(tables).rstrip("\n"))


@app.command("explain")
def explain_command(
    key: Annotated[
        str | None,
        typer.Argument(
            help="a key, such as plan.rounds, or a table; all keys without one",
            autocompletion=complete_key,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a key is for, which values it takes, its default, and an example."""
    chosen = _chosen(key)
    if as_json:
        typer.echo(json.dumps(chosen, indent=2, ensure_ascii=False))
    elif key is None or "." not in key:
        wide = max(len(entry["name"]) for entry in chosen)
        for entry in _once(chosen):
            typer.echo(f"{entry['name']:<{wide}}  {entry['about']}")
    else:
        for entry in _once(chosen):
            _explain(entry, [e["place"] for e in chosen if _sense(e) == _sense(entry)])


def _chosen(key: str | None) -> list[dict[str, Any]]:
    """The entries of a key, of a table, or all."""
    found = [entry for entry in known_keys() if key is None or _fits(entry["name"], key)]
    if not found:
        hint = nearest(str(key), names()) or "; dpscaffold config explain lists them"
        raise BadInput(f"there is no key {key!r}{hint}")
    return found


def _fits(name: str, key: str) -> bool:
    return name == key or ("." not in key and name.startswith(f"{key}."))


def _sense(entry: dict[str, Any]) -> tuple[str, ...]:
    return entry["name"], entry["kind"], str(entry["default"]), entry["about"]


def _once(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({_sense(entry): entry for entry in reversed(entries)}.values())[::-1]


def _explain(entry: dict[str, Any], places: list[str]) -> None:
    from dpscaffold.reference.values import shown, toml

    typer.echo(f"{entry['name']}: {entry['about']}")
    if any(places):
        typer.echo(f"  of:      {', '.join(places)}")
    typer.echo(f"  value:   {entry['kind']}")
    typer.echo(f"  default: {shown(entry['default'])}")
    typer.echo(f"  example: --set {entry['name']}={toml(entry['example'])}")
