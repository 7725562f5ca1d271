"""What is wrong with a table, in one sentence."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Collection, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ValidationError

from dpscaffold.errors import BadInput, BadValue, nearest


def mistake_of(error: ValidationError, model: Any, root: str = "") -> tuple[str, str]:
    """The code of the first error, and a sentence that names the key, the value and what to give.

    Args:
        error: What pydantic found.
        model: What was validated: a model, or a union of models.
        root: The table that the model describes, where that is not the whole file.

    >>> class Table(BaseModel):
    ...     rounds: int
    >>> try:
    ...     Table(rounds="ten")
    ... except ValidationError as problem:
    ...     print(mistake_of(problem, Table, "plan"))
    ('not-a-whole-number', "plan.rounds is 'ten'; give a whole number")
    """
    found = [(tuple(filter(None, [root])) + one["loc"], one) for one in error.errors()]
    # An unknown key comes before a missing one: it is often the same key, misspelt.
    place, first = min(found, key=lambda one: one[1]["type"] != "extra_forbidden")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        whole = isinstance(cause, BadInput) and not isinstance(cause, BadValue)
        within = "" if whole or not place else f"{place[0]}: "
        return getattr(cause, "code", "bad-value"), f"{within}{cause}"
    place, first = _understood(place, first, found)
    sources = _sources(model)
    shown = _shown(place, sources)
    keys = [str(part) for part in place[1 if root else 0 :] if not isinstance(part, int)]
    if first["type"] == "extra_forbidden":
        known = known_keys(model, keys[:-1])
        here = f"; known here: {', '.join(known)}" if known else ""
        return "unknown-key", f"unknown key {shown}{nearest(keys[-1], known)}{here}"
    if first["type"] == "missing":
        return "missing-key", f"{shown} is missing{_meaning(model, keys)}"
    if first["type"] in ("model_type", "model_attributes_type"):
        table = "give a table" if "[" in shown else f"write a table: [{shown}], and its keys below"
        return "not-a-table", f"{shown} is {first['input']!r}; {table}"
    wrong = [one for where, one in found if _shown(where, sources) == shown]
    value, near = first["input"], _near(first["input"], wrong)
    given = list(value) if isinstance(value, tuple) else value  # as a file has it
    return _code(first), f"{shown} is {given!r}{near}; give {_any(wrong, shown)}"


Place = tuple[int | str, ...]


def _understood(place: Place, first: Any, found: Sequence[tuple[Place, Any]]) -> tuple[Place, Any]:
    """The error to speak of, where the value of a key fits no member of a union: the one deepest in
    a list, if any, as the list was understood, and one of its entries was not."""
    tried = [k for k, part in enumerate(place) if _MEMBER.match(str(part))]
    if not tried:
        return place, first
    head = place[: tried[0]]
    rivals = [one for one in found if one[0][: len(head)] == head]
    deepest = max(rivals, key=lambda one: len(one[0]))
    within = any(isinstance(part, int) for part in deepest[0][len(head) :])
    return deepest if within else (place, first)


#: How pydantic names a member of a union, after the key whose value fits none.
_MEMBER = re.compile(
    r"(float|int|str|bool|(constrained|literal|function|tuple|list|dict|nullable)[-\[].*)$"
)


def _shown(place: Place, sources: Collection[str]) -> str:
    """A place as people write it: without the members of a union that were tried there, and
    without the source of the data, which is no key of its own."""
    tagged = len(place) > 2 and place[0] == "data" and place[1] in sources
    shown = ""
    for k, part in enumerate(place):
        if isinstance(part, int):
            shown += f"[{part}]"
        elif not (k == 1 and tagged) and not (k and _MEMBER.match(part)):
            shown += f".{part}" if shown else part
    return shown


#: The code and what to give, by the beginning of pydantic's name for what is wrong.
_WANTED = {
    "float": ("not-a-number", "a number"),
    "int": ("not-a-whole-number", "a whole number"),
    "bool": ("not-true-or-false", "true or false"),
    "string": ("not-text", "a text"),
    "tuple": ("not-a-list", "a list"),
    "list": ("not-a-list", "a list"),
    "dict": ("not-a-table", "a table"),
}
#: How pydantic's names end for a text or list of the wrong length.
_LENGTHS = ("too_short", "too_long")
#: The codes of values of the right type, by the beginning of pydantic's name for what is wrong.
_CODES = {
    "literal": "unknown-choice",
    "finite": "not-a-number",
    "greater": "out-of-range",
    "less": "out-of-range",
}
#: Examples of tables and lists, where a single value is a common mistake.
_EXAMPLES = {
    "data.missing": '{ "*" = "indicator" }',
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


def _code(one: Any) -> str:
    """
    >>> _code({"type": "float_type"}), _code({"type": "greater_than"}), _code({"type": "too_long"})
    ('not-a-number', 'out-of-range', 'wrong-length')
    """
    if one["type"].endswith(_LENGTHS):
        return "wrong-length"
    kind = one["type"].partition("_")[0]
    return _WANTED[kind][0] if kind in _WANTED else _CODES.get(kind, "bad-value")


def _expected(one: Any) -> str:
    """
    >>> _expected({"type": "string_too_long", "ctx": {"max_length": 1}})
    'a text of at most 1 character'
    """
    if one["type"].endswith(_LENGTHS):
        what, unit = ("text", "character") if "string" in one["type"] else ("list", "value")
        side, length = ("least", "min_length") if "short" in one["type"] else ("most", "max_length")
        count = one["ctx"][length]
        return f"a {what} of at {side} {count} {unit}{'' if count == 1 else 's'}"
    if one["type"] == "literal_error":
        return str(one["ctx"]["expected"])
    if one["type"].partition("_")[0] in _WANTED:
        return _WANTED[one["type"].partition("_")[0]][1]
    said = str(one["msg"]).removeprefix("Input should be ")
    number = "a number " if said.startswith(("greater than", "less than")) else ""
    return f"{number}{said[:1].lower()}{said[1:]}"


def _near(value: Any, wrong: Sequence[Any]) -> str:
    """A hint where a mistyped choice is meant."""
    texts = [str(one["ctx"]["expected"]) for one in wrong if one["type"] == "literal_error"]
    choices = [choice for text in texts for choice in text.split("'")[1::2]]
    return nearest(value, choices) if isinstance(value, str) else ""


#: The keys by whose value the members of a union are told apart.
_TAGS = ("source", "step")


def _sources(model: Any) -> set[str]:
    """The sources of data that a model, or a table of it, may have."""
    tops = members(model)
    below = [
        one for top in tops for f in top.model_fields.values() for one in members(f.annotation)
    ]
    fields = [one.model_fields["source"] for one in (*tops, *below) if "source" in one.model_fields]
    return {tag for field in fields for tag in typing.get_args(field.annotation)}


def known_keys(model: Any, location: Sequence[str]) -> list[str]:
    """The keys of the table at a place."""
    found = _tables_at(model, location)[:1]
    return [field.alias or name for one in found for name, field in one.model_fields.items()]


def _meaning(model: Any, location: Sequence[str]) -> str:
    """What the key at a place means, in brackets; empty where nothing says it."""
    for table in _tables_at(model, location[:-1])[:1]:
        field = table.model_fields.get(location[-1])
        if field is not None and field.description:
            first = " ".join(field.description.split()).partition(". ")[0]
            return f"; give it ({first})"
    return "; give it"


def _tables_at(model: Any, location: Sequence[str]) -> list[type[BaseModel]]:
    """The models of the table at a place, walking from the top; a tag of a union selects its
    member."""
    candidates = members(model)
    for part in location:
        found: list[type[BaseModel]] = []
        for candidate in candidates:
            fields = candidate.model_fields
            named = [f for name, f in fields.items() if part in (name, f.alias)]
            tags = [fields[tag].annotation for tag in _TAGS if tag in fields]
            if named:
                found += members(named[0].annotation)
            elif any(part in typing.get_args(tag) for tag in tags):
                found.append(candidate)
        candidates = found
    return candidates


#: What a model may stand within, in an annotation.
_HOLDERS = (typing.Union, types.UnionType, Annotated, tuple, list)


def members(annotation: Any) -> list[type[BaseModel]]:
    """The models inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in _HOLDERS:
        return [model for part in typing.get_args(annotation) for model in members(part)]
    return []
