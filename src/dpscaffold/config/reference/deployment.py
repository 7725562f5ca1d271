"""The keys of a deployment: the server's plan, ``federation.toml`` and ``site.toml``."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

from dpscaffold.config.reference.fields import Key, Words, entry_of, kind_of, model_keys
from dpscaffold.config.reference.values import NEEDED
from dpscaffold.deployment.protocol.agreement import PublicStep, SchemaSettings
from dpscaffold.deployment.provision import FederationFile
from dpscaffold.deployment.server.config import DeploySettings
from dpscaffold.deployment.site.file import Policy, SiteFile
from dpscaffold.deployment.site.reading import SOURCES


def deployment_keys(said: Words) -> Iterator[Key]:
    """Every key, in the order in which the files are written."""
    yield from _federation(said)
    yield from model_keys("schema", "", SchemaSettings, said)
    yield from model_keys("prepare", "", PublicStep, said)
    yield from model_keys("deploy", "", DeploySettings, said)
    yield from _records("evaluate", said)
    yield from model_keys("site", "", SiteFile, said, skip=("data", "policy"))
    yield from _records("site.data", said)
    yield from model_keys("site.policy", "", Policy, said)


def _federation(said: Words) -> Iterator[Key]:
    kinds = typing.get_type_hints(FederationFile)
    for field in dataclasses.fields(FederationFile):
        entry = entry_of(said, f"federation.{field.name}")
        needed = field.default is dataclasses.MISSING
        default = NEEDED if needed else field.default
        yield Key(
            f"federation.{field.name}",
            "",
            entry.get("range") or kind_of(kinds[field.name]),
            list(default) if isinstance(default, tuple) else default,
            entry["about"],
            entry["example"],
        )


def _records(table: str, said: Words) -> Iterator[Key]:
    """A table of records that is read by the schema: at a site, or the server's public test."""
    entry = said["records.source"]
    choice = " or ".join(repr(source) for source in SOURCES)
    yield Key(f"{table}.source", "", choice, NEEDED, entry["about"], entry["example"])
    for source, model in SOURCES.items():
        for name in sorted({*model.model_fields} - {"source"}, reverse=True):
            entry = entry_of(said, f"records.{name}")
            default = entry.get("default", NEEDED)
            yield Key(
                f"{table}.{name}", source, entry["range"], default, entry["about"], entry["example"]
            )
