"""Where a command will write, looked at before its work begins."""

from __future__ import annotations

import os
from pathlib import Path

from dpscaffold.errors import BadInput


def refuse_unwritable(out: Path) -> None:
    """Refuse a folder that cannot be made or written to: better before minutes of work than after.
    Nothing is made yet, so that a command that fails leaves nothing.

    >>> refuse_unwritable(Path("/dev/null/plan"))
    Traceback (most recent call last):
    dpscaffold.errors.BadInput: --out is /dev/null/plan, and /dev/null is a file; name a folder
    """
    if out.exists() and not out.is_dir():
        raise BadInput("not-a-folder", f"--out is {out}, which is a file; name a folder")
    place = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not place.is_dir():
        raise BadInput("not-a-folder", f"--out is {out}, and {place} is a file; name a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise BadInput(
            "cannot-write",
            f"--out is {out}, and nothing can be written to {place}; name another folder",
        )
