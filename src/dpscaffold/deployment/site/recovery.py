"""A ledger that is behind: noticed, remembered, and put right by the operator alone.

The server has seen more participations than the ledger holds, or a ledger of this site that is not
this one: a backup was restored, the folder was copied and the copy used, or the ledger was lost.
How much was really spent is then unknown here, so the site refuses everything until ``dpscaffold
site recover`` counts the whole remaining grant as spent. If the server has seen another ledger, the
grant is counted a second time, since a copy may have used it too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dpscaffold.deployment.protocol.messages import Refused
from dpscaffold.deployment.provision import write_whole
from dpscaffold.deployment.site.file import Policy
from dpscaffold.deployment.site.ledger import GrantedRun, RecoveryEntry, SiteLedger
from dpscaffold.deployment.site.memory import RunMemory, StateFolder
from dpscaffold.privacy.numbers import round_up
from dpscaffold.runs.journal import Anchor

_FILE = "behind.json"
#: A site remembers this many heads of other ledgers; any one of them makes it refuse.
_MOST_HEADS = 64


@dataclass(frozen=True)
class SeenBeyond:
    """What a server has seen of a run beyond the ledger: the participations in it, those in all
    runs, and heads of ledgers that are not this one."""

    seen: int = 0
    total: int = 0
    heads: tuple[Anchor, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For ``behind.json``."""
        heads = [dict(vars(head)) for head in self.heads]
        return {"seen": self.seen, "total": self.total, "heads": heads}

    @classmethod
    def _read(cls, saved: dict[str, Any]) -> SeenBeyond:
        """From ``behind.json``."""
        heads = Anchor.read_all(saved.get("heads", ()), _FILE)
        return cls(int(saved["seen"]), int(saved["total"]), heads)


def read_behind(state: StateFolder) -> dict[str, SeenBeyond]:
    """What servers have seen beyond the ledger, by run; empty where all is well."""
    path = state.path / _FILE
    if not path.exists():
        return {}
    try:
        saved = json.loads(path.read_bytes())
        return {str(run): SeenBeyond._read(seen) for run, seen in saved.items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise Refused("state-damaged", f"{path}: {error}") from error


def note_behind(
    state: StateFolder, run: str, seen: int, total: int, heads: Iterable[Anchor] = ()
) -> None:
    """Remember that the ledger is behind, so that a later message cannot make it forgotten."""
    behind = read_behind(state)
    known = behind.get(run, SeenBeyond())
    strange = tuple(dict.fromkeys((*known.heads, *heads)))[:_MOST_HEADS]
    behind[run] = SeenBeyond(max(seen, known.seen), max(total, known.total), strange)
    saved = {name: beyond.to_dict() for name, beyond in behind.items()}
    write_whole(state.path / _FILE, json.dumps(saved).encode())


def recover(state: StateFolder, site: str, policy: Policy) -> list[str]:
    """Count what cannot be accounted for as spent; returns sentences on what was counted.

    Where the missing participations are all of one known run, the rest of its grant is counted.
    Otherwise other runs may be missing too, and everything that the policy still allows is counted.
    A run in which another ledger was seen is counted once more, for the copy that wrote it: a count
    may only ever be too large.
    """
    ledger = SiteLedger(state.ledger, site)
    behind = read_behind(state)
    folders = {known.run: memory for memory in state.runs() if (known := memory.enrolment())}
    unanchored = [
        run
        for run, memory in folders.items()
        if run not in ledger.runs or not _follows(memory, ledger)
    ]
    if not behind and not unanchored:
        return []
    heads = tuple(head for seen in behind.values() for head in seen.heads)
    copied = _grants_once_more(ledger, behind)
    known_runs = {run for run in {*behind, *unanchored} if run in ledger.runs}
    named = list(dict.fromkeys(map(ledger.holder, known_runs)))
    if _explained(ledger, behind, unanchored):
        beyond = [_beyond_grant(ledger.runs[run], seen.seen) for run, seen in behind.items()]
        ledger.recover(named, _added(copied, max([0, *beyond])), heads)
        said = [f"the rest of the grant of run {run} is recorded as spent" for run in named]
    else:
        left = ledger.left(policy)
        rest = ledger.granted
        after = ledger.total + sum(ledger.runs[run].remaining for run in rest)
        short = max([0, *(seen.total - after for seen in behind.values())])
        ledger.recover(rest, _added(copied, short, left.epsilon, left.delta), heads)
        said = [
            f"other participations are missing from the ledger too, so all that the policy still "
            f"allowed (epsilon {round_up(left.epsilon, 4)}) is recorded as spent"
        ]
    if copied.participations:
        said.append(
            f"the server has seen another ledger of this site, so what a copy may have used of the "
            f"grant (epsilon {round_up(copied.epsilon, 4)}) is recorded as spent too; find the "
            f"copy and stop it"
        )
    for run, memory in folders.items():
        known = memory.enrolment()
        if known is not None and run in ledger.runs:
            memory.drop_pending()
            memory.write_enrolment(replace(known, anchor=vars(ledger.anchor)))
        elif known is not None:
            memory.forget()
    (state.path / _FILE).unlink(missing_ok=True)
    return said


def _beyond_grant(entry: GrantedRun, seen: int) -> int:
    """How many participations a server has seen beyond the grant, with those of the runs that this
    one continues."""
    return entry.before + seen - entry.grant.participations


def _explained(
    ledger: SiteLedger, behind: dict[str, SeenBeyond], unanchored: Iterable[str]
) -> bool:
    """Whether all that is missing from the ledger can be of the runs that are named."""
    if not {*behind, *unanchored} <= set(ledger.runs):
        return False
    return all(
        max(0, seen.total - ledger.total) <= max(0, seen.seen - ledger.runs[run].participations)
        for run, seen in behind.items()
    )


def _grants_once_more(ledger: SiteLedger, behind: dict[str, SeenBeyond]) -> RecoveryEntry:
    """What a copy of this site may have used: the grants of the runs in which it was seen."""
    runs = [run for run, seen in behind.items() if seen.heads and run in ledger.runs]
    grants = [ledger.runs[run].grant for run in runs]
    return RecoveryEntry(
        sum(grant.participations for grant in grants),
        sum(grant.epsilon or 0.0 for grant in grants),
        sum(grant.delta for grant in grants),
        "",
        sum(grant.epsilon_alone or grant.epsilon or 0.0 for grant in grants),
    )


def _added(
    copied: RecoveryEntry, participations: int, epsilon: float = 0.0, delta: float = 0.0
) -> RecoveryEntry:
    alone = (copied.epsilon_alone or 0.0) + epsilon
    return RecoveryEntry(
        copied.participations + participations,
        copied.epsilon + epsilon,
        copied.delta + delta,
        "",
        alone or None,
    )


def _follows(memory: RunMemory, ledger: SiteLedger) -> bool:
    """Whether the ledger still begins with what it held when the run's files were written."""
    known, pending = memory.enrolment(), memory.pending()
    if known is None or not ledger.follows([known.anchor]):
        return False
    return pending is None or ledger.follows([pending.anchor])
