"""300 random mechanisms: ε towards each adversary, of a cap and of participations."""

from __future__ import annotations

from collections.abc import Iterator

from frozen.compare import adapter
from frozen.compare.both import answered
from frozen.compare.difference import Difference, differences

#: Not compared: which bound gave an ε, how the old package stores a mechanism, and the number that
#: the paper prints, which is no guarantee.
LEFT_OUT = ("stored", "published", "reason")


def compare(quick: bool) -> Iterator[Difference]:
    """The numbers of every mechanism; a quick comparison takes every third."""
    for name, old, new in answered("mechanisms", adapter.of_mechanism, every=3 if quick else 1):
        keys = [key for key in old if key not in LEFT_OUT and not key.endswith("_by")]
        yield from differences(f"mechanisms/{name}", old, new, keys)
