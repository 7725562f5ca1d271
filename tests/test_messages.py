"""How messages stand in the source: a sentence is cut where a line is full or a clause ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import dpscaffold

ROOT = Path(dpscaffold.__file__).parent

#: A line that is one piece of a string and nothing else, so that the next line goes on with it.
PIECE = re.compile(r"""\s*[fr]*(?P<quote>["'])(?P<text>.*)(?P=quote)""")
#: Where a clause, or a line of what is written, ends.
ENDS = (";", ":", ",", ".", ")", "?", "\\n", "—")
#: Columns that may stay empty at the end of a full line.
ROOM = 3


def odd_pieces(source: str, width: int = 100) -> Iterator[str]:
    """Pieces of strings that end in the middle of a clause although the next word had room.

    >>> list(odd_pieces('f("the table does "\\n  "not fit; "\\n  "expected two columns")'))
    []
    >>> list(odd_pieces('f(\\n  "the table does "\\n  "not fit; expected two columns"\\n)'))
    ['2: not']
    """
    lines = source.splitlines()
    for number, (line, below) in enumerate(pairwise(lines), 1):
        piece, rest = PIECE.fullmatch(line), PIECE.match(below)
        if piece is None or rest is None or below.strip() == '"""':
            continue
        if piece["text"].rstrip().endswith(ENDS):
            continue
        word = rest["text"].split(" ")[0]
        written = word.startswith(("<", "|", "\\n")) or ("{" in word and "}" not in word)
        if word and not written and len(line) + len(word) + 1 + ROOM <= width:
            yield f"{number}: {word}"


def test_sentences_are_not_cut_into_odd_pieces() -> None:
    odd = [
        f"{path.relative_to(ROOT)}:{found}"
        for path in sorted(ROOT.rglob("*.py"))
        for found in odd_pieces(path.read_text(encoding="utf-8"))
    ]
    assert not odd


def test_odd_pieces_are_found() -> None:
    cut = 'raise BadInput(\n    f"the table does "\n    "not fit; "\n    "expected two columns"\n)'
    assert list(odd_pieces(cut)) == ["2: not"]
    full = f'raise BadInput(\n    "{"x" * 88} "\n    "not fit"\n)'
    assert list(odd_pieces(full)) == []
