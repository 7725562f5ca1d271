"""What a test expects of a refusal: its code, and the values that its sentence names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dpscaffold.deployment.protocol.messages import REASONS, Refused
from dpscaffold.errors import BadInput

#: The page that lists all codes, but for those of a site's answers.
PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


def listed_codes() -> dict[str, str]:
    """The codes of the page, each with what is wrong."""
    text = PAGE.read_text(encoding="utf-8").partition("## What a site answers")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", text, re.M)
    assert len(dict(rows)) == len(rows), "a code is listed twice"
    return dict(rows)


KNOWN = {*listed_codes(), *REASONS}


@contextmanager
def refuses(expected: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """The block is refused with a code.

    Args:
        expected: The code, such as ``"unknown-column"``, or several separated by ``|``. After a
            colon comes what the sentence names, in this order and separated by ``…``:
            ``"out-of-range: plan.rounds is 0"``.
    """
    listed, _, named = expected.partition(": ")
    codes = listed.split("|")
    assert KNOWN.issuperset(codes), f"{listed} is not in {PAGE.name}"
    with pytest.raises((BadInput, Refused)) as caught:
        yield caught
    assert caught.value.code in codes, f"{caught.value!r} is not {listed}"
    pattern = ".*".join(re.escape(part) for part in named.split(" … "))
    assert re.search(pattern, str(caught.value), re.S), f"{caught.value} does not name {named}"
