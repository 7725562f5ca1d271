"""Work of a GPU that is worth a program of its own: the steps of linear models.

Belongs here: programs of a GPU and their launch. Does not belong here: any result of its own.

The rest of the package says the same in PyTorch's operations. That is the definition, and what runs
where there is no Triton, no GPU, or a shape that no program has room for. A program that does not
compile is named in the log once, and its place is taken by the definition.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from dpscaffold.engines.machine import device_failed

Made = TypeVar("Made")

_log = logging.getLogger(__name__)

#: Programs that could not be run here, and so are not tried again.
_refused: set[str] = set()

_switched_off = False


def usable(device: torch.device) -> bool:
    """Whether programs may be tried on a device: a GPU, or a CPU under Triton's interpreter."""
    if _switched_off or importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def switched_off() -> Iterator[None]:
    """Do without programs for a while, for comparison.

    >>> with switched_off():
    ...     usable(torch.device("cuda"))
    False
    """
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def tried(name: str, run: Callable[[], Made]) -> Made | None:
    """What a program made, or None where it cannot be had: then the caller has another way.

    >>> tried("example", lambda: 7)
    7
    """
    if name in _refused:
        return None
    try:
        return run()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # compilers, drivers and limits of a chip fail in many ways
        if device_failed(error):  # nothing else can be tried on it
            raise
        _refused.add(name)
        _log.warning(
            "the program %s does not run here (%s); the slower way is taken",
            name,
            (str(error).splitlines() or [type(error).__name__])[0],
        )
        return None
