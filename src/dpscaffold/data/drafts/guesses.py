"""What the values of a column seem to be: numbers, dates, NA strings, labels or identifiers.

Guesses are for whoever checks a draft or reads a warning; no record is read by them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from dpscaffold.data.tables.cells import refuse_two_readings, same_values
from dpscaffold.data.tables.codec import by_value
from dpscaffold.data.tables.missing import BLANKS
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Target

_DAYS = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%Y%m%d")
_TIMES = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%d.%m.%Y %H:%M", "%Y-%m-%d %H:%M")
_MORE = ("%Y-%m-%dT%H:%M:%SZ", "%d/%m/%Y %H:%M", "%d-%m-%Y", "%d.%m.%y", "%d/%m/%y", "%m/%d/%y")
_NAMED = ("%d-%b-%Y", "%d%b%Y", "%d %b %Y", "%d-%b-%y", "%b %d, %Y", "%d %B %Y", "%B %d, %Y")
_REST = ("%Y-%m-%dT%H:%M:%S%z", "%m/%d/%Y %H:%M", "%m/%d/%Y %I:%M %p", "%d-%b-%Y %H:%M:%S")
#: The forms in which dates are looked for, in this order.
FORMS = (*_DAYS, *_TIMES, *_MORE, *_NAMED, *_REST)
#: How many forms of one column are looked for.
MOST_FORMS = 4


def numbers_in(cells: Sequence[str | None]) -> np.ndarray | None:
    """The cells as numbers, or None where one is not.

    >>> numbers_in(["1.5", None]), numbers_in(["1.5", "?"])
    (array([1.5]), None)
    """
    try:
        found = np.array([float(cell) for cell in cells if cell is not None])
    except ValueError:
        return None
    return found if np.isfinite(found).all() else None


_GROUPED = re.compile(r"[+-]?\d{1,3}(?P<sign>[.,' \u00a0\u202f’])\d{3}(?P=sign)?.*")
_GROUPS = re.compile(r"[+-]?\d{1,3}([.,' \u00a0\u202f’]\d{3})*([.,]\d+)?")


def in_thousands(cells: Sequence[str]) -> str:
    """The first number of a column that is written with a thousands separator, where the column
    holds numbers alone; else nothing.

    >>> in_thousands(["981,50", "1.240,00"]), in_thousands(["1.240,00", "a"])
    ('1.240,00', '')
    """
    if not all(_GROUPS.fullmatch(cell) for cell in cells):
        return ""
    return next((cell for cell in cells if _GROUPED.fullmatch(cell)), "")


def kinds() -> Iterator[tuple[str, Callable[[str], bool]]]:
    """What a column may hold, in words, and whether a cell fits."""
    yield "numbers", _is_number
    for form in FORMS:
        yield f"dates of the form {form}", partial(_is_date, form)
    yield "dates", _is_any_date


def but_for(cells: Sequence[str]) -> str:
    """Why a column that nearly holds numbers, or dates of one form, is neither."""
    for what, fits in kinds():
        strange = list(islice((cell for cell in cells if not fits(cell)), len(cells) // 10 + 1))
        different = list(dict.fromkeys(strange))
        if len(strange) <= len(cells) // 10 and len(different) < 10:
            telling = sorted(different, key=lambda cell: not any(sign.isdigit() for sign in cell))
            shown = ", ".join(f"'{_printed(cell)}'" for cell in telling[:3])
            return (
                f"{what}, but for {shown}; leave such cells empty, or name them in na_values if "
                f"they mean missing, and it can be used"
            )
    return ""


def _printed(cell: str) -> str:
    """The beginning of a cell as one line can show it."""
    return "".join(
        sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in cell[:20]
    )


def is_compact(cells: Sequence[str]) -> bool:
    """Whether integers are dates written without signs, such as 20240131."""
    return all(re.fullmatch(r"(19|20)\d{6}", cell) for cell in cells)


def forms_of(cells: Sequence[str]) -> tuple[str, ...]:
    """The forms of dates that fit every cell, as few as possible; none where the cells are no
    dates, or where a text could be two days.

    >>> forms_of(["31.01.2024", "2024-02-01"]), forms_of(["31/01/2024", "01/31/2024"])
    (('%Y-%m-%d', '%d.%m.%Y'), ())
    """
    found: list[str] = []
    left = [*dict.fromkeys(cells)]
    if left and not _is_any_date(left[0]):  # most columns are no dates, and this tells at once
        return ()
    while left and len(found) < MOST_FORMS:
        fitting = {form: [c for c in left if _is_date(form, c)] for form in FORMS}
        best = max(FORMS, key=lambda form: len(fitting[form]))
        if not fitting[best]:
            return ()
        found.append(best)
        left = [cell for cell in left if not _is_date(best, cell)]
    try:
        refuse_two_readings("", tuple(found))
    except BadInput:
        return ()
    return () if left else tuple(found)


def _is_any_date(cell: str) -> bool:
    return any(_is_date(form, cell) for form in FORMS)


def _is_number(cell: str) -> bool:
    return numbers_in([cell]) is not None


def _is_date(form: str, cell: str) -> bool:
    try:
        datetime.strptime(cell, form)
    except ValueError:
        return False
    return True


#: Words for nothing, without their blanks and dots; what holds no letter and no digit is one too.
_WORDS = """
na n/a nan none null nil nul unknown unk ukn missing miss notknown notavailable notapplicable
notdone notmeasured notrecorded nd n/d nr n/r nk n/k ka k/a keineangabe keineangaben unbekannt
fehlt fehlend nichtbekannt nichterhoben nv n/v inconnu inconnue manquant nc n/c nsp nonrenseigné
sconosciuto ignoto mancante desconocido sindato sindatos s/d desconhecido onbekend ontbreekt
ukendt okänd ukjent tuntematon neznámé nieznane brak
"""
WORDS = frozenset(_WORDS.split())
#: How many texts that are no such word may be missing values, and in which share of the cells at
#: most.
MOST_OTHERS, LARGEST_SHARE = 2, 0.1
#: Numbers that files write where there is none; each is pointed out from this many cells on.
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
    """The texts that seem to represent a missing value in a column of numbers or dates, and in how
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
    """What does not fit, where all of it may be missing values and the rest tells something."""
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
    """Values that may represent a missing one, which nobody should take for granted: among numbers
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


#: A label that holds numbers with more values than this is taken for a number, not for classes.
MOST_CLASSES = 20


def target_in(path: Path, counts: Mapping[str, Counter[str]]) -> Target:
    """What label columns hold, by how many rows hold each value. A label with one value is
    refused."""
    if len(counts) > 1:
        return Target("labels", tuple(counts))
    ((name, found),) = counts.items()
    numbers = numbers_in(list(found.elements()))
    others = {other for group in same_values(found).values() for other in group}
    classes = [value for value in found if value not in others]
    if len(classes) < 2:
        held = f"holds a single value, '{classes[0]}'" if classes else "is empty"
        raise BadInput(
            "single-class",
            f"{path}: the label column '{name}' {held}, so there is nothing to learn; name another "
            f"with --label COLUMN",
        )
    if numbers is None or not is_measured(numbers):
        return Target("class", tuple(sorted(classes, key=by_value)))
    low, high = rounded_range(numbers)
    return Target("number", low=low, high=high)


def described_label(counts: Counter[str], target: Target) -> str:
    """The values of a label and how many rows hold each, or the range that was guessed."""
    if target.kind == "number":
        return (
            f"a number: its range, low = {target.low:.12g} and high = {target.high:.12g}, was "
            f"guessed from the data, so write what it can be"
        )
    shown = [f"'{value}' ({count} rows)" for value, count in counts.most_common(MOST_CLASSES)]
    more = f" and {len(counts) - len(shown)} more" if len(counts) > len(shown) else ""
    return f"{len(counts)} values: {', '.join(shown)}{more}"


def is_measured(numbers: np.ndarray) -> bool:
    """Whether numbers are a measurement rather than the numbers of classes: fractions, or many
    different values.

    >>> [is_measured(np.array(one)) for one in ([0, 1, 1], [0.5, 1], range(30))]
    [False, True, True]
    """
    return bool((numbers != np.floor(numbers)).any()) or len(np.unique(numbers)) > MOST_CLASSES


def rounded_range(numbers: np.ndarray) -> tuple[float, float]:
    """A range of round numbers that holds these, from 0 where that is near. Where a few lie far
    outside, it holds 99 % of them.

    >>> rounded_range(np.array([9.0, 31.0, 58.0])), rounded_range(np.array([320.0, 485.0, 626.0]))
    ((0.0, 60.0), (300.0, 650.0))
    """
    low, high = float(numbers.min()), float(numbers.max())
    inner = np.quantile(numbers, [0.005, 0.995])
    if high - low > 3 * (inner[1] - inner[0]) > 0:
        low, high = float(inner[0]), float(inner[1])
    if 0 < low < high / 3:
        low = 0.0
    step = _round_step((high - low) / 5 or abs(high) or 1.0)
    low, high = step * math.floor(low / step), step * math.ceil(high / step)
    return _clean(low), _clean(high if high > low else low + step)


def _round_step(width: float) -> float:
    """1, 2 or 5 times a power of ten: the largest that is at most this wide."""
    power = 10.0 ** math.floor(math.log10(width))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= width * (1 + 1e-9))


def _clean(value: float) -> float:
    """A multiple of a round step without the last digits of its arithmetic."""
    return float(f"{value:.12g}")
