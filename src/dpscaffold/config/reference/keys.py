"""Every key of every configuration file.

Names, types, defaults and bounds are read from the models. The explanation is the docstring at the
field: what the key means, then ``Value:`` where the type does not say which values are allowed, and
``Example:`` with a TOML value. Nothing here imports PyTorch, so that completion is quick.
"""

from __future__ import annotations

import inspect
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dpscaffold.config.reference.values import NEEDED, OMITTED
from dpscaffold.errors import BadInput


@dataclass(frozen=True)
class Key:
    """One key: ``place`` is the source, step or algorithm that has it, empty if all have it."""

    name: str
    place: str
    kind: str
    default: Any
    about: str
    example: Any

    @property
    def table(self) -> str:
        """The table of the key.

        >>> Key("plan.rounds", "", "an integer", 100, "T.", 400).table
        'plan'
        """
        return self.name.partition(".")[0]


def keys() -> list[Key]:
    """Every key, table by table, in the order in which the models declare them."""
    from dpscaffold.algorithms import ALGORITHMS, SERVERS
    from dpscaffold.config.algorithm import AlgorithmSettings
    from dpscaffold.config.extras import FactsSettings, StoppingSettings
    from dpscaffold.config.gaussian import Gaussian
    from dpscaffold.config.personal import PersonalSettings
    from dpscaffold.config.plan import Plan
    from dpscaffold.config.secure import Secure
    from dpscaffold.config.task import TaskSettings
    from dpscaffold.data.config import SOURCES
    from dpscaffold.data.preprocessing import STEPS
    from dpscaffold.tuning.settings import TuneSettings

    source = "The source of the records; by default the paper's synthetic data."
    found = [Key("data.source", "", _either(SOURCES), "synthetic", source, "csv")]
    for name, model in SOURCES.items():
        found += model_keys("data", name, model, skip=("source",))
    found += model_keys("task", "", TaskSettings)
    choices = {"name": f"{', '.join(ALGORITHMS)}, or 'my_file:factory'"}
    choices["server"] = ", ".join(SERVERS)
    found += model_keys("algorithm", "", AlgorithmSettings, kinds=choices)
    for name, factory in (*ALGORITHMS.items(), *SERVERS.items()):
        found += argument_keys("algorithm", name, factory, skip=("base",))
    found += model_keys("plan", "", Plan)
    found += model_keys("privacy", "", Gaussian)
    found += model_keys("secure", "", Secure)
    found += model_keys("facts", "", FactsSettings)
    found += model_keys("stopping", "", StoppingSettings)
    found += model_keys("personal", "", PersonalSettings)
    found += model_keys("tune", "", TuneSettings)
    step = 'The name of the step. A name alone, such as "unit-norm" or "pca:60", uses the defaults.'
    found.append(Key("step.step", "", _either(STEPS), NEEDED, step, "pca"))
    for name, settings in STEPS.items():
        found += model_keys("step", name, settings, skip=("step",))
    return [*found, *_deployment()]


def _deployment() -> Iterator[Key]:
    """The keys of the server's plan, ``federation.toml`` and ``site.toml``."""
    from dpscaffold.deployment.protocol.agreement import SchemaSettings, SchemaStep
    from dpscaffold.deployment.provision import FederationFile
    from dpscaffold.deployment.server.config import DeploySettings
    from dpscaffold.deployment.site.data_table import SOURCES
    from dpscaffold.deployment.site.file import Policy, SecurePolicy, SiteFile

    def records(table: str) -> Iterator[Key]:
        yield Key(f"{table}.source", "", _either(SOURCES), NEEDED, "The kind of file.", "csv")
        for name, model in SOURCES.items():
            yield from model_keys(table, name, model, skip=("source",))

    yield from argument_keys("federation", "", FederationFile)
    yield from model_keys("schema", "", SchemaSettings)
    yield from model_keys("prepare", "", SchemaStep)
    yield from model_keys("deploy", "", DeploySettings)
    yield from records("evaluate")
    yield from model_keys("site", "", SiteFile, skip=("data", "policy", "secure"))
    yield from records("site.data")
    yield from model_keys("site.policy", "", Policy)
    yield from model_keys("site.secure", "", SecurePolicy)


