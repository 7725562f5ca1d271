"""A person's yes: what a server asks for, in words, and what the site's people decided.

Each run that passes the policy has a file ``requests/RUN.json`` in the state folder, and the whole
plan next to it; a bounded number of them is kept. With ``approval = "each-run"`` the site answers
``awaiting-approval`` until somebody runs ``dpscaffold site approve``. A decision is for one run,
one plan, one grant and one list of members: if any of them changes, it is asked again. A run that
was refused gets no answer but ``not-approved``, also in the middle.
"""

from __future__ import annotations

import getpass
import json
import math
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from dpscaffold.atomic import write_private
from dpscaffold.deployment.protocol.messages import Header, Json, Refused, digest, fingerprint
from dpscaffold.deployment.protocol.sums import Members
from dpscaffold.deployment.site.asked import SiteWork
from dpscaffold.deployment.site.audit import AuditLog, now
from dpscaffold.deployment.site.file import Approval, RemainingBudget, SiteGrant, Terms
from dpscaffold.errors import BadInput
from dpscaffold.privacy.numbers import digits_up, round_up

FOLDER = "requests"
#: No more requests wait for a decision at a time; a server that sends more has to wait.
MOST_WAITING = 50
#: Approved requests that are kept, in addition to those of runs that hold a grant.
MOST_KEPT = 100
#: Who decides where the policy alone does.
POLICY = "policy"

Decision = Literal["waiting", "approved", "refused"]


