"""What is wrong with a table, in one sentence."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ValidationError

from dpscaffold.config.configuration import Configuration
from dpscaffold.errors import BadInput, nearest


def sentence_of(error: ValidationError) -> str:
    """The first error as a sentence that names the key, the value and what would do."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, BadInput):
        return str(cause)
    if isinstance(cause, ValueError):
        return f"{first['loc'][0]}: {cause}"
    if len(first["loc"]) > 2 and first["loc"][0] != "data":
        return _of_several(error)
    location = _keys(first["loc"])
    model = _model_at(location[:-1])
    shown = _shown(location)
    if first["type"] == "extra_forbidden":
        known = list(model.model_fields) if model else []
        return f"unknown key {shown}{nearest(location[-1], known)}; known here: {', '.join(known)}"
    if first["type"] == "missing":
        return f"{shown} is missing; dpscaffold config explain {shown} says what it is"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{shown} is {first['input']!r}; write a table: [{shown}], and its keys below"
    wrong = [one for one in error.errors() if _keys(one["loc"]) == location]
    return f"{shown} is {first['input']!r}{_near(first['input'], wrong)}; give {_any(wrong, shown)}"


#: How pydantic names a member of a union, after the key whose value fits none.
_MEMBER = re.compile(
    r"(float|int|str|bool|(constrained|literal|function|tuple|list|dict|nullable)[-\[].*)$"
)


def _keys(place: Sequence[int | str]) -> list[str]:
    """The keys of a place, without the members of a union that were tried there."""
    parts = [str(part) for part in place]
    return parts[:1] + [part for part in parts[1:] if not _MEMBER.match(part)]


def _shown(location: list[str]) -> str:
    """A place as people write it: the source is no key of its own."""
    tagged = location[0] == "data" and len(location) > 2
    return ".".join(part for k, part in enumerate(location) if not (k == 1 and tagged))


#: What would do, by the beginning of pydantic's name for what is wrong.
_WANTED = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a table",
}
#: Examples of tables and lists, where a single value is a common mistake.
_EXAMPLES = {
    "data.missing": '{ "*" = "mean" }',
    "data.categories": '["sex", "ward"]',
    "data.exclude": '["patient"]',
}


def _any(wrong: Sequence[Any], shown: str) -> str:
    """What would do, by each member of a union.

    >>> _any([{"type": "int_parsing"}, {"type": "float_type"}], "plan.rounds")
    'a whole number or a number'
    """
    kinds = list(dict.fromkeys(_expected(one) for one in wrong))
    example = f", such as {_EXAMPLES[shown]}" if shown in _EXAMPLES else ""
    return f"{', '.join(kinds[:-1])} or {kinds[-1]}{example}" if kinds[1:] else kinds[0] + example


def _expected(one: Any) -> str:
    if one["type"] == "literal_error":
        return str(one["ctx"]["expected"])
    if one["type"].partition("_")[0] in _WANTED:
        return _WANTED[one["type"].partition("_")[0]]
    said = str(one["msg"]).removeprefix("Input should be ")
    return f"{said[:1].lower()}{said[1:]}"


def _near(value: Any, wrong: Sequence[Any]) -> str:
    """A hint where a mistyped choice is meant."""
    texts = [str(one["ctx"]["expected"]) for one in wrong if one["type"] == "literal_error"]
    choices = [choice for text in texts for choice in text.split("'")[1::2]]
    return nearest(value, choices) if isinstance(value, str) else ""


def _of_several(error: ValidationError) -> str:
    """A value that is none of the kinds that its key may have, or a list with something wrong in
    it."""
    table, key = error.errors()[0]["loc"][:2]
    same = [one for one in error.errors() if one["loc"][:2] == (table, key)]
    deepest = max(same, key=lambda one: len(one["loc"]))
    entry = next((part for part in deepest["loc"][2:] if isinstance(part, int)), None)
    if entry is not None:  # the list was understood, and one of its entries was not
        same = [deepest]
    where = f"{table}.{key}" + ("" if entry is None else f"[{entry}]")
    value = same[0]["input"]
    return f"{where} is {value!r}{_near(value, same)}; give {_any(same, where)}"


def tables_with(key: str) -> list[str]:
    """The tables of a configuration that have a key.

    >>> tables_with("epsilon"), tables_with("seed")
    (['privacy'], ['data', 'plan'])
    """
    return [
        name
        for name, field in Configuration.model_fields.items()
        if any(key in model.model_fields for model in _members(field.annotation))
    ]


def _model_at(location: list[str]) -> type[BaseModel] | None:
    """The model that holds the key, walking from the top; a tag of a union selects its member."""
    model: type[BaseModel] = Configuration
    candidates: list[type[BaseModel]] = [model]
    for part in location:
        found: list[type[BaseModel]] = []
        for candidate in candidates:
            if part in candidate.model_fields:
                found += _members(candidate.model_fields[part].annotation)
            else:
                source = candidate.model_fields.get("source")
                if source is not None and part in typing.get_args(source.annotation):
                    found.append(candidate)
        candidates = found
    return candidates[0] if candidates else None


def _members(annotation: Any) -> list[type[BaseModel]]:
    """The models inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated):
        return [model for part in typing.get_args(annotation) for model in _members(part)]
    return []