def model_keys(
    table: str,
    place: str,
    model: type[BaseModel],
    skip: Collection[str] = (),
    kinds: typing.Mapping[str, str] | None = None,
) -> Iterator[Key]:
    """The keys that a model declares, without ``skip``.

    Args:
        table: The table, for the names of the keys.
        place: The source, step or algorithm that the model belongs to; empty if there is none.
        model: The model.
        skip: Fields that are left out.
        kinds: Descriptions of allowed values that only the caller knows, by field.
    """
    for name, field in model.model_fields.items():
        if name not in skip:
            text = next((d for d in _descriptions(model, name) if d), "")
            about, kind, example = parsed(f"{table}.{name}", text)
            kind = (kinds or {}).get(name) or kind
            kind = kind or " ".join((kind_of(field.annotation), *_bounds(field)))
            yield Key(f"{table}.{name}", place, kind, _default(field), about, example)


def _descriptions(model: type[BaseModel], name: str) -> Iterator[str | None]:
    """The docstring of a field; a field that is declared again keeps that of its parent."""
    for parent in model.__mro__:
        if issubclass(parent, BaseModel) and name in parent.model_fields:
            yield parent.model_fields[name].description


def argument_keys(
    table: str, place: str, factory: Callable[..., Any], skip: Collection[str] = ()
) -> Iterator[Key]:
    """The keys that are the arguments of a function or of a dataclass, which explains them in the
    section ``Args:`` of its docstring."""
    section = (inspect.getdoc(factory) or "").partition("Args:\n")[2].partition("\n\n")[0]
    said = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE))
    for name, argument in inspect.signature(factory).parameters.items():
        if name not in skip:
            about, kind, example = parsed(f"{table}.{name}", said.get(name, ""))
            needed = argument.default is inspect.Parameter.empty
            default = NEEDED if needed else _plain(argument.default)
            yield Key(f"{table}.{name}", place, kind, default, about, example)


def parsed(name: str, text: str) -> tuple[str, str, Any]:
    """The parts of a docstring: what a key means, its values (empty if not given), an example.

    >>> parsed("plan.rounds", "T, the number of rounds. Value: 1 or more. Example: ``400``")
    ('T, the number of rounds.', '1 or more', 400)
    """
    parts = re.fullmatch(r"(.*?)(?: Value: (.*)\.)? Example: ``(.*)``", " ".join(text.split()))
    if parts is None:
        raise BadInput(
            "key-not-explained",
            f"{name} is not explained; write a docstring with an example at its field",
        )
    about, kind, example = parts.groups()
    return about, kind or "", tomllib.loads(f"example = {example}")["example"]


def _either(names: Collection[str]) -> str:
    return " or ".join(repr(name) for name in names)


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return NEEDED
    value = field.get_default(call_default_factory=True)
    if isinstance(field.json_schema_extra, dict):
        value = field.json_schema_extra.get("default", value)  # what the software puts there
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
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Path: "a path",
}
_PLURALS = {"an integer": "integers", "a number": "numbers", "a string": "strings"}


def kind_of(annotation: Any) -> str:
    """A type in words.

    >>> kind_of(int | None), kind_of(tuple[str, ...])
    ('an integer', 'a list of strings')
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _NAMES:
        return _NAMES[annotation]
    if origin is typing.Literal:
        return _either(arguments)
    if origin in (typing.Union, types.UnionType):
        parts = dict.fromkeys(kind_of(part) for part in arguments if part is not type(None))
        return " or ".join(parts)
    if origin in (tuple, list):
        inner = [part for part in arguments if part is not Ellipsis]
        said = kind_of(inner[0]) if inner else ""
        return f"a list of {_PLURALS.get(said, said)}" if inner else "a list"
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
            said.append("one character")
    if said:
        yield f"({', '.join(said)})"
