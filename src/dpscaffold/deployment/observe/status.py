"""The status of a run at its server and of a site, read from their files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from dpscaffold.atomic import is_held
from dpscaffold.deployment.site.approval import listed, requests_in
from dpscaffold.deployment.site.file import read_site_file
from dpscaffold.deployment.site.operation import ledger_of, status_of
from dpscaffold.errors import BadInput
from dpscaffold.privacy.numbers import round_up
from dpscaffold.runs.earlier import CONTINUED
from dpscaffold.runs.folder import RunFolder

#: The phase of a run whose server has ended in mid-run.
STOPPED = "stopped, server run --resume goes on"


@dataclass(frozen=True)
class SiteRow:
    """One site of a run: ``reachable`` says that its connection was open when it was last asked,
    ``answered`` that it took part. ``last`` is 'answered' or the reason why not."""

    name: str
    participations: int
    last: str
    reachable: bool

    @property
    def answered(self) -> bool:
        """Whether it took part in the last round that asked it."""
        return self.last == "answered"

    @property
    def words(self) -> str:
        """For people."""
        if self.answered:
            return "answered"
        return f"reachable, but {self.last}" if self.reachable else f"not reachable ({self.last})"


@dataclass(frozen=True)
class ServerStatus:
    """A run at its server, as ``status.json`` in its folder has it. ``epsilon`` is the largest ε
    towards the server so far, None where none is stated."""

    run: str
    phase: str
    round: int
    rounds: int
    seconds: float = 0.0
    round_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    time: str = ""
    sites: tuple[SiteRow, ...] = ()
    refusals: Mapping[str, float] = field(default_factory=dict)
    epsilon: float | None = None

    @property
    def age(self) -> float | None:
        """Seconds since the file was written."""
        return None if not self.time else _age(self.time)


def _age(time: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()


def read_server_status(folder: Path) -> ServerStatus:
    """The status of a run folder."""
    path = folder / "status.json"
    if not path.exists():
        raise BadInput("not-a-run", f"{folder} holds no deployed run (status.json)")
    try:
        said = json.loads(path.read_text())
        rows = tuple(
            SiteRow(
                str(name),
                int(site["participations"]),
                str(site["last"]),
                bool(site.get("reachable", site["last"] == "answered")),
            )
            for name, site in said["sites"].items()
        )
        return ServerStatus(
            str(said["run"]),
            _phase(folder, str(said["phase"])),
            int(said["round"]),
            int(said["rounds"]),
            float(said.get("seconds", 0.0)),
            float(said.get("round_seconds", 0.0)),
            int(said.get("bytes_sent", 0)),
            int(said.get("bytes_received", 0)),
            str(said.get("time", "")),
            rows,
            {str(code): float(count) for code, count in said.get("refusals", {}).items()},
            None if said.get("epsilon") is None else float(said["epsilon"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput("run-damaged", f"{path} is damaged ({error}); restore it") from error


def _phase(folder: Path, said: str) -> str:
    """How a run stands; a server that was killed left 'running' behind, but no lock."""
    marked = RunFolder(folder).read_json(CONTINUED)
    if marked is not None:
        return f"stopped, and went on with other sites in {marked.get('folder')}"
    return STOPPED if said == "running" and not is_held(folder / ".lock") else said


def server_lines(status: ServerStatus) -> list[str]:
    """The status for people: the run in one line, and a table of its sites."""
    age = status.age
    old = "" if age is None else f", written {age:.0f} s ago"
    width = max([len(site.name) for site in status.sites] + [4])
    lines = [
        f"run {status.run}: {status.phase}, round {status.round} of {status.rounds}{old}",
        f"  {'site':<{width}}  {'rounds':>6}  state",
    ]
    for site in status.sites:
        lines.append(f"  {site.name:<{width}}  {site.participations:>6}  {site.words}")
    return lines


@dataclass(frozen=True)
class SiteStatus:
    """A site: whether its process runs, what it did last, and what its ledger has left."""

    name: str
    online: bool
    last_answer: str
    answered: int
    refusals: Mapping[str, float]
    last_seconds: float
    participations: int
    epsilon_reserved: float
    epsilon_left: float
    waiting: int


def read_site_status(path: Path) -> SiteStatus:
    """The status of a site, from its state folder and ledger."""
    said, ledger, state = status_of(path), ledger_of(path), read_site_file(path).state
    waiting = listed(requests_in(state)) if state.is_dir() else []
    return SiteStatus(
        said["site"],
        bool(said["online"]),
        str(said.get("last_message") or "never"),
        int(said.get("answered") or 0),
        {str(code): float(count) for code, count in (said.get("refusals") or {}).items()},
        float(said.get("last_seconds") or 0.0),
        int(ledger["participations"]),
        float(ledger["epsilon_reserved"]),
        float(ledger["epsilon_left"]),
        sum(one.decision == "waiting" for one in waiting),
    )


def _last(status: SiteStatus) -> str:
    if not status.answered:
        return "none since the start"
    return (
        f"{status.last_answer}, in {status.last_seconds:.2f} s; {status.answered} since the start"
    )


def site_lines(status: SiteStatus) -> list[str]:
    """The status of a site for people. ε that is left is rounded down."""
    left = math.floor(status.epsilon_left * 1000) / 1000
    codes = ", ".join(f"{code} {count:.0f}" for code, count in sorted(status.refusals.items()))
    lines = [
        f"{status.name}: {'the process runs' if status.online else 'not running'}",
        f"  last answer: {_last(status)}",
        f"  refusals since the start: {codes or 'none'}",
        f"  ε {round_up(status.epsilon_reserved)} reserved, {left} left; "
        f"{status.participations} participations",
    ]
    if status.waiting:
        lines.append(f"  {status.waiting} requests wait for a decision (site requests --waiting)")
    return lines
