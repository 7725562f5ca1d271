"""Statements of plans and of small runs: every number, and what they leave open."""

from __future__ import annotations

from collections.abc import Iterator

from frozen.compare import adapter
from frozen.compare.both import answered
from frozen.compare.difference import Difference, differences

#: Not compared: σ_g (its ε is), and the words of a refusal and of a caveat. The rest is compared in
#: histories and mechanisms: ε as planned, of a cap, user by user, and how often users took part.
LEFT_OUT = (
    *("noise", "reason", "sentences", "caveats"),
    *("as_planned", "cap", "by_user", "users_by_participations"),
)


def compare(quick: bool) -> Iterator[Difference]:
    """The numbers of every statement; a quick comparison takes every third."""
    for name, old, new in answered("statements", adapter.of_statement, every=3 if quick else 1):
        keys = [key for key in old if key not in LEFT_OUT and not key.endswith("_by")]
        yield from differences(f"statements/{name}", old, new, keys)
        before, now = old.get("caveats", []), new.get("caveats", [])
        missing = sorted(set(before) - set(now))
        wrong = f"without the caveat {missing[0]!r}" if missing and "refused" not in new else ""
        yield Difference(f"statements/{name}/caveats", before, now, wrong)