@dataclass(frozen=True)
class RunRequest:
    """What a server asks for in one run, and what was decided.

    ``epsilon`` and ``delta`` are those of this run towards the server, None without a guarantee;
    ``epsilon_left`` is what the policy allows for all further runs together, before this one.
    ``records`` is the number that the server learns, None where it learns none. ``uploads`` is the
    number of values that leave in a round. ``continues`` is the run whose grant pays for this one:
    ``participations`` is then what is left of it, and ``epsilon`` is reserved already.
    """

    run: str
    plan: str
    coordinator: str
    asked: str
    task: str
    algorithm: str
    label: str
    columns: tuple[str, ...]
    classes: tuple[str, ...]
    rounds: int
    local_steps: int
    parameters: int
    uploads: int
    records: int | None
    declared: bool
    unit: str
    participations: int
    epsilon: float | None
    delta: float
    epsilon_alone: float | None
    epsilon_left: float
    members: tuple[str, ...] = ()
    colluders: int | None = None
    decision: Decision = "waiting"
    by: str = ""
    decided: str = ""
    continues: str = ""

    @property
    def identity(self) -> str:
        """What a decision is about; everything else may differ when the same is asked again."""
        apart = ("asked", "epsilon_left", "decision", "by", "decided")
        return digest({k: v for k, v in json.loads(self.to_json()).items() if k not in apart})

    @property
    def by_person(self) -> bool:
        """Whether a person approved it, and not the policy alone."""
        return self.decision == "approved" and self.by != POLICY

    def to_json(self) -> str:
        """For a file."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def read(cls, path: Path) -> RunRequest | None:
        """The request in a file; None where there is none."""
        try:
            values = {"continues": "", **json.loads(path.read_bytes())}
            if set(values) != {field.name for field in fields(cls)}:
                raise ValueError("its keys are not those of a request")
            lists = {name: tuple(values[name]) for name in ("columns", "classes", "members")}
            return cls(**(values | lists))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, OSError) as error:
            raise Refused("state-damaged", f"{path}: {error}") from error


def request_of(
    run: str,
    offer: Header,
    coordinator: str,
    work: SiteWork,
    terms: Terms,
    granted: SiteGrant,
    left: RemainingBudget,
    members: Members | None,
) -> RunRequest:
    """The request of a run whose offer passed the policy."""
    rows = offer.get("rows")
    table = rows if isinstance(rows, dict) else {}
    return RunRequest(
        run=run,
        plan=digest(offer),
        coordinator=coordinator,
        asked=now(),
        task=terms.task,
        algorithm=terms.algorithm,
        label=str(table.get("label", "")),
        columns=_texts(table.get("features")),
        classes=_texts(table.get("classes")),
        rounds=terms.rounds,
        local_steps=terms.local_steps,
        parameters=terms.parameters,
        uploads=terms.parameters + sum(work.shares().values()),
        records=work.public_records,
        declared=work.declared,
        unit=terms.mechanism.unit if terms.mechanism else "",
        participations=granted.participations,
        epsilon=granted.epsilon,
        delta=granted.delta,
        epsilon_alone=granted.epsilon_alone,
        epsilon_left=left.epsilon,
        members=() if members is None else members.names,
        colluders=None if terms.sums is None else terms.sums.colluders,
    )


def _texts(values: Json) -> tuple[str, ...]:
    return tuple(map(str, values)) if isinstance(values, list) else ()


@dataclass(frozen=True)
class Requests:
    """The requests in a state folder."""

    state: Path
    audit: AuditLog

    def find(self, run: str) -> RunRequest | None:
        """The request of a run; ``run`` was checked to be an id."""
        return RunRequest.read(self._path(run))

    def all(self) -> list[RunRequest]:
        """All requests, in the order in which they came."""
        paths = sorted((self.state / FOLDER).glob("*.json"))
        found = [RunRequest.read(path) for path in paths if "." not in path.stem]
        return sorted((one for one in found if one), key=lambda one: (one.asked, one.run))

    def check(self, run: str, approval: Approval, new: bool) -> None:
        """Refuse a message about a run that the site's people refused or, where each run needs
        their yes, did not approve. ``new``: the message may be the first about its run."""
        known = self.find(run)
        if known is not None and known.decision == "refused":
            raise Refused("not-approved", f"refused by {known.by} at {known.decided}")
        if approval == "each-run" and not new and not (known and known.by_person):
            raise Refused("awaiting-approval", f"dpscaffold site approve {run[:8]}")

    def check_earlier(self, runs: Iterable[str]) -> None:
        """Refuse a run that continues one that the site's people refused."""
        for run in runs:
            known = self.find(run)
            if known is not None and known.decision == "refused":
                raise Refused("not-approved", f"it continues {run}, refused by {known.by}")

    def admit(
        self, asked: RunRequest, offer: Header, approval: Approval, granted: Collection[str] = ()
    ) -> None:
        """Let a request pass once it is approved; a new one is written down first, and the oldest
        are removed. ``granted`` are the runs that hold a grant."""
        known = self.find(asked.run)
        if known is None or known.identity != asked.identity:
            others = [one for one in self.all() if one.run != asked.run]
            if approval == "each-run" and known is None:
                _refuse_too_many(others)
            self._remove_oldest(others, granted)
            known = self._write(asked, offer)
        if approval == "each-run" and not known.by_person:
            raise Refused("awaiting-approval", f"dpscaffold site approve {asked.run[:8]}")
        if known.decision != "approved":
            self.decide(known, "approved", POLICY)

    def _remove_oldest(self, others: Iterable[RunRequest], granted: Collection[str]) -> None:
        """Remove the oldest of those that were approved and hold no grant: if one is offered again,
        it is decided again. What people refused, and what waits, stays; the audit log keeps all."""
        old = [one.run for one in others if one.decision == "approved" and one.run not in granted]
        for run in old[: max(0, len(old) + 1 - MOST_KEPT)]:
            self.offer_path(run).unlink(missing_ok=True)
            self._path(run).unlink(missing_ok=True)

    def decide(self, request: RunRequest, decision: Decision, by: str) -> RunRequest:
        """Write a decision down: first into the audit log, then where the site reads it."""
        about = {"run": request.run, "plan": request.plan, "decision": decision, "by": by}
        self.audit.write("decision", **about, epsilon=request.epsilon)
        decided = replace(request, decision=decision, by=by, decided=now())
        write_private(self._path(request.run), decided.to_json())
        return decided

    def _write(self, asked: RunRequest, offer: Header) -> RunRequest:
        (self.state / FOLDER).mkdir(mode=0o700, exist_ok=True)
        about = {name: getattr(asked, name) for name in ("run", "plan", "coordinator")}
        cost = {name: getattr(asked, name) for name in ("epsilon", "delta", "participations")}
        about |= {"continues": asked.continues} if asked.continues else {}
        self.audit.write("request", **about, **cost)
        write_private(self.offer_path(asked.run), json.dumps(offer, indent=2, ensure_ascii=False))
        write_private(self._path(asked.run), asked.to_json())
        return asked

    def _path(self, run: str) -> Path:
        return self.state / FOLDER / f"{run}.json"

    def offer_path(self, run: str) -> Path:
        """Where the whole plan of a request is."""
        return self.state / FOLDER / f"{run}.offer.json"


def _refuse_too_many(others: Iterable[RunRequest]) -> None:
    """Refuse one more request while many wait for a decision."""
    waiting = sum(one.decision == "waiting" for one in others)
    if waiting >= MOST_WAITING:
        raise Refused("awaiting-approval", f"{waiting} other requests wait for a decision")


