"""Frozen dataclasses that are written as JSON objects and read back from them."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from dpscaffold.privacy.errors import PrivacyError


def optional() -> Any:
    """The default of a field that is written only where it has a value.

    A field with the default None instead is written as null.
    """
    return field(default=None, metadata={"optional": True})


@dataclass(frozen=True, eq=False)
class JsonRecord(Mapping[str, Any]):
    """Base of the objects that are written as JSON: the fields of the dataclass are the keys.

    The object can be read like the dictionary that it is written as: ``record["epsilon"]`` is
    ``record.to_json()["epsilon"]``. Two objects are equal where their JSON is.

    :meth:`from_json` checks the type of every value. A key that no field has, of a file of another
    version, is kept in ``unknown`` and written again; :attr:`REST` can name a field that takes
    these keys instead.

    >>> @dataclass(frozen=True, eq=False)
    ... class Point(JsonRecord):
    ...     x: float
    ...     label: str | None = optional()
    >>> Point(1.5).to_json(), Point.from_json({"x": 2, "colour": "red"})["colour"]
    ({'x': 1.5}, 'red')
    >>> Point.from_json({"x": "far"})
    Traceback (most recent call last):
    dpscaffold.privacy.errors.PrivacyError: x is 'far', and a number is expected
    """

    #: The field that takes the keys that no other field has.
    REST: ClassVar[str] = "unknown"

    unknown: Mapping[str, Any] = field(default_factory=dict, kw_only=True, repr=False)

    def to_json(self) -> dict[str, Any]:
        """The JSON object: plain dictionaries, lists, text and numbers."""
        values = {
            name: _plain(getattr(self, name))
            for name, one in _keys(type(self)).items()
            if self._is_written(one)
        }
        rest: Mapping[str, Any] = getattr(self, self.REST)
        return {**values, **_plain(rest)}

    @classmethod
    def from_json(cls, values: Any, where: str = "") -> Self:
        """The inverse of :meth:`to_json`; ``where`` says in messages what is read."""
        prefix = f"{where}." if where else ""
        if not isinstance(values, Mapping):
            raise _unexpected(where or cls.__name__, values, "an object")
        hints = _hints(cls)
        names = _keys(cls).keys()
        found = {
            name: read_value(hints[name], values[name], prefix + name)
            for name in names
            if name in values
        }
        rest = {name: value for name, value in values.items() if name not in names}
        found[cls.REST] = read_value(hints[cls.REST], rest, where or cls.__name__)
        missing = [one.name for one in fields(cls) if _is_required(one) and one.name not in found]
        if missing:
            raise PrivacyError("missing-key", f"{where or cls.__name__} lacks {', '.join(missing)}")
        return cls(**found)

    def _is_written(self, one: Field[Any]) -> bool:
        """Whether this field is part of the JSON object."""
        return not one.metadata.get("optional") or getattr(self, one.name) is not None

    def __getitem__(self, key: str) -> Any:
        one = _keys(type(self)).get(key)
        if one is not None and self._is_written(one):
            return _plain(getattr(self, key))
        return self.to_json()[key]

    def items(self) -> ItemsView[str, Any]:
        """The keys and values of the JSON object."""
        return self.to_json().items()

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_json())

    def __len__(self) -> int:
        return len(self.to_json())


@cache
def _keys(cls: type[JsonRecord]) -> dict[str, Field[Any]]:
    """The fields that are keys of the JSON object, by name."""
    return {one.name: one for one in fields(cls) if one.name not in ("unknown", cls.REST)}


@cache
def _hints(cls: type[JsonRecord]) -> dict[str, Any]:
    return get_type_hints(cls)


def _is_required(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _plain(value: Any) -> Any:
    """A value as it is written: records and mappings as dictionaries, sequences as lists."""
    if value is None or isinstance(value, float | int | str):
        return value
    if isinstance(value, JsonRecord):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.to_dict() if hasattr(value, "to_dict") else value


def read_value(hint: Any, value: Any, name: str) -> Any:
    """A JSON value as the type that a field has."""
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        return _read_union(get_args(hint), value, name)
    if origin in (tuple, Mapping):
        return _read_many(hint, value, name)
    if hasattr(hint, "from_json"):
        return hint.from_json(value, name)
    if hasattr(hint, "from_dict"):
        return hint.from_dict(value)
    return _read_plain(hint, value, name)


def _read_union(options: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and NoneType in options:
        return None
    kinds = [option for option in options if option is not NoneType]
    for option in kinds[:-1]:
        try:
            return read_value(option, value, name)
        except PrivacyError:
            continue
    return read_value(kinds[-1], value, name)


def _read_many(hint: Any, value: Any, name: str) -> Any:
    """A tuple from a list, or a mapping from an object, whose keys may be integers."""
    kinds = get_args(hint)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise _unexpected(name, value, "a list")
        each = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else kinds
        if len(each) != len(value):
            raise _unexpected(name, value, f"a list of {len(each)}")
        items = zip(each, value, strict=True)
        return tuple(read_value(k, item, f"{name}[{i}]") for i, (k, item) in enumerate(items))
    if not isinstance(value, Mapping):
        raise _unexpected(name, value, "an object")
    as_key = int if kinds[0] is int else str
    try:
        keys = [as_key(key) for key in value]
    except ValueError:
        raise _unexpected(name, value, "an object with whole numbers as keys") from None
    found = [read_value(kinds[1], item, f"{name}.{key}") for key, item in value.items()]
    return dict(zip(keys, found, strict=True))


_WORDS = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


def _read_plain(hint: Any, value: Any, name: str) -> Any:
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise _unexpected(name, value, f"one of {', '.join(map(repr, get_args(hint)))}")
    right = type(value) in ((int, float) if hint is float else (hint,))
    if not right:
        raise _unexpected(name, value, _WORDS.get(hint, str(hint)))
    return value


def _unexpected(name: str, value: Any, kind: str) -> PrivacyError:
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
    return PrivacyError("wrong-type", f"{name} is {shown}, and {kind} is expected")
