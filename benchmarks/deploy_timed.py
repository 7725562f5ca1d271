"""The command line, timed: ``python benchmarks/deploy_timed.py server run …`` (see ``deploy.py``).

Seconds are charged to one label at a time, the innermost, so they add up. A server and a site
write one line of JSON for each round to ``timed.jsonl`` in the run's, or the site's, folder. After
the first and the last round the server also notes how many bytes Flower has counted.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpscaffold.deployment.transports import flower

flower.require()

PROGRAM = (sys.executable, str(Path(__file__).resolve()))
#: The labels that are not this package's own work: Flower's, and the local steps.
OTHERS = ("Flower", "local steps")


class Clock:
    """Seconds by label; nested calls are charged to the inner label alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = time.perf_counter()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Charge every call of ``owner.name`` to ``label``."""
        real: Callable[..., Any] = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            self._charge()
            self._stack.append(label)
            try:
                return real(*given, **named)
            finally:
                self._charge()
                self._stack.pop()

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """What was charged since the last time."""
        self._charge()
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


def note(path: Path, line: dict[str, Any]) -> None:
    """Append a line."""
    with path.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def time_site(folder: Path) -> None:
    """A site: verifying, ledger, memory, local steps, signing."""
    from dpscaffold.deployment.protocol.messages import SignedMessage
    from dpscaffold.deployment.site import answer
    from dpscaffold.deployment.site.ledger import SiteLedger
    from dpscaffold.deployment.site.memory import RunMemory
    from dpscaffold.deployment.site.work import OfferedWork

    clock = Clock()
    clock.wrap(SignedMessage, "signed_by", "signatures")
    clock.wrap(answer, "reply", "signatures")
    for name in ("__init__", "participate"):
        clock.wrap(SiteLedger, name, "ledger")
    for name in ("enrolment", "pending", "settle", "write_pending"):
        clock.wrap(RunMemory, name, "memory")
    clock.wrap(OfferedWork, "participate", "local steps")
    real = answer.Site.answer

    def answered(self: Any, message: Any) -> Any:
        clock.take()
        reply = real(self, message)
        if reply.header.get("kind") == "task":
            note(folder / "timed.jsonl", {"round": reply.header.get("round"), **clock.take()})
        return reply

    answer.Site.answer = answered  # type: ignore[method-assign]
    clock.wrap(answer.Site, "answer", "the rest")


def time_server(folder: Path) -> None:
    """A server: letters and waiting (Flower), signatures, aggregation, ledger, checkpoint."""
    from dpscaffold.deployment.protocol.enrolment import SignedExchange
    from dpscaffold.deployment.protocol.messages import SignedMessage
    from dpscaffold.deployment.server import sites
    from dpscaffold.deployment.server.run import DeployedRun
    from dpscaffold.deployment.transports.flower.run import FlowerExchange, OpenRun, flower_bytes
    from dpscaffold.runs.account import PrivacyAccount

    clock, offices = Clock(), []
    clock.wrap(FlowerExchange, "ask", "Flower")
    clock.wrap(SignedMessage, "answers", "signatures")
    clock.wrap(SignedExchange, "message", "signatures")
    clock.wrap(sites, "vector_digests", "signatures")
    clock.wrap(sites.Sites, "_apply", "aggregation")
    clock.wrap(PrivacyAccount, "admit", "ledger")
    clock.wrap(DeployedRun, "_count", "ledger")
    clock.wrap(DeployedRun, "_write", "checkpoint")
    opened, stored = OpenRun.__init__, DeployedRun.stored

    def open_grid(self: Any, office: Any, members: Any) -> None:
        offices.append(office)
        opened(self, office, members)

    def after_round(self: Any, state: Any, row: Any) -> None:
        stored(self, state, row)
        line: dict[str, Any] = {"round": state.round, **clock.take()}
        if state.round in (1, self.setting.plan.rounds):
            line["flower_bytes"] = flower_bytes(offices[-1])
        note(folder / "timed.jsonl", line)
        clock.take()

    OpenRun.__init__ = open_grid  # type: ignore[method-assign]
    DeployedRun.stored = after_round  # type: ignore[method-assign]
    clock.wrap(DeployedRun, "train", "the rest")


def read_timed(folder: Path) -> list[dict[str, float]]:
    """The lines that a timed process wrote."""
    lines = (folder / "timed.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    from dpscaffold.cli import main

    if sys.argv[1:3] == ["site", "start"]:
        time_site(Path(sys.argv[3]).resolve().parent)
    elif sys.argv[1:3] == ["server", "run"]:
        time_server(Path(sys.argv[sys.argv.index("--out") + 1]))
    main()
