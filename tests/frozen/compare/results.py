"""The published tables still stand, number by number, and so do the rows that they were made from.

A page may get other words, more tables or another order; a frozen table must be among those of the
page, or of the page of the same experiment where the folder has another name.
"""

from __future__ import annotations

from collections.abc import Iterator

from frozen import results
from frozen.compare.difference import Difference


def compare(quick: bool) -> Iterator[Difference]:
    """Every table and every file of rows; this takes a second."""
    old, new = results.frozen(), results.found(results.ROOT)
    by_end = {_end(path): tables for path, tables in new["tables"].items()}
    for path, tables in old["tables"].items():
        present = new["tables"].get(path, by_end.get(_end(path)))
        for number, table in enumerate(tables):
            name = f"results/{path}/{number}"
            if present is None:
                yield Difference(name, len(table), None, "the page is gone")
            else:
                why = "" if table in present else "no table of the page has these numbers"
                yield Difference(name, table[-1:], present[number : number + 1], why)
    digests = set(new["rows"].values())
    for path, digest in old["rows"].items():
        why = "" if digest in digests else "no file of rows is the same"
        yield Difference(f"results/{path}", digest, new["rows"].get(path), why)


def _end(path: str) -> str:
    """The last folder and the name."""
    return "/".join(path.split("/")[-2:])
