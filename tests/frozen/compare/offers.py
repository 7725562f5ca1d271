"""What a site books for the offers of 0.2.0's tests: participations, ε, δ, and what it refuses.

As long as today's API is that of version 0.2.0 here, the file that asked the old package asks
today's too. Keys that are gone are in ``renames.toml``, as for configurations.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from frozen import make, offers
from frozen.compare.both import same
from frozen.compare.configurations import RENAMES, renamed
from frozen.compare.difference import Difference, differences

#: How many participations fewer may be permitted, as a share of them and in all: ε may be a little
#: larger than it was, and a budget then holds a little less.
FEWER, LEAST_FEWER = 0.005, 1


def compare(quick: bool) -> Iterator[Difference]:
    """Every offer; a few seconds, so a quick comparison leaves none out."""
    renames = tomllib.loads(RENAMES.read_text(encoding="utf-8"))
    for case in make.read("offers"):
        yield from of_case(f"offers/{case['id']}", case["given"], case["said"], renames)


def of_case(
    name: str, given: dict[str, Any], old: dict[str, Any], renames: dict[str, Any]
) -> Iterator[Difference]:
    """The terms of an offer, and what is booked for them."""
    if "offer" in given:
        given = {**given, "offer": renamed(given["offer"], renames)}
    try:
        new = offers.of_offer(given, old.get("participations"))
    except ValueError as error:
        yield Difference(name, old, str(error), "cannot be asked any more")
        return
    if old.get("refused") == "policy-noise" and "refused" not in new:
        least = given["policy"]["min_noise"]
        yield Difference(f"{name}/min_noise", least, None, "a policy's least noise was kept")
        return
    if "terms" in new:
        why = _other_terms(given["terms"], new["terms"])
        yield Difference(f"{name}/terms", given["terms"], new["terms"], why)
    yield from differences(name, old, new, ["epsilon", "alone", "delta"])
    if "participations" in old and "participations" in new:
        before, now = old["participations"], new["participations"]
        yield Difference(f"{name}/participations", before, now, _permitted(before, now))


def _other_terms(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Which numbers of the terms are others; those that are gone are none."""
    other = [key for key, value in new.items() if not same(value, _known(old.get(key), value))]
    return f"other terms: {', '.join(other)}" if other else ""


def _known(old: Any, new: Any) -> Any:
    """What was said, of a table without the keys that are gone."""
    tables = isinstance(old, dict) and isinstance(new, dict)
    return {key: value for key, value in old.items() if key in new} if tables else old


def _permitted(old: int, new: int) -> str:
    if new > old:
        return "more participations than were permitted"
    fewer = max(LEAST_FEWER, FEWER * old)
    return "" if new >= old - fewer else "fewer participations than were permitted"
