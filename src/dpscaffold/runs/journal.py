"""An append-only file of JSON objects in which no line can be lost, changed or taken back unseen.

One object a line. Each line carries ``chain``, the SHA-256 of the line before's chain and of its
own content, h_k = SHA-256(h_{k−1} ‖ line_k), and ``process``, a random name of the process that
wrote it. Whoever keeps an :class:`Anchor` (how many lines, and the last h) can tell later whether
the file still begins with those very lines. The chain has no key: it shows tampering to those who
hold an anchor, and to nobody else.

A line is on the disk, its folder entry included, when :meth:`Journal.append` returns. What a crash
may leave behind is the beginning of one more line; it is passed over, and cut off by the next
``append``. Any other damage is refused, with the line and the reason.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpscaffold.atomic import sync_folder
from dpscaffold.errors import BadInput

#: h_0, the chain of an empty journal; it names the format.
START = hashlib.sha256(b"dpscaffold journal, format 1").hexdigest()
#: The keys that the journal itself writes into every line.
RESERVED = ("process", "chain")


@dataclass(frozen=True)
class Anchor:
    """A journal at one moment: its number of lines and the chain of the last one."""

    lines: int
    head: str

    @classmethod
    def read(cls, values: object, where: str) -> Anchor:
        """From JSON values; ``where`` names the file in the message if they are none."""
        if (
            isinstance(values, Mapping)
            and isinstance(values.get("lines"), int)
            and isinstance(values.get("head"), str)
        ):
            return cls(values["lines"], values["head"])
        raise BadInput(
            "ledger-damaged", f"{where} does not name the head of its journal; restore it"
        )

    @classmethod
    def read_all(cls, values: object, where: str) -> tuple[Anchor, ...]:
        """The same of a list; a single one is a list of one."""
        given = values if isinstance(values, list | tuple) else [values]
        return tuple(one if isinstance(one, cls) else cls.read(one, where) for one in given)


class Journal:
    """One journal, read and verified when it is opened; the file appears with the first line.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "ledger.jsonl"
    >>> journal = Journal(path)
    >>> journal.append({"round": 3, "users": [0, 7]}); journal.append({"round": 9, "users": [7]})
    >>> then = journal.anchor
    >>> [line["round"] for line in Journal(path).lines()], Journal(path).anchor == then
    ([3, 9], True)
    >>> _ = path.write_text(path.read_text().replace("[0, 7]", "[0, 8]"))
    >>> try:
    ...     Journal(path)
    ... except BadInput as error:
    ...     print(str(error).replace(str(path), "ledger.jsonl"))
    ledger.jsonl is damaged at line 1 (its chain does not match); restore it or start a new run
    """

    def __init__(
        self, path: Path | str, visit: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        """Read and verify the file; ``visit`` is called with every line on the way."""
        self.path = Path(path)
        self._process = secrets.token_hex(8)
        #: h_0 and the chains of all lines.
        self.heads = [START]
        self._end = 0
        self._left_as = _fingerprint(self.path)
        for body, chain, end in self._verified():
            self.heads.append(chain)
            self._end = end
            if visit is not None:
                visit(body)
        #: The journal as it stands.
        self.anchor = Anchor(len(self), self.head)
        self._size = self.path.stat().st_size if self.path.exists() else 0

    def __len__(self) -> int:
        """The number of lines."""
        return len(self.heads) - 1

    @property
    def head(self) -> str:
        """h_k, the chain of the last line."""
        return self.heads[-1]

    @property
    def first(self) -> str:
        """h_1, the chain of the first line, which only copies of this journal share."""
        return self.heads[min(1, len(self))]

    @property
    def untouched(self) -> bool:
        """Whether the file is as this process left it, so that it need not be read again."""
        return self._left_as == _fingerprint(self.path)

    def follows(self, anchor: Anchor) -> bool:
        """Whether the journal begins with the lines that the anchor was taken of."""
        return self.anchor_at(anchor.lines) == anchor

    def anchor_at(self, lines: int) -> Anchor | None:
        """The anchor after this many lines; None where there are fewer."""
        return Anchor(lines, self.heads[lines]) if 0 <= lines <= len(self) else None

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was appended, in order, read from the file and verified once more."""
        for body, _, _ in self._verified():
            yield body

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one object; it is on the disk when this returns, and not in the file if this raises.

        A file that has grown or shrunk since it was read is refused: somebody else writes to it.
        """
        body = json.loads(json.dumps({**line, "process": self._process}, allow_nan=False))
        chain = _link(self.head, body)
        new = not self.path.exists()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            raw = self._separator(descriptor) + _encoded({**body, "chain": chain}) + b"\n"
            self._write(descriptor, raw)
        finally:
            os.close(descriptor)
        if new:
            sync_folder(self.path.parent)
        self.heads.append(chain)
        self.anchor = Anchor(len(self), chain)
        self._end = self._size = self._end + len(raw)
        self._left_as = _fingerprint(self.path)

    def _separator(self, descriptor: int) -> bytes:
        """What must stand before the next line: a line may have lost its line feed, no more."""
        found = os.fstat(descriptor).st_size
        if found != self._size:
            raise BadInput(
                "folder-in-use",
                f"{self.path} has {found} bytes where this process left {self._size}: another "
                f"process has written to it; let only one work on it",
            )
        if self._end == 0:
            return b""
        os.lseek(descriptor, self._end - 1, os.SEEK_SET)
        return b"" if os.read(descriptor, 1) == b"\n" else b"\n"

    def _write(self, descriptor: int, raw: bytes) -> None:
        """All of ``raw`` at the end of the last whole line, or nothing."""
        try:
            os.ftruncate(descriptor, self._end)  # the beginning of a line that was never finished
            os.lseek(descriptor, self._end, os.SEEK_SET)
            written = os.write(descriptor, raw)  # may be short without an error, on a full disk
            if written != len(raw):
                why = f"{os.strerror(errno.ENOSPC)}: {written} of {len(raw)} bytes were written"
                raise OSError(errno.ENOSPC, why, str(self.path))
            os.fsync(descriptor)
        except BaseException:
            os.ftruncate(descriptor, self._end)
            self._size = self._end
            raise

    def _verified(self) -> Iterator[tuple[dict[str, Any], str, int]]:
        """What was appended, its chain, and where it ends in the file; stops before a line that a
        crash cut short, refuses other damage."""
        if not self.path.exists():
            return
        head, end, writer = START, 0, ""
        earlier: set[str] = set()
        with self.path.open("rb") as stream:
            for place, raw in enumerate(stream, start=1):
                body, reason = _decoded(raw, head)
                if body is None and not raw.endswith(b"\n"):
                    if _decoded(raw[:-1], head)[0] is None:
                        return
                    reason = "its end was changed"
                if body is not None and body["process"] != writer:
                    if body["process"] in earlier:
                        reason = "two processes wrote to it at once"
                    earlier.add(writer := body["process"])
                if body is None or reason:
                    raise BadInput(
                        "ledger-damaged",
                        f"{self.path} is damaged at line {place} ({reason}); restore it or start a "
                        f"new run",
                    )
                head, end = body.pop("chain"), end + len(raw)
                del body["process"]
                yield body, head, end


class Unwritten:
    """The journal of a run without a folder, which keeps nothing."""

    path, anchor = None, None

    def __init__(self) -> None:
        self.head = self.first = secrets.token_hex(32)
        self.heads = [self.head]

    def append(self, line: Mapping[str, Any]) -> None:
        """Nothing is kept."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """No line."""
        return iter(())


def digest(value: object) -> str:
    """The SHA-256 of a JSON value, whatever the order of its keys.

    >>> digest({"a": 1, "b": [2.5]}) == digest({"b": [2.5], "a": 1})
    True
    """
    return hashlib.sha256(_encoded(value)).hexdigest()


def _decoded(raw: bytes, head: str) -> tuple[dict[str, Any] | None, str]:
    """A line with its reserved keys, or None and the reason why it does not follow ``head``."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None, "it is not JSON"
    if not isinstance(line, dict) or not all(isinstance(line.get(key), str) for key in RESERVED):
        return None, "it is not a chained line"
    if line["chain"] != _link(head, {key: line[key] for key in line if key != "chain"}):
        return None, "its chain does not match"
    return line, ""


def _fingerprint(path: Path) -> tuple[int, ...] | None:
    """What changes when anybody replaces or writes to a file; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _link(head: str, body: Mapping[str, Any]) -> str:
    """h_k = SHA-256(h_{k−1} ‖ line_k)."""
    return hashlib.sha256(f"{head}\n".encode() + _encoded(body)).hexdigest()


def _encoded(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()
