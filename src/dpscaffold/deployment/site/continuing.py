"""A run that goes on with other sites: what a site checks before its grant goes on with it.

Sites that take part in a run have committed to its draw, so nobody can join it. The rest of its
rounds can be offered as a run of its own, to more sites. A site that took part in the first one
grants nothing new for it. Its guarantee is that it takes part at most n times with one mechanism
(Theorem 3), which depends neither on the other sites nor on the draw: so the same n covers both
runs, if the mechanism is the same, what was used stays used, and the first run is over for good.
"""

from __future__ import annotations

import json
import os
from typing import Any

from dpscaffold.atomic import sync_folder
from dpscaffold.deployment.protocol.messages import Header, Refused, text_of, whole_of
from dpscaffold.deployment.site.asked import SiteWork
from dpscaffold.deployment.site.file import Terms
from dpscaffold.deployment.site.ledger import GrantedRun, SiteLedger
from dpscaffold.deployment.site.memory import Enrolment, RunMemory, StateFolder

#: The boxes of a run's folder that go on with it.
BOXES = ("memory.box", "pending.box")


def continues_in(header: Header) -> str:
    """The run that an offer continues; the empty text where it continues none."""
    return text_of(header, "continues", "bad-continuation") if "continues" in header else ""


def granted_before(continues: str, ledger: SiteLedger) -> GrantedRun | None:
    """The run that is continued, if this site has a grant for it; None at a site that joins."""
    old = ledger.runs.get(continues)
    return None if old is None or old.released else old


def rounds_left(header: Header, terms: Terms) -> Terms:
    """The terms of a site that joins: it takes part in the rounds that are left alone."""
    done = whole_of(header, "after", "bad-continuation")
    if done >= terms.rounds:
        raise Refused("bad-continuation", f"{done} of {terms.rounds} rounds are over")
    return Terms(**{**vars(terms), "rounds": terms.rounds - done})


def check_rest(
    run: str, old: GrantedRun, plan: str, work: SiteWork, terms: Terms, state: StateFolder
) -> None:
    """Refuse to go on with a grant for anything but the rest of the run that it was given for.

    The plan is compared by its digest. What the account is made of is compared with the ledger too,
    because it also depends on the site's file.
    """
    if old.continued and old.continued != run:
        raise Refused("run-continued", f"{old.run} went on as {old.continued}")
    if work.secure:
        raise Refused("bad-continuation", "the noise of secure sums depends on all members")
    if old.plan != plan:
        raise Refused("plan-changed", f"the run {old.run} has the plan {old.plan}")
    before = enrolment_before(old.run, state)
    if before.over:
        raise Refused("bad-continuation", f"the run {old.run} is over")
    if work.public_records != before.records:
        raise Refused("data-changed", f"{work.public_records} records instead of {before.records}")
    check_account(old, work, terms)
    if not old.remaining:
        raise Refused("budget-spent", f"the grant of the run {old.run} is used up")


def check_account(entry: GrantedRun, work: SiteWork, terms: Terms) -> None:
    """Refuse a grant for other records or another mechanism: its ε would not be that of what is
    computed."""
    now = _public(terms.to_dict(work.records, work.batch, work.declared), work)
    before = _public(entry.account, work)
    if now != before:
        changed = [name for name in now if now[name] != before.get(name)]
        code = "data-changed" if "records" in changed else "bad-continuation"
        raise Refused(code, f"the run {entry.run} was granted with other {', '.join(changed)}")


def _public(account: dict[str, Any], work: SiteWork) -> Any:
    """What an account is made of, as it is stored; without sizes where nobody may know them, as a
    refusal would tell them and no ε depends on them."""
    hidden = ("records", "batch") if work.public_records is None else ()
    return json.loads(json.dumps({k: v for k, v in account.items() if k not in hidden}))


def enrolment_before(run: str, state: StateFolder) -> Enrolment:
    """What this site agreed to in the run that is continued."""
    known = state.run(run).enrolment()
    if known is None or not known.nonces:
        raise Refused("bad-continuation", f"the run {run} never began here, or its folder is lost")
    return known


def check_joined(run: str, names: tuple[str, ...], state: StateFolder) -> None:
    """Refuse a roster that nobody has joined: the run could go on as it is, and another draw is
    all that would change."""
    if not set(names) - set(enrolment_before(run, state).roster):
        raise Refused("bad-continuation", "nobody has joined the roster")


def take_over(old: RunMemory, new: RunMemory) -> None:
    """Move a run's slots, and its upload that waits for an acknowledgement, to the run that goes on
    with it. Done again after a crash, it moves what is left."""
    found = [name for name in BOXES if (old.folder / name).exists()]
    for name in found:
        os.replace(old.folder / name, new.folder / name)
    if found:
        sync_folder(new.folder)
        sync_folder(old.folder)
