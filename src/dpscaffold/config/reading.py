"""From a TOML file and overrides, key by key, to a configuration that was checked."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dpscaffold.config.configuration import Configuration
from dpscaffold.data.config import BLANK
from dpscaffold.data.sentences import members, mistake_of
from dpscaffold.errors import BadInput, nearest


def load(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
) -> Configuration:
    """Read a TOML file (or start from ``base``), apply ``key=value`` overrides, and check
    everything."""
    tables = dict(base or {}) if path is None else read_tables(path)
    for item in overrides:
        tables = override(tables, item)
    return parse(tables, home(Path(path)) if path is not None else None)


def home(path: Path) -> Path:
    """Where files of a user's own are looked for: next to the configuration, which of a run
    folder's is the one that the run began with."""
    run = _said_of_run(_tables(path)) if path.name == "config.toml" and path.exists() else {}
    return Path(run.get("home", path.parent))


def read_tables(path: Path | str) -> dict[str, Any]:
    """The tables of a TOML file; what a run folder's says of the run is left out."""
    tables = _tables(path)
    return {name: tables[name] for name in tables if name != "run" or not _said_of_run(tables)}


def _said_of_run(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table with which a run folder's configuration says what run it is; else none."""
    run = tables.get("run")
    return run if isinstance(run, dict) and "setting" in run else {}


def _tables(path: Path | str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        near = _meant(Path(path))
        raise BadInput(
            "file-unreadable",
            f"the configuration {path} cannot be read: {error.strerror}{near}; give the path of a "
            f"TOML file",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        said = f"the configuration {path} is not valid TOML: {error}"
        raise BadInput("not-toml", f"{said}{_unquoted(Path(path), str(error))}") from error


def _meant(path: Path) -> str:
    """A hint where a TOML file of a similar name lies in the folder."""
    try:
        names = [f"{found.stem}.toml" for found in path.parent.glob("*.toml")]
    except OSError:
        return ""
    return nearest(f"{path.stem}.toml", names) if path.stem else ""


def _unquoted(path: Path, problem: str) -> str:
    """What to write where a value is a text without quotes, the commonest mistake; else ""."""
    place = re.search(r"at line (\d+)", problem)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    line = lines[int(place[1]) - 1] if place and int(place[1]) <= len(lines) else ""
    found = re.fullmatch(r"\s*([\w.-]+)\s*=\s*([^\W\d][^\"'#=]*?)\s*(#.*)?", line)
    return f'; a text needs quotes: {found[1]} = "{found[2]}"' if found else ""


def _as_change(item: str) -> str:
    """How to write a change: with the table of the key that is named, if there is one."""
    key, separator, _ = item.partition("=")
    tables = tables_with(key.strip()) if separator and "." not in key else []
    return f"{tables[0]}.{item.strip()}" if tables else "table.key=value, e.g. plan.rounds=100"


def override(tables: Mapping[str, Any], item: str) -> dict[str, Any]:
    """The tables with one ``table.key=value`` set; ``table.key=`` leaves a key out and
    ``privacy=false`` a table.

    >>> override({}, "plan.rounds=3")
    {'plan': {'rounds': 3}}
    >>> override({"privacy": {"noise": 2.0, "clip": 1.0}}, "privacy.noise=")
    {'privacy': {'clip': 1.0}}
    """
    key, separator, text = item.partition("=")
    path, text = key.strip().split("."), text.strip()
    if separator and len(path) == 1 and text.lower() in ("false", "none"):
        return {name: table for name, table in tables.items() if name != path[0]}
    if not separator or len(path) < 2 or not all(path):
        raise BadInput("bad-change", f"--set is {item!r}; write {_as_change(item)}")
    return _changed(tables, path, text, item)


def _changed(
    tables: Mapping[str, Any], path: Sequence[str], text: str, item: str
) -> dict[str, Any]:
    """The tables with another value at a path, or without one where the text is empty."""
    (first, *rest), changed = path, dict(tables)
    if rest:
        inner = tables.get(first, {})
        if not isinstance(inner, Mapping):
            raise BadInput("bad-change", f"--set is {item!r}, but {first} is not a table")
        if text or first in tables:
            changed[first] = _changed(inner, rest, text, item)
    elif text:
        changed[first] = _value(text)
    else:
        changed.pop(first, None)
    return changed


def _value(text: str) -> Any:
    """A TOML value, or the text itself where it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def blanks_in(tables: Any, name: str = "") -> list[str]:
    """The dotted keys whose value nobody has filled in.

    >>> blanks_in({"data": {"label": "ill", "classes": "FILL IN", "ranges": {"age": ["FILL IN"]}}})
    ['data.classes', 'data.ranges.age']
    """
    if tables == BLANK:
        return [name]
    if isinstance(tables, Mapping):
        found = [b for key, v in tables.items() for b in blanks_in(v, f"{name}.{key}".strip("."))]
    elif isinstance(tables, list | tuple):
        found = [blank for value in tables for blank in blanks_in(value, name)]
    else:
        found = []
    return [*dict.fromkeys(found)]


def parse(tables: Mapping[str, Any], folder: Path | None = None) -> Configuration:
    """Check tables; the first thing wrong is said in one sentence. ``folder`` is where a user's own
    algorithm is looked for first."""
    if blanks := blanks_in(tables):
        raise BadInput(
            "blanks-left",
            f"the configuration has {len(blanks)} blank{'s' if len(blanks) > 1 else ''} "
            f'({", ".join(blanks)}); write in place of each "{BLANK}" what is known without '
            f"looking at the records",
        )
    try:
        return Configuration.model_validate(tables, context={"folder": folder})
    except ValidationError as error:
        raise BadInput(*mistake_of(error, Configuration)) from None


def tables_with(key: str) -> list[str]:
    """The tables of a configuration that have a key.

    >>> tables_with("epsilon"), tables_with("seed")
    (['privacy'], ['data', 'plan'])
    """
    return [
        name
        for name, field in Configuration.model_fields.items()
        if any(key in model.model_fields for model in members(field.annotation))
    ]
