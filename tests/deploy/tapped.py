"""The command line, watched: ``python tests/deploy/tapped.py site start north/site.toml``.

A site notes the id of every upload in ``uploads.txt`` next to its file *before* it leaves, and
every poll in ``polls.txt``; what was noted survives a kill, so no ledger may ever hold less. Where
a file ``dies`` lies there, it ends once between the head of an upload and its objects.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from dpscaffold.deployment.transports import flower

flower.require()

from dpscaffold.deployment.transports.flower import node  # noqa: E402
from dpscaffold.deployment.transports.flower.node import Fleet  # noqa: E402

PROGRAM = (sys.executable, str(Path(__file__).resolve()))


def _note(path: Path, text: str) -> None:
    place = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(place, text.encode() + b"\n")
    os.close(place)


def _watch(folder: Path) -> None:
    reply, receive, push = Fleet.reply, Fleet.announced, node.push_objects
    mark, leaving = folder / "dies", []

    def noted_reply(self, asked, signed):
        if signed.header.get("kind") == "task" and signed.header.get("status") == "yes":
            _note(folder / "uploads.txt", str(signed.header["upload"]))
            leaving[:] = [signed]
        reply(self, asked, signed)
        leaving.clear()

    def deadly_push(*given, **options):
        if leaving and mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return push(*given, **options)

    def noted_receive(self):
        message = receive(self)
        _note(folder / "polls.txt", "nothing" if message is None else "a message")
        return message

    Fleet.reply, Fleet.announced = noted_reply, noted_receive
    node.push_objects = deadly_push


def uploads(folder: Path) -> set[str]:
    """The distinct uploads that left a site, or were about to."""
    path = folder / "uploads.txt"
    return set(path.read_text().split()) if path.exists() else set()


def reserved(folder: Path) -> int:
    """The participations in a site's ledger, also while the site runs and writes to it."""
    path = folder / "state" / "ledger.jsonl"
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return sum(json.loads(line)["event"] == "participate" for line in whole)


def polls(folder: Path) -> int:
    """How often a site has asked for messages."""
    path = folder / "polls.txt"
    return len(path.read_text().splitlines()) if path.exists() else 0


if __name__ == "__main__":
    from dpscaffold.cli import main

    if sys.argv[1:3] == ["site", "start"]:
        _watch(Path(sys.argv[3]).resolve().parent)
    main()
