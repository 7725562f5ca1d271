"""The site's audit log: every request, every decision and every upload, in order.

``audit.jsonl`` in the state folder is a chained journal (:mod:`dpscaffold.runs.journal`): one JSON
object a line, and each line carries the SHA-256 of the line before it. Whoever notes the number of
lines and the last hash can prove later that nothing before them was changed.

==============  ================================================================================
``request``     a server asked for a run: its plan, ε, δ and the number of participations
``decision``    a person, or the policy, said yes or no to a run
``answer``      a message was answered with yes, or refused with a reason code
``upload``      numbers left: run, round, the upload's id, its bytes; written before they leave
==============  ================================================================================

The log is for the site alone. A line is on disk before the answer that it describes leaves, so a
log that cannot be written stops the site's answers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpscaffold.atomic import hold
from dpscaffold.deployment.protocol.messages import Header, Vectors
from dpscaffold.errors import BadInput
from dpscaffold.runs.journal import Anchor, Journal

FILE = "audit.jsonl"


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class AuditLog:
    """The audit log of one state folder. The site's process and the commands of its operator write
    to the same file: a lock orders them, and a file that another process has extended is verified
    again.

    >>> import tempfile
    >>> log, other = (AuditLog(Path(folder)) for folder in 2 * [tempfile.mkdtemp()])
    >>> log.write("decision", run="00ff", decision="approved")
    >>> other.write("upload", run="00ff", round=1)
    >>> [line["event"] for line in log.lines()]
    ['decision', 'upload']
    """

    def __init__(self, state: Path) -> None:
        self.path = state / FILE
        self._journal: Journal | None = None
        self._last: dict[str, Any] = {}

    def write(self, event: str, **fields: Any) -> None:
        """Add a line; it is on the disk when this returns."""
        with self._alone():
            line = {"event": event, "time": now(), **fields}
            self._current().append(line)
            self._last = {}

    def answered(self, header: Header, fields: Header, vectors: Vectors) -> None:
        """Note an answer before it leaves. A refusal that repeats the last one is noted once."""
        about = {name: header[name] for name in ("kind", "run", "round") if name in header}
        if fields.get("status") != "yes":
            line = {**about, "status": "no", "reason": fields.get("reason")}
            if line != self._last:
                self.write("answer", **line)
                self._last = line
        elif "upload" in fields:
            counts = {name: fields[name] for name in ("upload", "fresh", "participations")}
            size = sum(vector.nbytes for vector in vectors.values())
            self.write("upload", **about, **counts, bytes=size)
        else:
            self.write("answer", **about, status="yes")

    def lines(self) -> Iterator[Header]:
        """All lines in order, verified."""
        return self._current().lines()

    @property
    def anchor(self) -> Anchor:
        """The number of lines and the last hash, to be noted elsewhere."""
        return self._current().anchor

    def follows(self, anchor: Anchor) -> bool:
        """Whether the log still begins with the lines that were there at an earlier anchor."""
        return self._current().follows(anchor)

    def _current(self) -> Journal:
        if self._journal is None or not self._journal.untouched:
            try:
                self._journal = Journal(self.path)
            except BadInput as error:
                raise BadInput(
                    "audit-damaged",
                    f"the audit log was changed: {str(error).partition('; restore')[0]}; keep "
                    f"the file as evidence and move it away, then start the site again",
                ) from error
        return self._journal

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock = os.open(self.path.with_name("audit.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            hold(lock)
            yield
        except BlockingIOError:
            raise BadInput(
                "folder-in-use", f"{self.path} is in use by another process; try again"
            ) from None
        finally:
            os.close(lock)


@dataclass(frozen=True)
class AuditFinding:
    """What a check of the log found: how much is in it, and where it stands."""

    lines: int
    head: str
    uploads: int
    participations: int

    @property
    def sentence(self) -> str:
        """For people."""
        return (
            f"the audit log is intact: {self.lines} lines, {self.uploads} different uploads, of "
            f"{self.participations} participations in the ledger; note {self.lines}:{self.head} "
            f"elsewhere, and check against it later with --since"
        )


def verified(state: Path, participations: int, since: str | None) -> AuditFinding:
    """Check the chain, an earlier anchor (``LINES:HASH``), and that no upload is missing in the
    ledger."""
    log = AuditLog(state)
    if since is not None and not log.follows(_anchor(since)):
        raise BadInput(
            "audit-damaged",
            f"--since is {since}, and the audit log does not begin with those lines: it was "
            f"shortened, replaced or changed; keep the file as evidence",
        )
    uploads = {(line["run"], line["upload"]) for line in log.lines() if line["event"] == "upload"}
    found = AuditFinding(log.anchor.lines, log.anchor.head, len(uploads), participations)
    if len(uploads) > participations:
        raise BadInput(
            "ledger-behind",
            f"the audit log has {len(uploads)} different uploads, and the ledger has "
            f"{participations} participations; stop the site and run dpscaffold site recover",
        )
    return found


def _anchor(text: str) -> Anchor:
    lines, _, head = text.partition(":")
    if not lines.isdigit() or len(head) != 64:
        raise BadInput(
            "bad-anchor", f"--since is {text!r}; give LINES:HASH as 'site audit' printed it"
        )
    return Anchor(int(lines), head)
