"""What is written next to a result, in plain values: JSON, TOML, and what made it."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from dpscaffold.errors import BadInput


def versions() -> dict[str, str]:
    """What made a run."""
    import numpy
    import torch

    from dpscaffold import __version__

    return {
        "dpscaffold": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
    }


def plain(value: Any) -> Any:
    """JSON values only: infinities and NaN become None, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file of a run; None where there is no file."""
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(
            "run-damaged",
            f"{path} cannot be read as a JSON object ({error}); restore it or start a new run",
        ) from error


def to_toml(tables: Mapping[str, Any]) -> str:
    """Tables as TOML text."""
    return tomli_w.dumps(_without_none(tables))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
