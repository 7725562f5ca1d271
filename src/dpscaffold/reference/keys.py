"""Every key of a configuration: kind, default and range from the models, its sense from
``words.toml``."""

from __future__ import annotations

import inspect
import tomllib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dpscaffold.algorithms import ALGORITHMS, SERVERS
from dpscaffold.config import AlgorithmSettings, PlanSettings, PrivacySettings, TaskSettings
from dpscaffold.data.config import SOURCES
from dpscaffold.data.preprocessing import STEPS
from dpscaffold.errors import BadInput
from dpscaffold.experiments.tuning import TuneSettings
from dpscaffold.reference.values import NEEDED, OMITTED


@dataclass(frozen=True)
class Key:
    """One key: ``place`` is the source, step or algorithm that it belongs to, empty where all."""

    name: str
    place: str
    kind: str
    default: Any
    about: str
    example: Any

    @property
    def table(self) -> str:
        """The table it stands in.

        >>> Key("plan.rounds", "", "whole number", 100, "T", 400).table
        'plan'
        """
        return self.name.partition(".")[0]


def words() -> dict[str, dict[str, Any]]:
    """``words.toml`` by dotted key."""
    text = files("dpscaffold.reference").joinpath("words.toml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = {}

    def walk(prefix: str, table: dict[str, Any]) -> None:
        if "about" in table and isinstance(table["about"], str):
            found[prefix] = table
            return
        for name, inner in table.items():
            walk(f"{prefix}.{name}" if prefix else name, inner)

    walk("", tomllib.loads(text))
    return found


def keys() -> list[Key]:
    """Every key, table by table, in the order in which the models declare them."""
    said = words()
    found = [*_data(said)]
    found += [*_model("task", "", TaskSettings, said)]
    named = {"name": f"{', '.join(ALGORITHMS)}, or 'my_file:factory'", "server": ", ".join(SERVERS)}
    for name, choice in named.items():
        said[f"algorithm.{name}"]["range"] = choice
    found += [*_model("algorithm", "", AlgorithmSettings, said), *_numbers(said)]
    found += [*_model("plan", "", PlanSettings, said)]
    found += [*_model("privacy", "", PrivacySettings, said)]
    found += [*_model("tune", "", TuneSettings, said)]
    choice, entry = " or ".join(repr(step) for step in STEPS), said["step.step"]
    found.append(Key("step.step", "", choice, NEEDED, entry["about"], entry["example"]))
    for step, kind in STEPS.items():
        found += [key for key in _model("step", step, kind, said) if key.name != "step.step"]
    return found


def _data(said: dict[str, dict[str, Any]]) -> Iterator[Key]:
    """The name of a source, then the keys of each."""
    choice, entry = " or ".join(repr(source) for source in SOURCES), said["data.source"]
    yield Key("data.source", "", choice, "synthetic", entry["about"], entry["example"])
    for source, model in SOURCES.items():
        found = _model("data", source, model, said)
        yield from (key for key in found if key.name != "data.source")


def _model(
    table: str, place: str, model: type[BaseModel], said: dict[str, dict[str, Any]]
) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        entry = said.get(f"{table}.{place}.{name}") or _entry(said, f"{table}.{name}")
        kind = entry.get("range") or " ".join((kind_of(field.annotation), *_bounds(field)))
        yield Key(
            f"{table}.{name}", place, kind, _default(field), entry["about"], entry.get("example")
        )


def _entry(said: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in said:
        raise BadInput(f"{name} is not explained; add it to reference/words.toml")
    return said[name]


def _numbers(said: dict[str, dict[str, Any]]) -> Iterator[Key]:
    """The numbers of the algorithms and of the server's optimisers: their factories' arguments."""
    for skip, table in ((0, ALGORITHMS), (1, SERVERS)):
        for place, factory in table.items():
            for name, argument in list(inspect.signature(factory).parameters.items())[skip:]:
                entry = _entry(said, f"algorithm.{name}")
                yield Key(
                    f"algorithm.{name}",
                    place,
                    entry["range"],
                    argument.default,
                    entry["about"],
                    entry["example"],
                )


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return NEEDED
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return OMITTED
    return _plain(value)


def _plain(value: Any) -> Any:
    """A default as TOML would write it."""
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(exclude_defaults=True) or value.model_dump())
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def kind_of(annotation: Any) -> str:
    """A type in words.

    >>> kind_of(int | None), kind_of(tuple[str, ...])
    ('a whole number', 'a list, each a text')
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _NAMES:
        return _NAMES[annotation]
    if origin is typing.Literal:
        return " or ".join(repr(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        parts = dict.fromkeys(kind_of(part) for part in arguments if part is not type(None))
        return " or ".join(parts)
    if origin in (tuple, list):
        inner = [part for part in arguments if part is not Ellipsis]
        return f"a list, each {kind_of(inner[0])}" if inner else "a list"
    if origin is typing.Annotated:
        return kind_of(arguments[0])
    return "a table"


_SIGNS = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def _bounds(field: FieldInfo) -> Iterator[str]:
    """The limits that a field declares, in words."""
    said = []
    for limit in field.metadata:
        for sign, phrase in _SIGNS.items():
            value = getattr(limit, sign, None)
            if value is not None:
                said.append(phrase.format(f"{value:g}"))
        if getattr(limit, "max_length", None) == 1:
            said.append("of one sign")
    if said:
        yield f"({', '.join(said)})"
