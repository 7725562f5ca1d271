"""300 random histories: ε given who took part and over the draw, caps, parts, shared budgets."""

from __future__ import annotations

from collections.abc import Iterator

from frozen.compare import adapter
from frozen.compare.both import answered
from frozen.compare.difference import Difference, differences


def compare(quick: bool) -> Iterator[Difference]:
    """The numbers of every history; a quick comparison takes every third."""
    for name, old, new in answered("histories", adapter.of_history, every=3 if quick else 1):
        keys = [key for key in old if not key.endswith("_by")]
        yield from differences(f"histories/{name}", old, new, keys)
