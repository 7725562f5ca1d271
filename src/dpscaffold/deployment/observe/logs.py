"""A log of JSON lines with levels, which is rotated by size."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

#: A file of a log has at most LARGEST bytes, and KEPT older files are kept.
LARGEST, KEPT = 10_000_000, 5

_LEVELS = {"error:": logging.ERROR, "refused:": logging.WARNING}


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
        return json.dumps(line, ensure_ascii=False)


class _Handler(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: a full disk must not end the process."""


def rotating_log(path: Path) -> Callable[[str], None]:
    """A function that writes sentences to a log. Those that begin with ``error:`` or ``refused:``
    have the levels error and warning, all others info.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "site.log"
    >>> write = rotating_log(place)
    >>> write("online"); write("refused: policy-noise")
    >>> [json.loads(line)["level"] for line in place.read_text().splitlines()]
    ['info', 'warning']
    """
    handler = _Handler(path, maxBytes=LARGEST, backupCount=KEPT, encoding="utf-8", delay=True)
    handler.setFormatter(_JsonLines())

    def write(sentence: str) -> None:
        level = _LEVELS.get(sentence.partition(" ")[0], logging.INFO)
        handler.handle(logging.LogRecord("dpscaffold", level, "", 0, "%s", (sentence,), None))

    return write
