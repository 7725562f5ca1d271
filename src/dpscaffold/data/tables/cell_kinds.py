"""What the texts of a column are: numbers, dates of a form, or neither."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import islice

import numpy as np

from dpscaffold.data.tables.cells import refuse_two_readings
from dpscaffold.errors import BadInput

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
    """The first number of a column that is written with a sign between thousands, where the column
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
                f"{what}, but for {shown}; leave such cells empty, or name them in gaps where they "
                f"mean missing, and it can be used"
            )
    return ""


def _printed(cell: str) -> str:
    """The beginning of a cell as one line can show it."""
    return "".join(
        sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in cell[:20]
    )


def is_compact(cells: Sequence[str]) -> bool:
    """Whether whole numbers are dates written without signs, such as 20240131."""
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
