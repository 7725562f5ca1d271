"""Consoles that have no Greek: what is printed to them is spelled out
(:mod:`~dpscaffold.report.spelling`)."""

from __future__ import annotations

import codecs
import sys
from functools import cache
from typing import Any

from dpscaffold.report.spelling import PLAIN, spelled


def respelled(error: UnicodeError) -> tuple[str, int]:
    """What a codec asks for signs that it lacks.

    >>> import dpscaffold.cli.words
    >>> "ε ≤ 3".encode("ascii", errors=dpscaffold.cli.words.NAME).decode()
    'epsilon <= 3'
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    before = error.object[error.start - 1] if error.start else ""
    words = spelled(error.object[error.start : error.end], before)
    return words.encode("ascii", "replace").decode(), error.end


NAME = "dpscaffold-spelled"
codecs.register_error(NAME, respelled)


class _Encoder(codecs.IncrementalEncoder):
    def encode(self, text: str, final: bool = False) -> bytes:
        return text.encode("ascii", NAME)


def _plain(name: str) -> codecs.CodecInfo | None:
    """ASCII under a name of its own: click takes plain ASCII for a mistake in the settings of a
    console and would write UTF-8 to it."""
    if name.replace("_", "-") != PLAIN:
        return None
    ascii_ = codecs.lookup("ascii")
    return codecs.CodecInfo(
        lambda text, errors="strict": (text.encode("ascii", NAME), len(text)),
        ascii_.decode,
        incrementalencoder=_Encoder,
        incrementaldecoder=ascii_.incrementaldecoder,
        name=PLAIN,
    )


codecs.register(_plain)


def speak_plainly() -> None:
    """Let what is printed never fail because a terminal lacks a character."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is None:
            continue
        try:
            ascii_ = codecs.lookup(stream.encoding or "ascii").name == "ascii"
        except LookupError:
            ascii_ = True
        reconfigure(errors=NAME, **({"encoding": PLAIN} if ascii_ else {}))
        if ascii_:
            _spell_before_layout()


@cache
def _spell_before_layout() -> None:
    """Let Rich measure words as they will be written: a table laid out with ε and written with
    epsilon would burst its columns."""
    from rich.console import Console

    plain = Console.render_str

    def render_str(self: Console, text: str, **style: Any) -> Any:
        return plain(self, spelled(text), **style)

    Console.render_str = render_str  # type: ignore[method-assign]
