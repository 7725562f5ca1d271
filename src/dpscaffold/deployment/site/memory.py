"""A site's memory of one run, on disk: its slots, and the upload that is not acknowledged yet.

The new slots of a participation become the site's memory only when the server says that it has the
upload: until then they are *pending*, next to the upload itself, so that a question that is asked
again gets the same answer and costs nothing. Every file is replaced whole and fsynced, folder too.
With the acknowledgement ``pending.box`` becomes ``memory.box`` by its name alone.

==================  ============================================================================
``enrolment.json``  the offer, the grant, the site's nonce, and the roster and nonces once known
``memory.box``      the acknowledged slots, and the id of the upload they came from
``pending.box``     the last upload, the question it answers, and the slots it would bring
==================  ============================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpscaffold.atomic import hold, sync_folder
from dpscaffold.deployment.protocol.messages import (
    Header,
    Json,
    Refused,
    SignedMessage,
    Vectors,
    packed,
    unpack,
)
from dpscaffold.deployment.provision import write_whole
from dpscaffold.errors import BadInput
from dpscaffold.runs.journal import Anchor

#: Of a state folder.
FORMAT = 1
#: So often a server may set the slots of a site in one run.
MOST_RESTORES = 1000

#: Device, number, size and time of a file's content.
_Mark = tuple[int, int, int, int]


@dataclass(frozen=True)
class Enrolment:
    """What a site agreed to in one run, and what it learnt of the draw since. ``records`` is the
    number that the server knows, None where it may not know it."""

    run: str
    plan: str
    offer: dict[str, Any]
    records: int | None
    declared: bool
    nonce: str
    server_commitment: str
    anchor: dict[str, Any]
    roster: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    commitments: Mapping[str, str] = field(default_factory=dict)
    nonces: Mapping[str, str] = field(default_factory=dict)
    over: bool = False
    #: Names, sizes and signing keys of everybody in a run with secure sums.
    members: Mapping[str, Any] = field(default_factory=dict)
    #: The run that this one continues, as its offer says.
    continues: str = ""


@dataclass(frozen=True)
class PendingUpload:
    """The last upload: the question it answers, its vectors, and the slots it would bring.

    ``count`` and ``anchor`` say where the ledger stood when it was made, ``restores``, read back
    from the disk, which messages had set the slots before (:class:`AcknowledgedSlots`).
    """

    upload: str
    question: str
    round: int
    count: int
    anchor: Anchor
    vectors: Vectors
    slots: Vectors
    restores: tuple[str, ...] = ()


@dataclass(frozen=True)
class AcknowledgedSlots:
    """The slots that the server knows of, and the id of the upload that brought them; the empty id
    is the start, where all slots are zero. ``restores`` are the nonces of the messages that set the
    slots: none of them may do so again."""

    upload: str
    slots: Vectors
    restores: tuple[str, ...] = ()


class OpenBoxes:
    """The boxes of one run as this process wrote or verified them, so that a round does not read
    them again. A file that is not as it was left is read and verified again."""

    def __init__(self) -> None:
        self._held: dict[Path, tuple[_Mark | None, SignedMessage]] = {}

    def find(self, path: Path) -> SignedMessage | None:
        """What the file holds; None where that is not known."""
        mark, box = self._held.get(path, (None, None))
        return box if mark is not None and mark == _mark(path) else None

    def hold(self, path: Path, mark: _Mark | None, box: SignedMessage) -> None:
        """Remember what the file held when it had this mark; other runs' boxes are let go."""
        self._held = {k: v for k, v in self._held.items() if k.parent == path.parent}
        vectors = {name: _read_only(vector) for name, vector in box.vectors.items()}
        self._held[path] = (mark, SignedMessage(box.header, vectors))

    def renamed(self, path: Path, to: Path, vectors: Vectors) -> None:
        """A file has got another name, and only these of its vectors are of use."""
        mark, box = self._held.pop(path, (None, SignedMessage({})))
        if mark is not None and mark == _mark(to):
            self.hold(to, mark, SignedMessage(box.header, vectors))


