"""A crash grid: kill −9 before every file operation of a command, one after the other.

An operation is an opening for writing, a write past Python's buffers, an fsync, a renaming, a
removal, a new folder or a truncation, inside the command's folder. With ``cut`` the power goes, not
the process alone: of every file that was written since it was last synced only the first half of
what is new survives, under whatever name it has by then.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked import Lost, expect, run
from works import Work

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Watch:
    """Counts the file operations of this process and dies before the ``last``-th."""

    def __init__(self, folder: Path, last: int, cut: bool, counted: mmap.mmap) -> None:
        self.folder, self.last, self.cut, self.counted = str(folder), last, cut, counted
        self.number, self.quiet = 0, False
        self.unsynced: dict[str, int] = {}

    def start(self) -> None:
        """Watch from here on; there is no way back, so this is for a child."""
        sys.addaudithook(self._heard)
        real_sync, real_write = os.fsync, os.write

        def fsync(descriptor: Any) -> None:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            self._step(os.readlink(f"/proc/self/fd/{number}"))
            real_sync(descriptor)
            self.unsynced.pop(os.readlink(f"/proc/self/fd/{number}"), None)

        def write(descriptor: int, content: Any) -> int:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if self._step(path, dies=False):
                real_write(descriptor, bytes(content)[: len(content) // 2] if self.cut else b"")
                self._die()
            return real_write(descriptor, content)

        os.fsync, os.write = fsync, write  # type: ignore[assignment]

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.quiet:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = any(c in mode for c in "wax+") if mode else bool(flags & WRITING)
            if writes and isinstance(path, str | bytes | os.PathLike):
                where = os.path.abspath(os.fsdecode(path))
                self._step(where)
                kept = os.path.exists(where) and not (mode and "w" in mode)
                self.unsynced.setdefault(where, os.path.getsize(where) if kept else 0)
        elif event in CHANGES and not isinstance(arguments[0], int):
            where = os.path.abspath(os.fsdecode(arguments[0]))
            self._step(where)
            if event == "os.rename":
                self._renamed(where, os.path.abspath(os.fsdecode(arguments[1])))
            elif event == "os.remove":
                self.unsynced.pop(where, None)

    def _renamed(self, old: str, new: str) -> None:
        """What was not synced is not synced under its new name either."""
        for path in [path for path in self.unsynced if path == old or path.startswith(f"{old}/")]:
            self.unsynced[new + path[len(old) :]] = self.unsynced.pop(path)

    def _step(self, path: str, dies: bool = True) -> bool:
        if not path.startswith(f"{self.folder}/") or path == f"{self.folder}/said":
            return False
        self.number += 1
        self.counted[:8] = self.number.to_bytes(8, "little")
        if self.number != self.last:
            return False
        if dies:
            self._die()
        return True

    def _die(self) -> None:
        self.quiet = True
        if self.cut:
            for path, size in self.unsynced.items():
                if os.path.isfile(path) and os.path.getsize(path) > size:
                    os.truncate(path, (size + os.path.getsize(path)) // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def watched(folder: Path, last: int, cut: bool) -> tuple[Callable[[], None], Callable[[], int]]:
    """What a child does before its command, and how many operations it came to."""
    counted = mmap.mmap(-1, 8)

    def start() -> None:
        Watch(folder, last, cut, counted).start()

    return start, lambda: int.from_bytes(counted[:8], "little")


def points(work: Work, home: Path) -> int:
    """How many file operations the command makes."""
    folder = work.fresh(home)
    start, count = watched(folder, 0, False)
    expect(run(folder, work.arguments, start) == 0, f"{work.name} fails when watched", folder)
    return count()


def crash_at(work: Work, home: Path, last: int, cut: bool) -> str:
    """Die before one operation, run the command again, compare."""
    folder = work.fresh(home)
    start, _ = watched(folder, last, cut)
    status = run(folder, work.arguments, start)
    expect(status == -signal.SIGKILL, f"{work.name} does not come to point {last}", folder)
    what = f"{work.name}, {'power cut' if cut else 'killed'} at point {last}"
    try:
        work.recover(folder)
    except (Lost, OSError, ValueError, KeyError) as error:
        raise Lost(f"{what}: {error}") from error
    return what
