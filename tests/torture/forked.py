"""Commands in forked children of one process that has imported everything.

A fault costs a fraction of a second, and the moments of a kill fall into the work, not into the
imports.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import world

#: What commands import when they need it: a child that has dropped its rights may not find it.
LATE = (
    "absl.logging",
    "cProfile",
    "ctypes.util",
    "ctypes.wintypes",
    "encodings.ascii",
    "encodings.unicode_escape",
    "importlib.readers",
    "onnx",
    "onnxscript",
    "pstats",
    "torch.export._trace",
    "torch.onnx._internal.exporter._core",
    "dp_accounting.rdp",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "matplotlib.pyplot",
    "PIL.PngImagePlugin",
)
for name in LATE:
    with suppress(ImportError):  # an extra may be missing
        importlib.import_module(name)
world.import_all()

Before = Callable[[], None]


def nothing() -> None:
    """No fault."""


def begin(folder: Path, arguments: list[str], before: Before = nothing) -> int:
    """Start a command in a child of this process, in ``folder``; its output goes to ``said``."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.chdir(folder)
        out = os.open(folder / "said", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        before()
        code = world.command(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a child; its exit status, −9 where it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(folder: Path, arguments: list[str], before: Before = nothing) -> int:
    """Run a command to its end; its exit status."""
    return ended(begin(folder, arguments, before))


def said(folder: Path) -> str:
    """What the last command printed."""
    return (folder / "said").read_text(errors="replace")


class Lost(AssertionError):
    """Something that must survive did not."""


def expect(condition: bool, what: str, folder: Path) -> None:
    """Fail the campaign with what the command printed."""
    if not condition:
        raise Lost(f"{what}\n--- last output:\n{said(folder)[-3000:]}")
