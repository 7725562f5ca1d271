"""Today's package, asked in neutral words. Where its API changes, this file changes and no other
of the comparison.

The functions take what ``frozen/*.json`` has under ``given`` and answer with the keys that it has
under ``said``; a refusal is ``{"refused": code}``. As long as today's API is that of version 0.2.0
in one of them, the file that asks the old package answers for today's too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from frozen import old_api

Said = dict[str, Any]

#: The code for what today's package has no words for.
UNKNOWN = "not-expressible"


def of_mechanism(given: Mapping[str, Any]) -> Said:
    """ε of a mechanism towards each adversary (see :func:`frozen.old_api.of_mechanism`)."""
    return _answered(old_api.of_mechanism, given)


def of_history(given: Mapping[str, Any]) -> Said:
    """What a history has cost, and who may take part next (:func:`frozen.old_api.of_history`)."""
    return _answered(old_api.of_history, given)


def of_statement(given: Mapping[str, Any]) -> Said:
    """The statement of a configuration (:func:`frozen.old_api.of_statement`): numbers, and the
    names of the caveats (``frozen.old_api.CAVEATS``)."""
    return _answered(old_api.of_statement, given)


def _answered(ask: Callable[[Mapping[str, Any]], Said], given: Mapping[str, Any]) -> Said:
    """An answer; a field that today's package does not have refuses what needs it."""
    try:
        return ask(given)
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            return {"refused": UNKNOWN, "reason": str(error)}
        raise
