"""Tables in blocks of rows, so that one larger than memory is worked through."""

from __future__ import annotations

from collections.abc import Iterator

#: Bytes of float32 features that are worked on together.
BLOCK_BYTES = 1 << 24


def blocks(rows: int, dimension: int) -> Iterator[slice]:
    """Consecutive slices of a table of ``rows`` × ``dimension`` floats, about 16 MiB each.

    >>> [block.stop for block in blocks(5, 1 << 21)]
    [2, 4, 5]
    """
    step = max(1, BLOCK_BYTES // (4 * max(1, dimension)))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
