"""pyarrow, imported when it is first used: a machine that only computes need not have it."""

from __future__ import annotations

import importlib
from typing import Any


class _Late:
    """A module that is imported when somebody asks it for something."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


pa, pc = _Late("pyarrow"), _Late("pyarrow.compute")
csv, parquet = _Late("pyarrow.csv"), _Late("pyarrow.parquet")
