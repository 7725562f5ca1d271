"""Every key of a configuration: kind, default and range from the models, its sense from
``words.toml``."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from dpscaffold.algorithms import ALGORITHMS, SERVERS
from dpscaffold.config import (
    AlgorithmSettings,
    FactsSettings,
    PlanSettings,
    PrivacySettings,
    StoppingSettings,
    TaskSettings,
)
from dpscaffold.config.reference.deployment import deployment_keys
from dpscaffold.config.reference.fields import Key, Words, entry_of, model_keys
from dpscaffold.config.reference.values import NEEDED
from dpscaffold.data.config import SOURCES
from dpscaffold.data.preprocessing import STEPS
from dpscaffold.tuning.tuning import TuneSettings


def words() -> Words:
    """``words.toml`` by dotted key."""
    text = files("dpscaffold.config.reference").joinpath("words.toml").read_text(encoding="utf-8")
    found: Words = {}

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
    found += [*model_keys("task", "", TaskSettings, said)]
    named = {"name": f"{', '.join(ALGORITHMS)}, or 'my_file:factory'", "server": ", ".join(SERVERS)}
    for name, choice in named.items():
        said[f"algorithm.{name}"]["range"] = choice
    found += [*model_keys("algorithm", "", AlgorithmSettings, said), *_numbers(said)]
    found += [*model_keys("plan", "", PlanSettings, said)]
    found += [*model_keys("privacy", "", PrivacySettings, said)]
    found += [*model_keys("facts", "", FactsSettings, said)]
    found += [*model_keys("stopping", "", StoppingSettings, said)]
    found += [*model_keys("tune", "", TuneSettings, said)]
    choice, entry = " or ".join(repr(step) for step in STEPS), said["step.step"]
    found.append(Key("step.step", "", choice, NEEDED, entry["about"], entry["example"]))
    for step, kind in STEPS.items():
        found += [*model_keys("step", step, kind, said, skip=("step",))]
    return [*found, *deployment_keys(said)]


def _data(said: Words) -> Iterator[Key]:
    """The name of a source, then the keys of each."""
    choice, entry = " or ".join(repr(source) for source in SOURCES), said["data.source"]
    yield Key("data.source", "", choice, "synthetic", entry["about"], entry["example"])
    for source, model in SOURCES.items():
        yield from model_keys("data", source, model, said, skip=("source",))


def _numbers(said: Words) -> Iterator[Key]:
    """The numbers of the algorithms and of the server's optimisers: their factories' arguments."""
    for skip, table in ((0, ALGORITHMS), (1, SERVERS)):
        for place, factory in table.items():
            for name, argument in list(inspect.signature(factory).parameters.items())[skip:]:
                entry = entry_of(said, f"algorithm.{name}")
                yield Key(
                    f"algorithm.{name}",
                    place,
                    entry["range"],
                    argument.default,
                    entry["about"],
                    entry["example"],
                )
