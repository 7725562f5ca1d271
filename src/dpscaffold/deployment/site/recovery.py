"""A ledger that is behind: noticed, remembered, and put right by the operator alone.

The server has seen more participations than the ledger holds: a backup was restored, the folder
was copied and the copy used, or the ledger was lost. How much was really spent is then unknown
here, so the site refuses everything until ``dpscaffold site recover`` books the whole remaining
grant as spent.
"""

from __future__ import annotations

import json
from dataclasses import replace

from dpscaffold.deployment.protocol.messages import Refused
from dpscaffold.deployment.provision import write_whole
from dpscaffold.deployment.site.file import Policy
from dpscaffold.deployment.site.ledger import RecoveryEntry, SiteLedger
from dpscaffold.deployment.site.memory import RunMemory, StateFolder
from dpscaffold.privacy.showing import round_up

_FILE = "behind.json"


def read_behind(state: StateFolder) -> dict[str, dict[str, int]]:
    """What servers have seen beyond the ledger, by run; empty where all is well."""
    path = state.path / _FILE
    if not path.exists():
        return {}
    try:
        return {str(run): dict(seen) for run, seen in json.loads(path.read_bytes()).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise Refused("state-damaged", f"{path}: {error}") from error


def note_behind(state: StateFolder, run: str, seen: int, total: int) -> None:
    """Remember that the ledger is behind, so that a later message cannot make it forgotten."""
    behind = read_behind(state)
    known = behind.get(run, {"seen": 0, "total": 0})
    behind[run] = {"seen": max(seen, known["seen"]), "total": max(total, known["total"])}
    write_whole(state.path / _FILE, json.dumps(behind).encode())


def recover(state: StateFolder, site: str, policy: Policy) -> list[str]:
    """Book what cannot be accounted for as spent; returns sentences on what was booked.

    Where the missing participations are all of one known run, the rest of its grant is booked.
    Otherwise other runs may be missing too, and everything that the policy still allows is booked:
    a count may only ever be too large.
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
    said = []
    explained = set(behind) | set(unanchored) <= set(ledger.runs)
    for run, seen in behind.items():
        count = ledger.runs[run].participations if run in ledger.runs else 0
        explained = explained and seen["total"] - ledger.total <= seen["seen"] - count
    named = [run for run in {*behind, *unanchored} if run in ledger.runs]
    if explained:
        beyond = [seen["seen"] - ledger.runs[r].grant.participations for r, seen in behind.items()]
        ledger.recover(named, RecoveryEntry(max([0, *beyond]), 0.0, 0.0, ""))
        said += [f"the rest of the grant of run {run} is recorded as spent" for run in named]
    else:
        left = ledger.left(policy)
        rest = [run for run, booking in ledger.runs.items() if not booking.released]
        after = ledger.total + sum(ledger.runs[run].remaining for run in rest)
        short = max([0, *(seen["total"] - after for seen in behind.values())])
        ledger.recover(rest, RecoveryEntry(short, left.epsilon, left.delta, ""))
        said.append(
            f"other participations are missing from the ledger too, so all that the policy still "
            f"allowed (epsilon {round_up(left.epsilon, 4)}) is recorded as spent"
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


def _follows(memory: RunMemory, ledger: SiteLedger) -> bool:
    """Whether the ledger still begins with what it held when the run's files were written."""
    known, pending = memory.enrolment(), memory.pending()
    if known is None or not ledger.follows([known.anchor]):
        return False
    return pending is None or ledger.follows([pending.anchor])