class RunMemory:
    """One run's folder at a site."""

    def __init__(self, folder: Path, boxes: OpenBoxes | None = None) -> None:
        self.folder, self._boxes = folder, boxes

    # --- enrolment

    def enrolment(self) -> Enrolment | None:
        """What was agreed, or None where the site is not enrolled."""
        path = self.folder / "enrolment.json"
        if not path.exists():
            return None
        try:
            saved = json.loads(path.read_bytes())
            body = saved["enrolment"]
            if saved["check"] != _check(body):
                raise ValueError("its check does not match")
            for name in ("roster", "sizes"):
                body[name] = tuple(body[name])
            return Enrolment(**body)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise Refused("state-damaged", f"{path}: {error}") from error

    def write_enrolment(self, enrolment: Enrolment) -> None:
        """Store what was agreed."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sync_folder(self.folder.parent)
        body = asdict(enrolment)
        text = json.dumps({"enrolment": body, "check": _check(json.loads(json.dumps(body)))})
        write_whole(self.folder / "enrolment.json", text.encode())

    def amend(self, enrolment: Enrolment, **changes: Any) -> Enrolment:
        """Store an enrolment with some fields set."""
        amended = replace(enrolment, **changes)
        self.write_enrolment(amended)
        return amended

    # --- slots and the pending upload

    def acknowledged(self) -> AcknowledgedSlots:
        """The site's slots; at the start there are none, which represents zero."""
        box = self._read("memory.box")
        if box is None:
            return AcknowledgedSlots("", {})
        slots = box.vectors
        if "question" in box.header:  # it was a pending upload
            slots = _under(box.vectors, "slot.")
        return AcknowledgedSlots(str(box.header["upload"]), slots, _restores(box.header))

    def pending(self) -> PendingUpload | None:
        """The upload that waits for its acknowledgement."""
        box = self._read("pending.box")
        if box is None:
            return None
        head: Any = box.header
        try:
            slots = _under(box.vectors, "slot.")
            vectors = _under(box.vectors, "upload.")
            anchor = Anchor(int(head["lines"]), str(head["head"]))
            return PendingUpload(
                str(head["upload"]),
                str(head["question"]),
                int(head["round"]),
                int(head["count"]),
                anchor,
                vectors,
                slots,
                _restores(head),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Refused("state-damaged", f"{self.folder / 'pending.box'}: {error}") from error

    def write_pending(self, pending: PendingUpload) -> None:
        """Store an upload with what it would bring, before it leaves."""
        head: dict[str, Json] = {
            "upload": pending.upload,
            "question": pending.question,
            "round": pending.round,
            "count": pending.count,
            "lines": pending.anchor.lines,
            "head": pending.anchor.head,
            "restores": list(self.acknowledged().restores),
        }
        vectors = {f"upload.{name}": value for name, value in pending.vectors.items()}
        vectors |= {f"slot.{name}": value for name, value in pending.slots.items()}
        self._write("pending.box", head, vectors)

    @property
    def has_pending(self) -> bool:
        """Whether an upload waits for its acknowledgement."""
        return self._pending.exists()

    @property
    def _pending(self) -> Path:
        return self.folder / "pending.box"

    @property
    def _memory(self) -> Path:
        return self.folder / "memory.box"

    def settle(
        self,
        acknowledged: str,
        restore: Vectors | None,
        pending: PendingUpload | None,
        nonce: str = "",
    ) -> AcknowledgedSlots:
        """Bring memory to where the server says it is; ``pending`` is what :meth:`pending` gave.

        An acknowledged pending upload becomes the memory; the acknowledgement already in memory
        leaves it; anything else is ``state-mismatch``, unless the server sends the slots along. It
        cannot send private ones: those stay as they were. ``nonce`` is that of the message, which
        may set slots once: whoever carries messages could send it again later.
        """
        memory = self.acknowledged()
        if pending is not None and pending.upload == acknowledged:
            memory = AcknowledgedSlots(acknowledged, pending.slots, memory.restores)
            self._accept(pending, memory)
        elif memory.upload != acknowledged:
            if restore is None:
                raise Refused("state-mismatch", f"{acknowledged!r:.50} is not known here")
            if nonce in memory.restores or len(memory.restores) >= MOST_RESTORES:
                raise Refused("state-mismatch", "this message has set the slots before")
            restores = (*memory.restores, nonce)
            memory = AcknowledgedSlots(acknowledged, {**memory.slots, **restore}, restores)
            self._write_memory(memory)
            self.drop_pending()
        return memory

    def _accept(self, pending: PendingUpload, memory: AcknowledgedSlots) -> None:
        """Make the pending upload's slots the memory: its box holds all that a memory needs."""
        if pending.restores == memory.restores:
            os.replace(self._pending, self._memory)
            sync_folder(self.folder)
            if self._boxes is not None:
                slots = {f"slot.{name}": value for name, value in pending.slots.items()}
                self._boxes.renamed(self._pending, self._memory, slots)
            return
        self._write_memory(memory)
        # Not synced: if it comes back after a crash, it is settled again to the same slots.
        self._pending.unlink()

    def _write_memory(self, memory: AcknowledgedSlots) -> None:
        head: dict[str, Json] = {"upload": memory.upload, "restores": list(memory.restores)}
        self._write("memory.box", head, memory.slots)

    def drop_pending(self) -> None:
        """Forget the pending upload: it is in memory now, or nobody will have it."""
        self._pending.unlink(missing_ok=True)
        sync_folder(self.folder)

    def forget(self) -> None:
        """Give the run up: its grant or its ledger is gone, so nothing more is answered in it."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()
        sync_folder(self.folder.parent)

    def _write(self, name: str, header: Header, vectors: Vectors) -> None:
        plain = {key: np.ascontiguousarray(value, "<f4") for key, value in vectors.items()}
        box, path = SignedMessage(header, plain), self.folder / name
        parts, check = packed(box), hashlib.sha256()
        for part in parts:
            check.update(part)
        write_whole(path, *parts, check.digest())
        if self._boxes is not None and path in (self._pending, self._memory):
            self._boxes.hold(path, _mark(path), box)

    def _read(self, name: str) -> SignedMessage | None:
        path = self.folder / name
        known = None if self._boxes is None else self._boxes.find(path)
        if known is not None:
            return known
        try:
            mark = _mark(path)
            raw = memoryview(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Refused("state-damaged", f"{path}: {error}") from error
        box = unpack(raw[:-32]) if hashlib.sha256(raw[:-32]).digest() == raw[-32:] else None
        if box is None:
            raise Refused("state-damaged", f"{path} is not what was written")
        if self._boxes is not None and path in (self._pending, self._memory):
            self._boxes.hold(path, mark, box)
        return box


class StateFolder:
    """A site's state: its ledger, its runs, its node id; one process at a time.

    >>> import tempfile
    >>> state = StateFolder(Path(tempfile.mkdtemp()) / "state", "north")
    >>> state.run("00ff").enrolment() is None
    True
    >>> state.close()
    """

    def __init__(self, path: Path, site: str) -> None:
        self.path, self._boxes = path, OpenBoxes()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            hold(self._lock)
        except OSError:
            os.close(self._lock)
            raise BadInput(
                "folder-in-use",
                f"the state folder {path} is in use by another process; one at a time",
            ) from None
        try:
            self._check_owner(site)
        except BadInput:
            self.close()
            raise

    def _check_owner(self, site: str) -> None:
        mark = self.path / "site.json"
        if not mark.exists():
            write_whole(mark, json.dumps({"format": FORMAT, "site": site}).encode())
        try:
            said = json.loads(mark.read_bytes())
            owner, number = said["site"], said["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(
                "state-damaged", f"{mark} is damaged; the state folder cannot be used"
            ) from error
        if number != FORMAT:
            raise BadInput(
                "wrong-version",
                f"the state folder {self.path} has format {number}, and this version reads "
                f"{FORMAT}",
            )
        if owner != site:
            raise BadInput(
                "folder-of-another-site",
                f"the state folder {self.path} belongs to the site {owner!r}, not to {site!r}",
            )

    @property
    def ledger(self) -> Path:
        """Where the ledger is."""
        return self.path / "ledger.jsonl"

    @cached_property
    def head_key(self) -> bytes:
        """The key of the hashes that servers see of the ledger's head. It stays with the ledger, so
        that copies of the folder show the same for what they have in common."""
        path = self.path / "head.key"
        if not path.exists():
            write_whole(path, secrets.token_bytes(32))
        key = path.read_bytes()
        if len(key) != 32:
            raise Refused("state-damaged", f"{path} has {len(key)} bytes")
        return key

    def run(self, run: str) -> RunMemory:
        """One run's memory. Ids are hexadecimal; whatever else is asked for has no folder."""
        if not run or len(run) > 64 or any(c not in "0123456789abcdef" for c in run):
            raise Refused("unknown-run", f"{run!r:.80} is not a run's id")
        return RunMemory(self.path / "runs" / run, self._boxes)

    def runs(self) -> list[RunMemory]:
        """All runs that have a folder."""
        folder = self.path / "runs"
        return [RunMemory(path) for path in sorted(folder.iterdir())] if folder.is_dir() else []

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._lock)


def _under(vectors: Vectors, prefix: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in vectors.items() if k.startswith(prefix)}


def _restores(header: Header) -> tuple[str, ...]:
    """The nonces in a box of the messages that set the slots."""
    restores = header.get("restores", [])
    return tuple(map(str, restores)) if isinstance(restores, list) else ()


def _read_only(vector: np.ndarray) -> np.ndarray:
    """The same numbers, which nobody can change by mistake."""
    kept = vector.view()
    kept.flags.writeable = False
    return kept


def _mark(path: Path) -> _Mark | None:
    """What changes when anybody replaces or writes to a file, and not with its name; None where
    there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _check(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
