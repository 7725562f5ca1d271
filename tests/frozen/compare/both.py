"""Old and new side by side on the frozen cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from frozen import make, old
from frozen.compare.difference import Difference

Case = dict[str, Any]
#: How far the old package may be from its frozen answers on another processor.
LAST_BITS = 1e-6


def answered(
    kind: str, ask: Callable[[Mapping[str, Any]], dict[str, Any]], every: int
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, old answer and new answer of each ``every``-th frozen case.

    The old package runs in a process of its own; where it cannot be built, its frozen answers
    stand for it.
    """
    cases = make.read(kind)[::every]
    try:
        process = make.start_old(kind, [case["given"] for case in cases])
    except old.NotThere as error:
        print(f"{error}: its frozen answers are compared instead")
        said = [case["said"] for case in cases]
        new = [ask(case["given"]) for case in cases]
    else:
        new = [ask(case["given"]) for case in cases]
        said = make.answers(process)
        for case, one in zip(cases, said, strict=True):
            if not same(one, case["said"]):
                raise RuntimeError(
                    f"{kind}/{case['id']}: the old package does not say what is frozen; make the "
                    f"file again (python -m frozen.make {kind})"
                )
    for case, before, now in zip(cases, said, new, strict=True):
        yield case["id"], before, now


def same(one: Any, other: Any) -> bool:
    """Whether two answers agree but for the last bits of their numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= LAST_BITS * max(1.0, abs(one))
    return bool(one == other)


__all__ = ["Difference", "answered", "same"]
