"""Every name that a configuration file knows, from the JSON schemas of the tables that read them.

A schema says type, bounds and default of a key. The docstring at its field says what it means, and
ends with an example. Of these are made ``docs/configuration.md`` and a schema for editors for each
kind of file (``python -m dpscaffold.config.reference`` writes them), and the names that a misspelt
one is compared with. Nothing here imports PyTorch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema

from dpscaffold.data.tables.cells import toml_key

Schema = dict[str, Any]

HEAD = """# Configuration

This page lists every key of every configuration file. On the command line, `--set table.key=value`
overrides a key for one run, and `--set table.key=` removes it.

| file | used by | tables | schema for editors |
| --- | --- | --- | --- |
| configuration | `train`, `plan`, `tune`, `audit`, … | `[data]`, `[task]`, `[algorithm]`, \
`[plan]`, `[privacy]`; optional: `[secure]`, `[facts]`, `[stopping]`, \
`[personal]`, `[tune]` | [run.json](schema/run.json) |
| a server's plan | `server run`, `site check --offer` | `[schema]`, `[task]`, `[algorithm]`, \
`[plan]`, `[privacy]`, `[deploy]`; optional: `[evaluate]` | [server.json](schema/server.json) |
| a plan of sums by e-mail | `sums` | `[schema]`, `[task]`, `[algorithm]`, `[privacy]`, `[sums]` | \
[sums.json](schema/sums.json) |
| `federation.toml` | `provision` | only keys | [federation.json](schema/federation.json) |
| `site.toml` | `site` | keys, `[data]` and `[policy]` | [site.json](schema/site.json) |

