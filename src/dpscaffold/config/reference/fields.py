"""One key of a configuration, and the keys of a model: kind, default and range read off it."""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dpscaffold.config.reference.values import NEEDED, OMITTED
from dpscaffold.errors import BadInput

#: What ``words.toml`` says, by dotted key.
Words = dict[str, dict[str, Any]]


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


def model_keys(
    table: str, place: str, model: type[BaseModel], said: Words, skip: Collection[str] = ()
) -> Iterator[Key]:
    """The keys that a model declares, but for ``skip``; ``place`` is which source, step or
    algorithm it is of."""
    for name, field in model.model_fields.items():
        if name in skip:
            continue
        entry = said.get(f"{table}.{place}.{name}") or entry_of(said, f"{table}.{name}")
        kind = entry.get("range") or " ".join((kind_of(field.annotation), *_bounds(field)))
        yield Key(
            f"{table}.{name}", place, kind, _default(field), entry["about"], entry.get("example")
        )


def entry_of(said: Words, name: str) -> dict[str, Any]:
    """What is said of a key, which must not be nothing."""
    if name not in said:
        raise BadInput(f"{name} is not explained; add it to reference/words.toml")
    return said[name]


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


_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}


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
