"""Words for terminals that have no Greek: ε is written as epsilon where it cannot be shown."""

from __future__ import annotations

import codecs
import sys

#: How a sign is spelled where the terminal's encoding lacks it.
SPELLED = {
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "δ": "delta",
    "ε": "epsilon",
    "η": "eta",
    "λ": "lambda",
    "μ": "mu",
    "σ": "sigma",
    "Δ": "Delta",
    "Σ": "sum",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "≈": "~",
    "×": "x",
    "·": "-",
    "−": "-",
    "–": "-",
    "—": "-",
    "…": "...",
    "→": "->",
    "←": "<-",
    "∞": "inf",
    "⌊": "floor(",
    "⌋": ")",
    "√": "sqrt ",
    "’": "'",
    "‘": "'",
    "“": '"',
    "”": '"',
    "ℓ": "l",
    "²": "^2",
    "⁻": "-",
    "░": ".",
    "▒": ":",
    "▓": "*",
    "█": "#",
    "₀": "0",
    "₁": "1",
    "₂": "2",
    "ö": "oe",
    "ü": "ue",
    "ä": "ae",
    "é": "e",
    "è": "e",
}


def spelled(error: UnicodeError) -> tuple[str, int]:
    """What a codec asks for signs that it lacks.

    >>> import dpscaffold.cli.words
    >>> "ε ≤ 3".encode("ascii", errors=dpscaffold.cli.words.NAME).decode()
    'epsilon <= 3'
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(SPELLED.get(sign, "?") for sign in signs), error.end


NAME = "dpscaffold-spelled"
codecs.register_error(NAME, spelled)


def speak_plainly() -> None:
    """Let what is printed never fail for want of a letter."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=NAME)
