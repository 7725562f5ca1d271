"""Files and folders that appear whole or not at all, whatever kills the process that writes them.

What is written lies next to its name (``.NAME.partial``) until it is complete and on the disk, and
takes its name in one step. A process that dies leaves what was there before; what it had begun is
written over by the next.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

#: Seconds to wait for a lock before another process is taken to be at work.
PATIENCE = 0.5


@contextmanager
def atomic_file(path: Path | str, lasting: bool = True) -> Iterator[Path]:
    """Where to write the file ``path``: it takes that name when the block ends without an error.

    The ending of the name is kept, for writers that choose the format by it. What is no plain file
    (``/dev/stdout``) is written as it is; a link stays one. Without ``lasting`` a power cut may
    bring the old file back, whole, which saves one of two syncs of the disk.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> with atomic_file(place / "page.html") as partial:
    ...     _ = partial.write_text("all of it"); (place / "page.html").exists()
    False
    >>> [path.name for path in place.iterdir()]
    ['page.html']
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve() if path.is_symlink() else path
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield partial
        sync_file(partial)
        os.replace(partial, path)
        if lasting:
            sync_folder(path.parent)
    except OSError as error:
        if str(error.filename) == str(partial):  # people know the file by its own name
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def binary_file(path: Path) -> Iterator[BinaryIO]:
    """A stream into a file for writers that answer a full disk with a complaint about their own
    bookkeeping (``torch.save``: "unexpected pos 6528 vs 6456"): what the disk said is raised in its
    place."""
    try:
        with path.open("wb") as stream:
            yield stream
    except (OSError, RuntimeError) as error:
        said: BaseException | None = error
        while said is not None and not isinstance(said, OSError):
            said = said.__context__
        if said is None:
            raise
        raise OSError(said.errno, said.strerror, str(path)) from None


def write_text(path: Path | str, text: str, lasting: bool = True) -> None:
    """Replace a text file whole (:func:`atomic_file`)."""
    with atomic_file(path, lasting) as partial:
        partial.write_text(text, encoding="utf-8")


def write_private(path: Path | str, text: str) -> None:
    """Replace a text file whole; its owner alone can read it (mode 0600), from the first byte."""
    with atomic_file(path) as partial:
        partial.unlink(missing_ok=True)  # left by a killed process, perhaps with another mode
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Where to write a file that must not be there yet: it takes its name when the block ends, and
    FileExistsError is raised where another process was first."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    draft.unlink(missing_ok=True)
    try:
        yield draft
        os.link(draft, path)
        sync_folder(path.parent)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        draft.unlink(missing_ok=True)


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Replace text files of a folder, each whole, in this order."""
    for name, text in texts.items():
        write_text(folder / name, text)


def draft_of(folder: Path) -> Path:
    """A new empty folder next to ``folder``, to be filled and handed to :func:`put_in_place`; what
    an earlier process left half-written there is removed."""
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    return draft


def put_in_place(draft: Path, folder: Path) -> None:
    """Give a finished draft its name. A folder that has the name is first put aside whole: at no
    moment is there a part of it under that name."""
    old = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    for path in draft.rglob("*"):
        sync_folder(path) if path.is_dir() else sync_file(path)
    sync_folder(draft)
    if folder.exists():
        os.replace(folder, old)
    os.replace(draft, folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def hold(descriptor: int) -> None:
    """Lock a file for this process, alone; BlockingIOError where another keeps it.

    A process that is killed while it starts another one lives on in it, with its locks, until that
    one has begun its own program: a moment's wait tells this from a process at work.
    """
    last = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= last:
                raise
        time.sleep(0.02)


def sync_file(path: Path) -> None:
    """Make what was written to a file durable."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, so that a new or replaced file survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some systems sync no folders
            raise
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a process has locked this file; also where that cannot be found out."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
