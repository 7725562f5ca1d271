"""What is written next to a result, in plain values: JSON, TOML, and what made it."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from typing import Any

import tomli_w
import torch


def versions() -> dict[str, str]:
    """What made a run."""
    import numpy

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


def to_toml(tables: Mapping[str, Any]) -> str:
    """Tables as TOML text."""
    return tomli_w.dumps(_without_none(tables))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
