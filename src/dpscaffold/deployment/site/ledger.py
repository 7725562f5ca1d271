"""The site's ledger: what it granted to which run, and every participation, on disk before it
happens.

A chained journal (``ledger.jsonl``) of these lines:

==============  ================================================================================
``site``        whose ledger this is; the first line
``grant``       a run was accepted: at most n participations, the ε and δ reserved for them
``begin``       the site showed its nonce for a roster and its commitments
``release``     a grant of a run without any participation was taken back
``continue``    a run was offered that continues another one; its ``begin`` moves the grant over
``participate`` one more participation in a run (of a secure sum: one more attempt); written
                before anything is computed
``recover``     the operator counted what cannot be accounted for as spent
==============  ================================================================================

Within a run the mechanism is fixed and n caps it, so selection and stopping may look at anything
(the bound ``cap``). That is as true of a run that goes on as another one, with other sites: it has
the same mechanism and the same n, and what was used of it stays used. Across other runs ε and δ
add: a plan may have been chosen after seeing the last run's uploads, and addition is valid for
mechanisms chosen adaptively (Rogers, Roth, Ullman, Vadhan 2016).
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpscaffold.deployment.protocol.messages import Refused
from dpscaffold.deployment.site.file import Policy, RemainingBudget, SiteGrant
from dpscaffold.errors import BadInput
from dpscaffold.runs.journal import Anchor, Journal


@dataclass(frozen=True)
class GrantedRun:
    """One run in the ledger: its grant, whether it began, and what was used of it.

    With secure sums every attempt at a round is a participation. ``last_attempt`` is the last one
    of ``last_round``, and ``voids`` counts the attempts that repeated a round.

    ``continues`` is the run that this one goes on with, ``before`` how often the site took part in
    it and in those that it continued. ``continued`` is the run that goes on with this one: from
    then on that one has the grant, and nothing more is answered here.
    """

    run: str
    plan: str
    grant: SiteGrant
    account: dict[str, Any]
    began: bool = False
    released: bool = False
    fixed: str = ""
    participations: int = 0
    last_round: int = 0
    last_attempt: int = 0
    voids: int = 0
    first_time: str = ""
    last_time: str = ""
    continues: str = ""
    before: int = 0
    continued: str = ""

    @property
    def used(self) -> int:
        """Participations that the grant has paid for: here, and in the runs that this continues."""
        return self.before + self.participations

    @property
    def has_grant(self) -> bool:
        """Whether a grant is reserved for this run: of a run and those that continue it, for one
        at a time."""
        offered = bool(self.continues) and not self.began
        return not (self.released or self.continued or offered)

    @property
    def remaining(self) -> int:
        """Participations that are left of the grant."""
        if self.continued or (self.continues and not self.began):
            return 0
        return max(0, self.grant.participations - self.used)


@dataclass(frozen=True)
class RecoveryEntry:
    """A recovery's entry: this many participations, ε and δ, that no run of the ledger
    explains."""

    participations: int
    epsilon: float
    delta: float
    time: str
    #: ε towards the server and all other sites, where it is more than ``epsilon``.
    epsilon_alone: float | None = None


class SiteLedger:
    """Reads, verifies and extends ``ledger.jsonl``. Damage raises ``Refused("ledger-damaged")``."""

    def __init__(self, path: Path, site: str) -> None:
        self.path = path
        self.runs: dict[str, GrantedRun] = {}
        self.lost: list[RecoveryEntry] = []
        self._accounted: list[Anchor] = []
        try:
            self._journal = Journal(path, self._apply)
        except (BadInput, KeyError, TypeError, ValueError, OSError) as error:
            raise Refused("ledger-damaged", str(error)) from error
        if len(self._journal) and self._site != site:
            raise BadInput(
                "folder-of-another-site",
                f"{path} is the ledger of the site {self._site!r}, not of {site!r}; every site "
                f"needs a state folder of its own",
            )
        self._site = site

    @property
    def untouched(self) -> bool:
        """Whether the file is as this ledger left it."""
        return self._journal.untouched

    @property
    def anchor(self) -> Anchor:
        """The ledger as it stands, to be kept next to whatever was made at this moment."""
        return self._journal.anchor

    def follows(self, anchors: Iterable[object]) -> bool:
        """Whether the ledger still begins with what it held when each anchor was taken; an anchor
        may be as ``enrolment.json`` has it."""
        return all(map(self._journal.follows, Anchor.read_all([*anchors], "enrolment.json")))

    def shown(self, key: bytes) -> Anchor:
        """The ledger's head as a server may see it.

        A line of the ledger may hold what is hidden from the server (the number of records), so the
        server sees a keyed hash of the head, from which nobody without the key learns anything.
        """
        return _keyed(self._journal.anchor, key)

    def strange(self, heads: object, key: bytes) -> list[Anchor]:
        """Those heads, as servers see and send them, that this ledger never had and that no
        recovery has accounted for."""
        return [
            sent
            for sent in Anchor.read_all(heads, "heads")
            if sent not in self._accounted
            and ((own := self._journal.anchor_at(sent.lines)) is None or _keyed(own, key) != sent)
        ]

    @property
    def total(self) -> int:
        """Participations of all runs together, recoveries included; it never falls."""
        used = sum(entry.participations for entry in self.runs.values())
        return used + sum(lost.participations for lost in self.lost)

    @property
    def granted(self) -> list[str]:
        """The runs that hold a grant, in the order in which they were reserved."""
        return [name for name, entry in self.runs.items() if entry.has_grant]

    def chain(self, run: str) -> list[str]:
        """The run and those that it continues, the latest first."""
        found: list[str] = []
        while run in self.runs and run not in found:
            found.append(run)
            run = self.runs[run].continues
        return found

    def holder(self, run: str) -> str:
        """The run that has the grant of this one: itself, the last that continues it, or, where it
        was only offered, the one that it is to continue."""
        entry = self.runs[run]
        if entry.continues and not entry.began:
            run = entry.continues
        while self.runs[run].continued:
            run = self.runs[run].continued
        return run

    def used_before(self, run: str) -> int:
        """How often the site took part in the runs that this one continues."""
        entry = self.runs[run]
        return entry.before if entry.began else self.runs[entry.continues].used

    def place(self, run: str) -> int:
        """How many runs were reserved before this one and are still reserved."""
        return self.granted.index(run)

    def left(self, policy: Policy, *without: str) -> RemainingBudget:
        """What the policy still allows, all runs but those ``without`` being reserved."""
        reserved = [b for b in self.runs.values() if b.has_grant and b.run not in without]
        epsilon = policy.epsilon - sum(b.grant.epsilon or 0.0 for b in reserved)
        delta = policy.delta - sum(b.grant.delta for b in reserved)
        epsilon -= sum(lost.epsilon for lost in self.lost)
        delta -= sum(lost.delta for lost in self.lost)
        return RemainingBudget(
            max(0.0, epsilon),
            max(0.0, delta),
            policy.max_runs - len(reserved),
            self._alone(policy, reserved),
        )

    def _alone(self, policy: Policy, reserved: list[GrantedRun]) -> float:
        """What is left of ε towards the server and all other sites. A run without secure sums
        costs as much towards them as towards the server."""
        if policy.secure is None:
            return 0.0
        grants = [entry.grant for entry in reserved]
        spent = sum(g.epsilon_alone or g.epsilon or 0.0 for g in grants)
        spent += sum(lost.epsilon_alone or lost.epsilon for lost in self.lost)
        return max(0.0, policy.secure.epsilon_alone - spent)

    def reserve(self, asked: GrantedRun) -> None:
        """Reserve a grant, before the site says yes."""
        if not math.isfinite(asked.grant.epsilon or 0.0):
            raise Refused("policy-epsilon", "the grant's epsilon is infinite")
        line = {"event": "grant", "run": asked.run, "plan": asked.plan, "account": asked.account}
        self._append(line | {"grant": asked.grant.to_dict()})

    def begin(self, run: str, fixed: str) -> None:
        """The nonce is about to be shown; ``fixed`` is the digest of what the run began with, so
        that nobody can begin it again with another roster or draw."""
        entry = self.runs[run]
        if not entry.began:
            if entry.continues and not self.runs[entry.continues].has_grant:
                raise Refused("run-continued", f"{entry.continues} went on as another run")
            self._append({"event": "begin", "run": run, "fixed": fixed})
        elif entry.fixed != fixed:
            raise Refused("roster-changed", f"the run {run} began with another roster")

    def unused(self, besides: str) -> list[str]:
        """The runs, oldest first, that were granted and in which the site never took part: nothing
        was computed for them, so their grants can be taken back."""
        return [
            b.run for b in self.runs.values() if not b.used and b.has_grant and b.run != besides
        ]

    def release(self, runs: Iterable[str]) -> None:
        """Take back the grants of these runs."""
        for run in runs:
            self._append({"event": "release", "run": run})

    def offer_rest(self, run: str, continues: str) -> None:
        """Note that ``run`` is to continue another one; its grant moves when it begins."""
        if not self._can_offer_rest(run, continues):
            raise Refused("bad-continuation", f"the ledger has another run {run}")
        self._append({"event": "continue", "run": run, "continues": continues})

    def offered_rests(self, continues: str, besides: str) -> list[str]:
        """The runs that were offered to continue this one and did not begin."""
        return [
            b.run
            for b in self.runs.values()
            if b.continues == continues and not (b.began or b.released) and b.run != besides
        ]

    def participate(self, run: str, round: int, attempt: int = 0) -> int:
        """Count one more participation; it is on disk when this returns. Gives the run's count.
        ``attempt`` is that of a secure sum."""
        if not self.runs[run].has_grant:
            raise Refused("run-continued", f"the run {run} has no grant any more")
        line = {"event": "participate", "run": run, "round": round}
        self._append(line | ({"attempt": attempt} if attempt else {}))
        return self.runs[run].participations

    def recover(
        self, runs: Iterable[str], lost: RecoveryEntry, heads: Iterable[Anchor] = ()
    ) -> None:
        """Count the whole rest of these runs' grants as spent, and ``lost`` besides. ``heads`` are
        those of ledgers whose participations are accounted for by this."""
        rest = {run: self.runs[run].remaining for run in runs if self.runs[run].remaining}
        spent = {k: v for k, v in vars(lost).items() if k != "time" and v is not None}
        line = {"event": "recover", "rest": rest, "lost": spent}
        known = [dict(vars(head)) for head in heads]
        self._append(line | ({"heads": known} if known else {}))

    def _append(self, line: dict[str, Any]) -> None:
        time = _now()
        line = line | {"time": time}
        if not len(self._journal):
            first = {"event": "site", "site": self._site, "time": time}
            self._journal.append(first)
            self._apply(first)
        self._journal.append(line)
        self._apply(line)

    _site = ""

    def _apply(self, line: dict[str, Any]) -> None:
        """One line's meaning; a line that cannot be is damage."""
        event = line["event"]
        if event == "site":
            self._site = str(line["site"])
        elif event == "grant":
            reserved = GrantedRun(
                line["run"], line["plan"], SiteGrant(**line["grant"]), line["account"]
            )
            before = self.runs.pop(line["run"], reserved)  # its grant may have been taken back
            self.runs[line["run"]] = replace(reserved, began=before.began, fixed=before.fixed)
        elif event == "continue":
            self._offer_rest(line["run"], line["continues"])
        elif event == "begin":
            self._take_over(line["run"])
            self._change(line["run"], began=True, fixed=line["fixed"])
        elif event == "release":
            self._change(line["run"], released=True)
        elif event == "participate":
            self._count(line)
        elif event == "recover":
            for run, rest in line["rest"].items():
                self._change(run, participations=self.runs[run].participations + int(rest))
            self.lost.append(RecoveryEntry(**line["lost"], time=line["time"]))
            self._accounted += Anchor.read_all(line.get("heads", ()), "a recovery")
        else:
            raise ValueError(f"unknown event {event!r}")

    def _offer_rest(self, run: str, continues: str) -> None:
        """The same plan, grant and account under another name, to which nothing belongs yet."""
        if not self._can_offer_rest(run, continues):
            raise ValueError(f"the run {run} is there already")
        self.runs.pop(run, None)
        old = self.runs[continues]
        self.runs[run] = GrantedRun(run, old.plan, old.grant, old.account, continues=continues)

    def _can_offer_rest(self, run: str, continues: str) -> bool:
        """Whether a run is new here, or was offered as the same rest before and let go."""
        known = self.runs.get(run)
        return known is None or (known.released and known.continues == continues)

    def _take_over(self, run: str) -> None:
        """A run that continues another one begins: the grant moves to it, with all that was used
        of it, and the other one is over."""
        continues = self.runs[run].continues
        if not continues:
            return
        old = self.runs[continues]
        if not old.has_grant:
            raise ValueError(f"the run {continues} has no grant to go on with")
        self._change(run, before=old.used, last_round=old.last_round)
        self._change(continues, continued=run)

    def _count(self, line: dict[str, Any]) -> None:
        before, attempt = self.runs[line["run"]], int(line.get("attempt", 0))
        again = attempt > 0 and int(line["round"]) == before.last_round
        self._change(
            before.run,
            participations=before.participations + 1,
            last_round=max(before.last_round, int(line["round"])),
            last_attempt=attempt,
            voids=before.voids + int(again),
            first_time=before.first_time or line["time"],
            last_time=line["time"],
        )

    def _change(self, run: str, **changes: Any) -> None:
        self.runs[run] = replace(self.runs[run], **changes)


def _keyed(anchor: Anchor, key: bytes) -> Anchor:
    """The anchor with a keyed hash of its head."""
    content = f"{anchor.lines} {anchor.head}".encode()
    return Anchor(anchor.lines, hmac.new(key, content, hashlib.sha256).hexdigest())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
