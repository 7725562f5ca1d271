"""Words for terminals that have no Greek: ε is written as epsilon where it cannot be shown."""

from __future__ import annotations

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
    "·": "*",
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

#: The name of the encoding that ASCII consoles are given: ASCII with signs spelled out.
PLAIN = "dpscaffold-ascii"


def spelled(text: str, before: str = "") -> str:
    """A text in ASCII, as far as its signs have words; ``before`` is what stands ahead of it.

    Where a name was cut a single stop represents the rest, so that columns keep their width.

    >>> spelled("ε ≤ 3, …"), spelled("prec…")
    ('epsilon <= 3, ...', 'prec.')
    """
    if text.isascii():
        return text
    signs = []
    for sign in text:
        cut = sign == "…" and before not in ("", " ")
        signs.append("." if cut else SPELLED.get(sign, sign))
        before = sign
    return "".join(signs)


def as_written(text: str) -> str:
    """A text as the terminal will show it, for whoever measures it."""
    plain = (getattr(sys.stdout, "encoding", None) or "").replace("_", "-") == PLAIN
    return spelled(text) if plain else text