`dpscaffold train --dry-run FILE.toml` spells a file out with every default. The first line
`#:schema schema/run.json`, with the path of a schema of this table, makes an editor that knows
Taplo (Even Better TOML in Visual Studio Code) complete, explain and check keys.
"""
TITLES = {
    "data": "`[data]`: where the records come from",
    "data.preprocess": "Steps of `data.preprocess` and `schema.prepare`",
    "task": "`[task]`: what is learnt",
    "algorithm": "`[algorithm]`: the federated algorithm",
    "plan": "`[plan]`: rounds, steps and sampling",
    "privacy": "`[privacy]`: clipping, noise and budget",
    "secure": "`[secure]`: let the server see sums of uploads only",
    "facts": "`[facts]`: what is public about the data (`dpscaffold plan`)",
    "stopping": "`[stopping]`: end a run early by public rows (`dpscaffold train`)",
    "personal": "`[personal]`: a model for each site",
    "tune": "`[tune]`: which values are tried (`dpscaffold tune`)",
    "schema": "`[schema]`: what a row looks like at every site (`dpscaffold server run`)",
    "deploy": "`[deploy]`: address and deadlines of a deployed run",
    "evaluate": "`[evaluate]`: public test records at the server",
    "sums": "`[sums]`: whose sums make the model (`dpscaffold sums`)",
    "federation": "`federation.toml`: who is invited (`dpscaffold provision`)",
    "site": "`site.toml`: a site (`dpscaffold site`)",
}

COLUMNS = """| key | what it is | value | default | example |
| --- | --- | --- | --- | --- |"""

#: Files whose keys stand outside tables, and have the name of the file.
WITHOUT_TABLES = ("federation", "site")

#: Types in words, of one value and of several.
KINDS = {
    "integer": ("an integer", "integers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "true or false"),
    "string": ("a string", "strings"),
    "array": ("a list", "lists"),
    "object": ("a table", "tables"),
}
LIMITS = {
    "minimum": "{:g} or more",
    "exclusiveMinimum": "above {:g}",
    "maximum": "at most {:g}",
    "exclusiveMaximum": "below {:g}",
}


@dataclass(frozen=True)
class Key:
    """One name: ``of`` lists the sources or steps that have it, empty if all of its table have.
    ``declared`` is the class that says what it means: tables may share a key by a common base."""

    table: str
    name: str
    about: str
    kind: str
    default: str
    example: Any
    of: str
    declared: str = ""

    @property
    def path(self) -> str:
        """The name with its table.

        >>> Key("plan", "rounds", "T.", "an integer", "100", 400, "").path
        'plan.rounds'
        """
        return f"{self.table}.{self.name}"


class _Declaring(GenerateJsonSchema):
    """The JSON schema, which says of each key the class that declared it first, by its full name:
    classes of different tables may be called alike."""

    def model_schema(self, schema: Any) -> Schema:
        made, kinds = super().model_schema(schema), schema["cls"].__mro__[-2::-1]
        for name, field in schema["cls"].model_fields.items():
            first = next(one for one in kinds if name in getattr(one, "model_fields", ()))
            if about := first.model_fields[name].description:
                node = made["properties"][field.alias or name]
                node["x-declared"] = f"{first.__module__}.{first.__qualname__}"
                node.setdefault("description", about)
        return made


@cache
def schemas() -> dict[str, Schema]:
    """The JSON schema of each kind of file."""
    from dpscaffold.config.configuration import Configuration
    from dpscaffold.deployment.provision import FederationFile
    from dpscaffold.deployment.server.config import ServerConfiguration
    from dpscaffold.deployment.site.data_table import SiteData
    from dpscaffold.deployment.site.file import SiteFile
    from dpscaffold.sums.tables import SumsConfiguration
    from dpscaffold.tuning.settings import TuneSettings

    # These tables are read by themselves, so that a mistake in them is named as theirs.
    tune: Any = (TuneSettings | None, None)
    evaluate: Any = (SiteData | None, None)
    data: Any = (SiteData, ...)
    kinds: dict[str, Any] = {
        "run": create_model("Run", __base__=Configuration, tune=tune),
        "server": create_model("ServerPlan", __base__=ServerConfiguration, evaluate=evaluate),
        "sums": SumsConfiguration,
        "federation": FederationFile,
        "site": create_model("Site", __base__=SiteFile, data=data),
    }
    return {
        name: _explained(TypeAdapter(kind).json_schema(schema_generator=_Declaring))
        for name, kind in kinds.items()
    }


def _explained(node: Any) -> Any:
    """A schema whose descriptions are single lines, and whose examples are values."""
    if isinstance(node, list):
        return [_explained(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {name: _explained(one) for name, one in node.items()}
    if isinstance(node.get("description"), str):
        first = node["description"].partition("\n\n")[0]
        about, _, example = " ".join(first.split()).partition(" Example: ``")
        found["description"] = about
        if example:
            found["examples"] = [tomllib.loads(f"value = {example.rstrip('`')}")["value"]]
    return found


@cache
def keys() -> tuple[Key, ...]:
    """Every name, table by table; tables that share their classes are there once.

    >>> {"data.seed", "plan.rounds"} <= {key.path for key in keys()}
    True
    """
    found: dict[str, list[Schema]] = {}
    for file, schema in schemas().items():
        root = file if file in WITHOUT_TABLES else ""
        _collect(root, [schema], schema.get("$defs", {}), found)
    return tuple(key for table, shapes in found.items() for key in _keys_of(table, shapes))


def declared() -> list[Key]:
    """Every key once, in the first of the tables that share it."""
    found: dict[tuple[str, str], Key] = {}
    for key in keys():
        found.setdefault((key.declared, key.name), key)
    return [*found.values()]


def _collect(
    table: str, shapes: list[Schema], definitions: Schema, found: dict[str, list[Schema]]
) -> None:
    """Add a table with the shapes that it may have (sources, steps), and the tables within it."""
    if table in found or shapes in found.values():
        return
    if table:
        found[table] = shapes
    for shape in shapes:
        for name, node in shape["properties"].items():
            inner = [definitions[one] for one in dict.fromkeys(_tables_in(node))]
            if inner:
                _collect(f"{table}.{name}".strip("."), inner, definitions, found)


def _tables_in(node: Any) -> Iterator[str]:
    """The names of the definitions that a value may be, or hold."""
    if isinstance(node, dict) and "$ref" in node:
        yield node["$ref"].rpartition("/")[2]
    elif isinstance(node, dict | list):
        for one in node.values() if isinstance(node, dict) else node:
            yield from _tables_in(one)


def _choices(node: Schema) -> list[Schema]:
    """What a value may be, absence left out."""
    given = node.get("anyOf") or node.get("oneOf") or [node]
    inner = [node] if given == [node] else [part for one in given for part in _choices(one)]
    return [one for one in inner if one.get("type") != "null"]


def _keys_of(table: str, shapes: list[Schema]) -> Iterator[Key]:
    """The names of a table that are no tables themselves."""
    for name in dict.fromkeys(name for shape in shapes for name in shape["properties"]):
        having = [shape for shape in shapes if name in shape["properties"]]
        nodes = [shape["properties"][name] for shape in having]
        if all("$ref" in one for node in nodes for one in _choices(node)):
            continue

        defaults: dict[str, list[str]] = {}
        for shape in having:
            defaults.setdefault(_default(shape, name), []).append(_tag(shape))
        said = [f"{one} ({', '.join(of)})" for one, of in defaults.items()]

        yield Key(
            table,
            name,
            about=" ".join(_longest(node.get("description", "") for node in nodes)),
            kind=" or ".join(dict.fromkeys(in_words(node) for node in nodes)),
            default=", ".join(said if len(said) > 1 else defaults),
            example=next((node["examples"][0] for node in nodes if "examples" in node), None),
            of="" if len(having) == len(shapes) else ", ".join(_tag(shape) for shape in having),
            declared=nodes[0].get("x-declared", table),
        )


def _longest(texts: Iterable[str]) -> list[str]:
    """The different texts, without those that another one says too.

    >>> _longest(["The users.", "The users. At most 9.", "The users."])
    ['The users. At most 9.']
    """
    found = dict.fromkeys(texts)
    return [one for one in found if not any(one in other for other in found if other != one)]


def _tag(shape: Schema) -> str:
    """The source or step by which tables are told apart."""
    return next((one["const"] for one in shape["properties"].values() if "const" in one), "")


def _default(shape: Schema, name: str) -> str:
    node = shape["properties"][name]
    if name in shape.get("required", ()) or "const" in node:
        return "required"
    default = node.get("default")
    return "not set" if default is None else f"`{toml(default)}`"


def in_words(node: Schema, several: bool = False) -> str:
    """What a value may be.

    >>> in_words({"type": "array", "items": {"type": "integer", "minimum": 1}})
    'a list of integers (1 or more)'
    """
    choices = _choices(node)
    if choices != [node]:
        return " or ".join(dict.fromkeys(in_words(one, several) for one in choices))
    if "const" in node or "enum" in node:
        return " or ".join(repr(one) for one in node.get("enum", [node.get("const")]))
    said = KINDS.get(node.get("type", "object"), KINDS["object"])[several]
    items = node.get("items") or node.get("additionalProperties")
    if isinstance(items, dict):
        said += f" of {in_words(items, several=True)}"
    limits = [text.format(node[limit]) for limit, text in LIMITS.items() if limit in node]
    return f"{said} ({', '.join(limits)})" if limits else said


def toml(value: Any) -> str:
    """One value as TOML, on one line.

    >>> toml(["a", 1.5]), toml({"sex": ["f", "m"]})
    ('["a", 1.5]', '{ sex = ["f", "m"] }')
    """
    if isinstance(value, dict):
        pairs = [f"{toml_key(name)} = {toml(one)}" for name, one in value.items()]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(toml(one) for one in value)}]"
    return json.dumps(value, ensure_ascii=False)


def page(found: Iterable[Key]) -> str:
    """``docs/configuration.md``."""
    lines = [HEAD]
    first = {(key.declared, key.name): key for key in declared()}
    for table, listed in groupby(found, key=lambda key: key.table):
        lines += ["", f"## {TITLES.get(table, f'`{table}`')}", ""]
        shared: dict[str, list[str]] = {}
        rows = [COLUMNS]
        for key in listed:
            owner = first[key.declared, key.name]
            if owner != key and replace(owner, table=table, of=key.of, example=key.example) == key:
                shared.setdefault(owner.table, []).append(f"`{key.name}`")
                continue
            about = f"{key.about} *({key.of})*" if key.of else key.about
            cells = [f"`{key.name}`", about, key.kind, key.default, f"`{toml(key.example)}`"]
            rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines += rows if rows != [COLUMNS] else []
        for place, same in shared.items():
            lines += ["", f"Also {', '.join(same)}, as in `[{place}]`."]
    return "\n".join([*lines, ""])


def files() -> dict[str, str]:
    """The generated files by their path within ``docs``."""
    made = {"configuration.md": page(keys())}
    for name, schema in schemas().items():
        made[f"schema/{name}.json"] = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
    return made


if __name__ == "__main__":
    for path, text in files().items():
        written = Path(__file__).parents[3] / "docs" / path
        written.parent.mkdir(exist_ok=True)
        written.write_text(text, encoding="utf-8")
