"""300 random histories: ε given who took part and over the draw, caps, parts, shared budgets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from frozen import make
from frozen.compare import adapter
from frozen.compare.both import answered
from frozen.compare.difference import Difference, differences

#: Not compared: the cap of a run of several parts, which no statement quotes as such.
LEFT_OUT = ("cap",)


def compare(quick: bool) -> Iterator[Difference]:
    """The numbers of every history; a quick comparison takes every third."""
    again = {case["id"] for case in make.read("histories") if _runs_again(case["given"])}
    for name, old, new in answered("histories", adapter.of_history, every=3 if quick else 1):
        keys = [key for key in old if not key.endswith("_by") and key not in LEFT_OUT]
        tag = ".again" if name in again else ""
        yield from differences(f"histories/{name}{tag}", old, new, keys)


def _runs_again(given: Any) -> bool:
    """Whether a round of this history was run again with fresh noise."""
    if isinstance(given, dict):
        return bool(given.get("again")) or any(map(_runs_again, given.values()))
    return isinstance(given, list) and any(map(_runs_again, given))
