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


#: ASCII with signs spelled out, under a name of its own: click takes plain ASCII for a mistake in
#: the settings of a console and would write UTF-8 to it.
PLAIN = "dpscaffold-ascii"


class _Encoder(codecs.IncrementalEncoder):
    def encode(self, text: str, final: bool = False) -> bytes:
        return text.encode("ascii", NAME)


def _plain(name: str) -> codecs.CodecInfo | None:
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
    """Let what is printed never fail for want of a letter."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is None:
            continue
        try:
            ascii_ = codecs.lookup(stream.encoding or "ascii").name == "ascii"
        except LookupError:
            ascii_ = True
        reconfigure(errors=NAME, **({"encoding": PLAIN} if ascii_ else {}))
