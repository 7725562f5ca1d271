"""Values as TOML writes them, without loading anything else."""

from __future__ import annotations

import json
from typing import Any

import tomli_w

#: What represents a key that must be given.
NEEDED = "required"
#: What represents a key that may be left out and has no value then.
OMITTED = "not set"


def toml(value: Any) -> str:
    """One value as TOML.

    >>> toml(["a", 1.5]), toml({"sex": ["f", "m"]})
    ('["a", 1.5]', '{ sex = ["f", "m"] }')
    """
    if isinstance(value, dict):
        if not value:
            return "{}"
        return "{ " + ", ".join(f"{_key(k)} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return tomli_w.dumps({"value": value}).partition("= ")[2].strip()


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else json.dumps(name)


def shown(value: Any) -> str:
    """A default for reading."""
    return value if value in (NEEDED, OMITTED) else toml(value)
