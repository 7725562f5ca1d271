"""What goes wrong inside an algorithm of a user's own, in one sentence that names its line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpscaffold.errors import BadInput, DeviceLost, Diverged


@contextmanager
def own_failures(name: str) -> Iterator[None]:
    """Turn what the functions of ``my_file:factory`` raise in a round into bad input; other
    algorithms, and what says itself what to do, are let through.

    >>> with own_failures("fedavg"):
    ...     pass
    """
    try:
        yield
    except (BadInput, Diverged, DeviceLost, OSError, MemoryError):
        raise
    except Exception as error:
        if ":" not in name or "can't allocate memory" in str(error):
            raise
        raise BadInput(
            "algorithm-failed", f"algorithm.name is {name!r}, {_said(name, error)}"
        ) from error


def _said(name: str, error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    what = f"{type(error).__name__}: {text}"
    stem = name.partition(":")[0].rpartition(".")[2]
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if Path(frame.filename).stem == stem]
    if mine:
        place = f"{Path(mine[-1].filename).name}, line {mine[-1].lineno}"
        return f"which failed in a round with {what} ({place}); fix it"
    return (
        f"whose functions gave what cannot be computed with ({what}); each must give tensors of "
        f"the shapes that it is given"
    )
