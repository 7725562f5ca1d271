"""Which texts of a column seem to stand for a missing value, for whoever checks a draft.

A column that holds numbers, or dates of one form, but for texts that say nothing ("?", "k. A.") is
one of numbers with gaps. A text with a digit ("<5", "12 kg") says something and is never taken for
a gap, and neither is a number: one such as 9999 is pointed out where it stands far from the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from dpscaffold.data.tables.cell_kinds import kinds, numbers_in
from dpscaffold.data.tables.missing import BLANKS

#: Words for nothing, without their blanks and dots; what holds no letter and no digit is one too.
_WORDS = """
na n/a nan none null nil nul unknown unk ukn missing miss notknown notavailable notapplicable
notdone notmeasured notrecorded nd n/d nr n/r nk n/k ka k/a keineangabe keineangaben unbekannt
fehlt fehlend nichtbekannt nichterhoben nv n/v inconnu inconnue manquant nc n/c nsp nonrenseigné
sconosciuto ignoto mancante desconocido sindato sindatos s/d desconhecido onbekend ontbreekt
ukendt okänd ukjent tuntematon neznámé nieznane brak
"""
WORDS = frozenset(_WORDS.split())
#: How many texts that are no such word may be gaps, and in which share of the cells at most.
MOST_OTHERS, LARGEST_SHARE = 2, 0.1
#: Numbers that files write where there is none; each is pointed out from so many cells on.
SENTINELS = (*(-9.0, -99.0, -999.0, -9999.0, -99999.0), *(99.0, 999.0, 9999.0, 99999.0, 999999.0))
LEAST_CELLS = 3


def is_word_for_nothing(text: str) -> bool:
    """Whether a text says by itself that there is nothing.

    >>> [is_word_for_nothing(text) for text in ("?", "k. A.", "Unknown", "low", "+")]
    [True, True, True, False, False]
    """
    bare = re.sub(r"[\s._]", "", text.casefold())
    signs = not any(sign.isalnum() for sign in text) and "+" not in text
    return bare in WORDS or (signs and text.isprintable() and bool(text.strip(BLANKS)))


def markers_in(cells: Sequence[str | None]) -> dict[str, int]:
    """The texts that seem to stand for a missing value in a column of numbers or dates, and in how
    many cells; none where the column is something else, or lacks nothing.

    >>> markers_in(["1", "2", "?", "3", "?"])
    {'?': 2}
    >>> markers_in(["1", "2", "<5", "3", "<5"]), markers_in(["low", "?", "high"])
    ({}, {})
    """
    texts = Counter(cell.strip(BLANKS) for cell in cells if cell is not None)
    total = sum(texts.values())
    for _, fits in kinds():
        found = _strange(texts, total, fits)
        if found is not None:
            return found
    return {}


def _strange(texts: Counter[str], total: int, fits: Callable[[str], bool]) -> dict[str, int] | None:
    """What does not fit, where all of it may be gaps and the rest tells something."""
    found: dict[str, int] = {}
    others = 0
    for text, count in texts.items():
        if fits(text):
            continue
        found[text] = count
        if is_word_for_nothing(text):
            continue
        others += 1
        says = any(sign.isdigit() for sign in text) or not text.isprintable()
        if says or count < 2 or others > MOST_OTHERS or count > LARGEST_SHARE * total:
            return None
    return found if len(texts) - len(found) >= 2 else None


def pointed_out(cells: Sequence[str | None]) -> dict[str, int]:
    """Values that may stand for a missing one, which nobody should take for granted: among numbers
    those that files use for it, far from all others; among texts a word for nothing.

    >>> pointed_out(["70", "82", "9999", "64", "9999", "9999"]), pointed_out(["yes", "no", "?"])
    ({'9999': 3}, {'?': 1})
    """
    there = [cell.strip(BLANKS) for cell in cells if cell is not None]
    numbers = numbers_in(there)
    if numbers is not None:
        return {f"{value:g}": n for value, n in _far(numbers).items()}
    texts = Counter(there)
    if any("+" in text for text in texts):  # then a minus is its counterpart
        return {}
    return {text: count for text, count in texts.items() if is_word_for_nothing(text)}


def _far(numbers: np.ndarray) -> dict[float, int]:
    """Sentinels of at least some cells that stand apart: negative ones where nothing else is
    negative, others where the rest reaches no third of them."""
    usual = numbers[~np.isin(numbers, SENTINELS)]
    if not len(usual):
        return {}
    counts = {value: int((numbers == value).sum()) for value in SENTINELS}
    return {
        value: count
        for value, count in counts.items()
        if count >= LEAST_CELLS
        and (usual.min() >= 0 if value < 0 else np.abs(usual).max() <= value / 3)
    }
