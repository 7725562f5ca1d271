"""What a message must look like before a site acts on it, and what its answer counts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dpscaffold.deployment.protocol.messages import (
    Header,
    Json,
    Refused,
    Vectors,
    check_values,
    digest,
    joint_seed,
    texts_of,
    whole_of,
)
from dpscaffold.deployment.protocol.sums import Attempt
from dpscaffold.deployment.site.asked import SiteWork
from dpscaffold.deployment.site.ledger import GrantedRun, SiteLedger
from dpscaffold.deployment.site.memory import Enrolment, PendingUpload, RunMemory, StateFolder
from dpscaffold.deployment.site.recovery import note_behind, read_behind
from dpscaffold.errors import BadInput

#: The largest absolute value that a server may send.
LARGEST_VALUE = 1e4


def question_of(
    run: str,
    round: int,
    acknowledged: str,
    digests: Mapping[str, bytes],
    attempt: Attempt | None = None,
) -> str:
    """What makes two tasks the same question: run, round, x and what is shared (by their vectors'
    digests), and the memory that the answer starts from; of a secure sum also the attempt, its list
    and its keys."""
    asked: dict[str, Json] = {
        k: v.hex() for k, v in digests.items() if not k.startswith("restore.")
    }
    tried = () if attempt is None else (attempt.identity,)
    return digest("question", run, round, acknowledged, asked, *tried)


def counts(entry: GrantedRun, ledger: SiteLedger) -> dict[str, Json]:
    """What every answer says of the ledger: participations in this run, and in all."""
    return {"participations": entry.participations, "total": ledger.total}


def held(memory: RunMemory) -> list[Json]:
    """The upload ids that this site knows of."""
    pending = memory.pending()
    return [memory.acknowledged().upload, *([pending.upload] if pending else [])]


def named(vectors: Vectors, prefix: str) -> dict[str, np.ndarray]:
    """The vectors whose names begin with ``prefix``, under the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in vectors.items() if k.startswith(prefix)}


def check_vectors(vectors: Vectors, work: SiteWork, round: int) -> dict[str, np.ndarray] | None:
    """Names, lengths and values of a task's vectors; gives those to restore memory from."""
    received = {k: v for k, v in vectors.items() if not k.startswith("restore.")}
    check_shapes(received, work.expects(round))
    return restored(vectors, work)


def restored(vectors: Vectors, work: SiteWork) -> dict[str, np.ndarray] | None:
    """The slots that the server sends to restore memory from; None where it sends none, although
    there are some that it may know."""
    restore = named(vectors, "restore.")
    if restore:
        check_shapes(restore, work.shares())
    check_values(vectors, LARGEST_VALUE)
    return restore if restore or not work.shares() else None


def check_shapes(vectors: Vectors, wanted: Mapping[str, int]) -> None:
    """Refuse vectors of other names or lengths than are wanted."""
    found = {name: len(vector) for name, vector in vectors.items()}
    if found != dict(wanted):
        raise Refused("bad-shape", f"{found} instead of {dict(wanted)}")


def roster_of(header: Header) -> tuple[tuple[str, ...], tuple[int, ...], dict[str, str]]:
    """Names, sizes and commitments of everybody in a run, as its server tells them."""
    names, sizes = sized_names(header)
    return names, sizes, texts_of(header, "commitments", "bad-draw")


def sized_names(header: Header) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes of everybody in a run. There are no sizes where the unit is a user."""
    names, sizes = header.get("roster"), header.get("sizes", [])
    if (
        not isinstance(names, list)
        or not isinstance(sizes, list)
        or not all(isinstance(name, str) and name for name in names)
        or not all(type(size) is int and size > 0 for size in sizes)
        or len(set(map(str, names))) != len(names)
        or (sizes and len(sizes) != len(names))
    ):
        raise Refused("roster-changed", "the roster is not a list of names with their sizes")
    return tuple(str(name) for name in names), tuple(int(str(size)) for size in sizes)


def enrolment_of(memory: RunMemory) -> Enrolment:
    """What the site agreed to in this run."""
    known = memory.enrolment()
    if known is None:
        raise Refused("unknown-run")
    return known


def entry_of(run: str, ledger: SiteLedger) -> GrantedRun:
    """The run's grant in the site's ledger."""
    entry = ledger.runs.get(run)
    if entry is None:
        raise Refused("ledger-behind", f"the run {run} is not in the ledger")
    if entry.released:
        raise Refused("unknown-run", "its grant was taken back before it began")
    return entry


def check_not_continued(run: str, ledger: SiteLedger) -> None:
    """Refuse every message about a run that goes on as another one: its grant is there."""
    entry = ledger.runs.get(run)
    if entry is not None and entry.continued:
        raise Refused("run-continued", f"it goes on as {entry.continued}")


def mapping_of(header: Header, name: str) -> Mapping[str, Json]:
    """A table of a message."""
    found = header.get(name)
    if not isinstance(found, dict):
        raise Refused("bad-offer", "it is not a table")
    return found


def check_anchors(known: Enrolment, pending: PendingUpload | None, ledger: SiteLedger) -> None:
    """The ledger must still begin with what it held when these files were written."""
    stored = [] if pending is None else [pending.anchor]
    if not ledger.follows([known.anchor, *stored]):
        raise Refused("ledger-behind", "the ledger was emptied, shortened or replaced")


def check_seen(state: StateFolder, header: Header, run: str, ledger: SiteLedger) -> None:
    """The server may not have seen more participations than the ledger holds, nor a ledger of this
    site that is not the beginning of this one."""
    seen = whole_of(header, "seen", "bad-offer")
    total = whole_of(header, "seen_total", "bad-offer")
    try:
        strange = ledger.strange(header.get("heads", []), state.head_key)
    except BadInput as error:
        raise Refused("bad-offer", str(error)) from error
    entry = ledger.runs.get(run)
    if strange or seen > (entry.participations if entry else 0) or total > ledger.total:
        note_behind(state, run, seen, total, strange)
    behind = read_behind(state)
    if behind:
        raise Refused("ledger-behind", f"the server has seen more: {behind}")


def check_round(
    name: str, round: int, known: Enrolment, entry: GrantedRun, work: SiteWork
) -> tuple[str, ...]:
    """Refuse a round that is not in the plan, for which the site is not drawn, or that is past.
    Gives the names of those who are drawn."""
    if round > work.terms.rounds:
        raise Refused("bad-round", f"{round} of {work.terms.rounds}")
    if not known.nonces:
        raise Refused("bad-draw", "the nonces were never shown here")
    seed = joint_seed(known.run, known.nonces) if work.terms.protected else None
    drawn = work.cohort(round, len(known.roster), seed)
    if known.roster.index(name) not in drawn:
        raise Refused("not-drawn", f"round {round}")
    if round < entry.last_round:
        raise Refused("stale-round", f"{round}, after {entry.last_round}")
    return tuple(known.roster[user] for user in drawn)