def requests_in(state: Path) -> Requests:
    """The requests of a site, for its operator's commands."""
    return Requests(state, AuditLog(state))


def chosen(requests: Requests, run: str) -> RunRequest:
    """The request that an operator means: a run's id, or the beginning of one."""
    found = [one for one in listed(requests) if one.run.startswith(run)] if run else []
    if len(found) != 1:
        known = ", ".join(one.run[:8] for one in listed(requests)) or "none"
        raise BadInput(
            "unknown-request",
            f"RUN is {run!r}, which is the beginning of {len(found)} requests; the site has these: "
            f"{known}",
        )
    return found[0]


def decide(state: Path, request: RunRequest, decision: Decision) -> RunRequest:
    """Record a person's decision. The site's process reads it with the next message."""
    if state.stat().st_uid != os.geteuid():
        raise BadInput(
            "not-the-owner",
            f"{state} belongs to another user, who could not read the decision; run the command "
            f"as that user (sudo -u)",
        )
    return requests_in(state).decide(request, decision, _user())


def listed(requests: Requests) -> list[RunRequest]:
    """All requests, for an operator."""
    try:
        return requests.all()
    except Refused as no:
        raise BadInput("state-damaged", f"the requests cannot be read: {no.detail}") from no


def _user() -> str:
    """Who decides: the user that ``sudo`` was called by, or the user of this process."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        return f"uid {os.geteuid()}"


# --- for people


def request_lines(request: RunRequest, server: str) -> list[str]:
    """A request in words: who asks, what is learnt, what it costs, what leaves."""
    who = fingerprint(request.coordinator)
    state = request.decision + (f" by {request.by} at {request.decided}" if request.by else "")
    return [
        f"run {request.run}: {state}",
        f"  asked     {request.asked} by the coordinator {who} ({server})",
        f"  learns    {_learnt(request)}",
        f"  costs     {_cost(request)}",
        f"  leaves    {_leaving(request)}",
    ]


def _plain(text: str) -> str:
    """A server's word as a terminal may show it: nothing in it can move the cursor, begin a line or
    turn the direction of writing, and so change what a person reads.

    >>> _plain("age\\n  costs     nothing")
    'age\\\\n  costs     nothing'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _learnt(request: RunRequest) -> str:
    target = f"'{_plain(request.label)}'" if request.label else "the label"
    kinds = f" ({', '.join(map(_plain, request.classes))})" if request.classes else ""
    columns = ", ".join(map(_plain, request.columns))
    source = f"from {columns}" if request.columns else "from all features"
    method = f"{request.task}, {request.algorithm}, {request.rounds} rounds of "
    return f"{target}{kinds} {source}: {method}{request.local_steps} local steps"


def _cost(request: RunRequest) -> str:
    left = math.floor(request.epsilon_left * 1000) / 1000  # never more than there is
    if request.epsilon is None:
        return f"NO PRIVACY GUARANTEE: uploads have no secret noise; ε left: {left}"
    if request.continues:
        return (
            f"nothing new: it continues run {request.continues[:8]}…, whose grant (ε at most "
            f"{round_up(request.epsilon)} at δ = {digits_up(request.delta)} for each "
            f"{request.unit}) covers both; {request.participations} participations of it are "
            f"left; {left} is left for other runs"
        )
    rest = math.floor(max(0.0, request.epsilon_left - request.epsilon) * 1000) / 1000
    secure = ""
    if request.epsilon_alone is not None:
        secure = (
            f" towards the server and {request.colluders} colluding sites, "
            f"{round_up(request.epsilon_alone)} if all other sites collude"
        )
    return (
        f"ε at most {round_up(request.epsilon)} at δ = {digits_up(request.delta)} for each "
        f"{request.unit}{secure}; {left} is left before this run, {rest} after it"
    )


def _leaving(request: RunRequest) -> str:
    noise = "computed with noise" if request.epsilon is not None else "WITHOUT SECRET NOISE"
    hidden = ""
    if request.members:
        names = ", ".join(map(_plain, request.members))
        hidden = f", masked: the server sees only sums over {names}"
    size = "not the number of records"
    if request.records is not None:
        size = f"the {'declared ' if request.declared else ''}number of records ({request.records})"
    return (
        f"up to {request.participations} times {request.uploads} numbers about the model, {noise}"
        f"{hidden}; {size}; reason codes and times of answers"
    )
