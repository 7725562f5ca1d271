"""``Site.answer``: the whole protocol on the site's side, whoever carries the messages.

Whatever arrives, an answer leaves: what was asked for, or a reason code. Free text and tracebacks
stay in the site's log. On a task the order of steps is the guarantee: the participation is in the
ledger, fsynced, before anything is computed, and the upload is on disk before it leaves.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dpscaffold import __version__
from dpscaffold.deployment.protocol.masks import Bits, as_vector
from dpscaffold.deployment.protocol.messages import (
    ASK,
    SERVER,
    VERSION,
    Header,
    Json,
    Refused,
    SignedMessage,
    Vectors,
    canonical,
    check_values,
    commitment,
    compatible,
    digest,
    fresh_id,
    public_of,
    reply,
    text_of,
    texts_of,
    whole_of,
)
from dpscaffold.deployment.protocol.sums import SUM, Attempt, Members, attempt_of, members_of
from dpscaffold.deployment.site.approval import request_of, requests_in
from dpscaffold.deployment.site.asked import SiteWork
from dpscaffold.deployment.site.audit import AuditLog
from dpscaffold.deployment.site.checking import (
    check_anchors,
    check_not_continued,
    check_round,
    check_seen,
    check_shapes,
    check_vectors,
    counts,
    enrolment_of,
    entry_of,
    held,
    mapping_of,
    named,
    question_of,
    restored,
    roster_of,
    sized_names,
)
from dpscaffold.deployment.site.continuing import (
    check_account,
    check_joined,
    check_rest,
    continues_in,
    granted_before,
    rounds_left,
    take_over,
)
from dpscaffold.deployment.site.file import Policy, SiteGrant, Terms, check_terms, grant
from dpscaffold.deployment.site.ledger import GrantedRun, SiteLedger
from dpscaffold.deployment.site.memory import Enrolment, PendingUpload, RunMemory, StateFolder
from dpscaffold.deployment.site.model import keep_models
from dpscaffold.deployment.site.secure import (
    KeyRing,
    check_attempt,
    check_list,
    check_members,
    check_same_members,
    summed,
    sums_of,
)
from dpscaffold.deployment.site.work import accepted_names
from dpscaffold.errors import BadInput
from dpscaffold.privacy.ledger import participations_within

Reply = tuple[dict[str, Json], Vectors]

#: A site keeps this many grants of runs in which it never took part; older ones are taken back.
MOST_UNUSED = 8
#: A site holds the records of this many runs in memory; those of others are read again when needed.
MOST_OPEN = 4


@dataclass
class Site:
    """One site: its identity, its state on disk, and its policy as it is now.

    ``open_work(offer, policy)`` reads the data by the offer's schema; ``policy()`` reads the file,
    so that a stricter policy counts from the next message; ``keeps_keys`` says that this process
    answers more than one message, which secure sums need; ``step`` is called at each step of a
    task, for tests that crash there.
    """

    name: str
    coordinator: str
    key: Ed25519PrivateKey
    state: StateFolder
    policy: Callable[[], Policy]
    open_work: Callable[[Mapping[str, Any], Policy], SiteWork]
    keeps_keys: bool = True
    log: Callable[[str], None] = lambda sentence: None
    step: Callable[[str], None] = lambda name: None
    refusals: dict[str, int] = field(default_factory=dict)
    _works: dict[str, SiteWork] = field(default_factory=dict)
    _rings: dict[str, KeyRing] = field(default_factory=dict)
    _ledger: SiteLedger | None = None
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Open the requests and the audit log of the state folder."""
        self._requests = requests_in(self.state.path)

    def answer(self, message: SignedMessage) -> SignedMessage:
        """The answer to any message at all."""
        if not self._busy.acquire(blocking=False):
            return self._sealed(message, self._refusal("busy"), {})
        try:
            fields, vectors = self._answered(message)
        finally:
            self._busy.release()
        return self._sealed(message, fields, vectors)

    def _answered(self, message: SignedMessage) -> Reply:
        """What was asked for, or a code; the audit log has it before it leaves."""
        try:
            fields, vectors = self._handle(message)
            self.audit.answered(message.header, fields, vectors)
            return fields, vectors
        except Refused as no:
            self.log(f"refused: {no}")
            fields = self._refusal(no.code)
        except Exception:  # whatever it is, only a code leaves
            self.log(f"error: {traceback.format_exc()}")
            fields = self._refusal("site-error")
        if fields["reason"] != "bad-signature":  # strangers must not fill the disk
            try:
                self.audit.answered(message.header, fields, {})
            except (BadInput, OSError) as error:
                self.log(f"error: the audit log cannot be written: {error}")
        return fields, {}

    @property
    def audit(self) -> AuditLog:
        """The site's audit log."""
        return self._requests.audit

    def _sealed(self, message: SignedMessage, fields: Header, vectors: Vectors) -> SignedMessage:
        return reply(message, self.name, fields, vectors, self.key)

    def _refusal(self, reason: str) -> dict[str, Json]:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        return {"status": "no", "reason": reason}

    def _handle(self, message: SignedMessage) -> Reply:
        header = message.header
        if not message.signed_by(self.coordinator) or header.get("direction") != ASK:
            raise Refused("bad-signature")
        if header.get("version") != VERSION:
            raise Refused("version", f"{header.get('version')!r:.40}")
        if header.get("site") != self.name:
            raise Refused("not-for-me", f"{header.get('site')!r:.80}")
        if (self.state.path / "paused").exists():
            raise Refused("paused")
        kinds = {
            "offer": self._offer,
            "begin": self._begin,
            "draw": self._draw,
            "key": self._mask_key,
            "task": self._task,
            "settle": self._settle,
        }
        name = text_of(header, "kind", "bad-offer")
        kind = kinds.get(name)
        if kind is None:
            raise Refused("version", f"{header.get('kind')!r:.40}")
        run = text_of(header, "run", "unknown-run")
        memory, ledger = self.state.run(run), self._current_ledger()
        try:
            check_seen(self.state, header, run, ledger)
            check_not_continued(run, ledger)
            self._requests.check(run, self.policy().approval, new=name == "offer")
            self._requests.check_earlier(ledger.chain(run)[1:])
            fields, vectors = kind(message, run, memory, ledger)
        except Refused as no:
            self.log(f"refused: {no}")
            fields, vectors = self._refusal(no.code), {}
        head = ledger.shown(self.state.head_key)
        return {**fields, "ledger": dict(vars(head))}, vectors

    def _current_ledger(self) -> SiteLedger:
        """The ledger; it is read and verified again only where its file is not as it was left, so
        that the cost of a message does not grow with the run."""
        if self._ledger is None or not self._ledger.untouched:
            self._ledger = SiteLedger(self.state.ledger, self.name)
        return self._ledger

    # --- enrolment

    def _offer(
        self, message: SignedMessage, run: str, memory: RunMemory, ledger: SiteLedger
    ) -> Reply:
        """Check the offer, reserve the grant, commit to a nonce."""
        offer = dict(mapping_of(message.header, "offer"))
        package = message.header.get("package")
        if not compatible(package):
            raise Refused(
                "version", f"the server has dpscaffold {package!r:.20}, here {__version__}"
            )
        promised = text_of(message.header, "commitment", "bad-offer")
        plan, policy, continues = digest(offer), self.policy(), continues_in(message.header)
        known = memory.enrolment()
        if known is None:
            work = self.open_work(offer, policy)
            members = self._members(message.header, work, policy)
            terms = summed(work, self.name, members, policy)
            check_terms(policy, terms)
            self._reserve(run, message.header, policy, work, terms, ledger, members)
            known = Enrolment(
                run=run,
                plan=plan,
                offer=offer,
                records=work.public_records,
                declared=work.declared,
                nonce=fresh_id(),
                server_commitment=promised,
                anchor=vars(ledger.anchor),
                members={} if members is None else members.to_dict(),
                continues=continues,
            )
            self.step("reserved")
            memory.write_enrolment(known)
            self._open(run, work)
        elif known.plan != plan or known.server_commitment != promised:
            raise Refused("plan-changed", f"enrolled in {known.plan}")
        elif known.continues != continues:
            raise Refused("bad-continuation", f"it was to continue {known.continues!r}")
        entry = entry_of(run, ledger)
        sizes: dict[str, Json] = {"records": known.records, "declared": known.declared}
        return {
            "status": "yes",
            **(sizes if known.records is not None else {}),
            "cap": entry.grant.participations,
            "uploads": held(memory),
            "commitment": commitment(run, self.name, known.nonce),
            **({"earlier": ledger.used_before(run)} if entry.continues else {}),
            **counts(entry, ledger),
        }, {}

    def _members(self, header: Header, work: SiteWork, policy: Policy) -> Members | None:
        """Everybody in a run with secure sums, once the policy allows them; None without."""
        if not work.secure:
            return None
        if policy.secure is None or not self.keeps_keys:
            raise Refused("policy-secure", "site.toml has no [secure], or this process ends")
        names, sizes = sized_names(header)
        members = members_of(header, names, sizes)
        check_members(policy.secure, self.name, public_of(self.key), members)
        if sizes and sizes[names.index(self.name)] != work.public_records:
            raise Refused("data-changed", f"the server expects {sizes[names.index(self.name)]}")
        return members

    def _reserve(
        self,
        run: str,
        header: Header,
        policy: Policy,
        work: SiteWork,
        terms: Terms,
        ledger: SiteLedger,
        members: Members | None,
    ) -> None:
        """A grant for a new run, once it is approved; or the rest of the one that it continues. One
        that the ledger holds already (the run's folder was lost) stays as it is, if it is for the
        records of now."""
        offer, continues = dict(mapping_of(header, "offer")), continues_in(header)
        plan, old = digest(offer), granted_before(continues, ledger)
        if run in ledger.runs and not ledger.runs[run].released:
            entry = entry_of(run, ledger)
            if entry.plan != plan:
                raise Refused("plan-changed", f"the ledger has {entry.plan}")
            if entry.continues != (continues if old is not None else ""):
                raise Refused("bad-continuation", f"the ledger continues {entry.continues!r}")
            check_account(entry, work, terms)
            return
        if old is not None:
            self._requests.check_earlier(ledger.chain(old.run))
            check_rest(run, old, plan, work, terms, self.state)
            granted = replace(old.grant, participations=old.remaining)
        else:
            needed = rounds_left(header, terms) if continues else terms
            granted = self._granted(run, policy, work, needed, ledger)
        left = ledger.left(policy)
        asked = request_of(run, offer, self.coordinator, work, terms, granted, left, members)
        asked = replace(asked, continues="" if old is None else continues)
        self._requests.admit(asked, offer, policy.approval, ledger.granted)
        if old is not None:
            self._take_back(ledger.offered_rests(old.run, besides=run), ledger)
            ledger.offer_rest(run, old.run)
            return
        account = terms.to_dict(work.records, work.batch, work.declared)
        ledger.reserve(GrantedRun(run, plan, granted, account))

    def _granted(
        self, run: str, policy: Policy, work: SiteWork, terms: Terms, ledger: SiteLedger
    ) -> SiteGrant:
        """A grant that fits next to all others, or next to those of runs that were used."""

        def asked(*without: str) -> SiteGrant:
            left = ledger.left(policy, *without)
            return grant(policy, terms, work.records, work.batch, left, work.declared)

        unused = ledger.unused(besides=run)
        try:
            granted, given_up = asked(), unused[: max(0, len(unused) + 1 - MOST_UNUSED)]
        except Refused:
            granted, given_up = asked(*unused), unused
        self._take_back(given_up, ledger)
        return granted

    def _take_back(self, runs: list[str], ledger: SiteLedger) -> None:
        """Release grants without any participation, and forget what was kept for them."""
        ledger.release(runs)
        for run in runs:
            self.state.run(run).forget()
            self._works.pop(run, None)

    def _begin(
        self, message: SignedMessage, run: str, memory: RunMemory, ledger: SiteLedger
    ) -> Reply:
        """Fix roster and commitments, then show the nonce: from here on the grant is reserved."""
        known = enrolment_of(memory)
        names, sizes, commitments = roster_of(message.header)
        if known.roster and (known.roster, known.sizes) != (names, sizes):
            raise Refused("roster-changed")
        if known.roster and dict(known.commitments) != commitments:
            raise Refused("roster-changed", "other commitments")
        entry = entry_of(run, ledger)
        policy = self.policy()
        if not self._cap(entry, policy, self._work(known, entry, policy), ledger):
            raise Refused("policy-epsilon", "the policy has become stricter since the offer")
        check_same_members(known, names, sizes)
        if self.name not in names:
            raise Refused("roster-changed", "this site is not in it")
        listed = sizes[names.index(self.name)] if sizes else None
        if listed != known.records:
            raise Refused("roster-changed", f"this site has the size {listed} in it")
        if set(commitments) != {*names, SERVER}:
            raise Refused("bad-draw", "not everybody has committed")
        mine = commitment(run, self.name, known.nonce)
        lost = entry.began and commitments[self.name] != mine  # the run's folder was lost
        if not lost and commitments[self.name] != mine:
            raise Refused("bad-draw", "this site committed to something else")
        if commitments[SERVER] != known.server_commitment:
            raise Refused("bad-draw", "the server committed to something else")
        with_members = (known.members,) if known.members else ()
        if entry.continues and not entry.began:
            check_joined(entry.continues, names, self.state)
        ledger.begin(run, digest(list(names), list(sizes), commitments, *with_members))
        self.step("begun")
        if entry.continues:
            take_over(self.state.run(entry.continues), memory)
        if not known.roster:
            memory.amend(known, roster=names, sizes=sizes, commitments=commitments)
        return {"status": "yes", "nonce_shown": "" if lost else known.nonce}, {}

    def _draw(
        self, message: SignedMessage, run: str, memory: RunMemory, ledger: SiteLedger
    ) -> Reply:
        """Check the nonces against their commitments and keep them."""
        known = enrolment_of(memory)
        nonces = texts_of(message.header, "nonces", "bad-draw")
        if not known.roster or set(nonces) != set(known.commitments):
            raise Refused("bad-draw", "the run has not begun here, or names are missing")
        for name, nonce in nonces.items():
            if commitment(run, name, nonce) != known.commitments[name]:
                raise Refused("bad-draw", f"the nonce of {name!r} is not the committed one")
        if not known.nonces:
            memory.amend(known, nonces=nonces)
        return {"status": "yes"}, {}

    # --- rounds

    def _mask_key(
        self, message: SignedMessage, run: str, memory: RunMemory, ledger: SiteLedger
    ) -> Reply:
        """This site's key for the masks of a run, signed, and the last attempt that it began. It is
        given only where the site could still take part."""
        known, entry = enrolment_of(memory), entry_of(run, ledger)
        if message.header.get("plan") != known.plan:
            raise Refused("plan-changed")
        if not known.members or not known.nonces:
            raise Refused("bad-draw", "the run has not begun here, or has no secure sums")
        policy = self.policy()
        if entry.used >= self._cap(entry, policy, self._work(known, entry, policy), ledger):
            raise Refused("budget-spent")
        return {
            "status": "yes",
            "key": dict(vars(self._ring(known).announced(self.key))),
            "last_round": entry.last_round,
            "last_attempt": entry.last_attempt,
            **counts(entry, ledger),
        }, {}

    def _ring(self, known: Enrolment) -> KeyRing:
        """The keys of a run; every start of this process makes new ones."""
        if known.run not in self._rings:
            members = Members.from_dict(known.members)
            session = members.session(known.run, known.plan)
            self._rings[known.run] = KeyRing(self.name, session, members)
        return self._rings[known.run]

    def _task(
        self, message: SignedMessage, run: str, memory: RunMemory, ledger: SiteLedger
    ) -> Reply:
        """One participation, or the same answer again."""
        header = message.header
        known = enrolment_of(memory)
        entry = entry_of(run, ledger)
        pending = memory.pending()
        check_anchors(known, pending, ledger)
        if header.get("plan") != known.plan:
            raise Refused("plan-changed")
        policy = self.policy()
        work = self._work(known, entry, policy)
        round = whole_of(header, "round", "bad-round", least=1)
        drawn = check_round(self.name, round, known, entry, work)
        attempt = attempt_of(header) if known.members else None
        restore = check_vectors(message.vectors, work, round)
        self.step("checked")
        acknowledged = text_of(header, "acknowledged", "state-mismatch")
        nonce = text_of(header, "nonce", "bad-offer")
        slots = memory.settle(acknowledged, restore, pending, nonce).slots
        self.step("settled")
        question = question_of(run, round, acknowledged, message.digests, attempt)
        if pending is not None and memory.has_pending and pending.question == question:
            return self._upload(pending, entry, ledger, fresh=False)
        if attempt is not None:
            self._check_sum(attempt, round, known, drawn, entry, policy)
        if entry.used >= self._cap(entry, policy, work, ledger):
            raise Refused("budget-spent")
        ledger.participate(run, round, attempt.number if attempt else 0)
        self.step("counted")
        pending = self._compute(work, known, round, message, slots, question, ledger, attempt)
        self.step("computed")
        memory.write_pending(pending)
        self.step("stored")
        return self._upload(pending, entry_of(run, ledger), ledger, fresh=True)

    def _check_sum(
        self,
        attempt: Attempt,
        round: int,
        known: Enrolment,
        drawn: tuple[str, ...],
        entry: GrantedRun,
        policy: Policy,
    ) -> None:
        """Refuse an attempt at a secure sum before anything is reserved for it."""
        agreed = sums_of(entry)
        if policy.secure is None or agreed is None:
            raise Refused("policy-secure", "site.toml has no [secure] any more")
        members = Members.from_dict(known.members)
        check_members(policy.secure, self.name, public_of(self.key), members)
        check_attempt(attempt, round, entry, min(agreed.voids, policy.secure.voids))
        check_list(attempt, self.name, drawn, max(agreed.least, policy.secure.least))
        self._ring(known).pairs(attempt)

    def _compute(
        self,
        work: SiteWork,
        known: Enrolment,
        round: int,
        message: SignedMessage,
        slots: Vectors,
        question: str,
        ledger: SiteLedger,
        attempt: Attempt | None,
    ) -> PendingUpload:
        received = {k: v for k, v in message.vectors.items() if not k.startswith("restore.")}
        if attempt is None:
            zero = {name: np.zeros(size, "<f4") for name, size in work.remembers().items()}
            user = known.roster.index(self.name)
            uploaded, kept = work.participate(round, user, received, {**zero, **slots})
        else:
            model = canonical({name: message.digests[name].hex() for name in received})
            uploaded, kept = self._masked(work, known, round, received, attempt, model), {}
        count = ledger.runs[known.run].participations
        return PendingUpload(fresh_id(), question, round, count, ledger.anchor, uploaded, kept)

    def _masked(
        self,
        work: SiteWork,
        known: Enrolment,
        round: int,
        received: Vectors,
        attempt: Attempt,
        model: bytes,
    ) -> Vectors:
        """This site's integers in a secure sum, with noise for this list, under their mask."""
        members = Members.from_dict(known.members)
        words = work.integers(round, self.name, received, members, len(attempt.names))
        bits: Bits = 32 if words.dtype.itemsize == 4 else 64
        hidden = words + self._ring(known).mask(attempt, round, model, len(words), bits)
        return {SUM: as_vector(hidden)}

    def _upload(
        self, pending: PendingUpload, entry: GrantedRun, ledger: SiteLedger, fresh: bool
    ) -> Reply:
        fields: dict[str, Json] = {
            "status": "yes",
            "upload": pending.upload,
            "round": pending.round,
            "fresh": fresh,
            **counts(entry, ledger),
        }
        return fields, pending.vectors

    def _settle(
        self, message: SignedMessage, run: str, memory: RunMemory, ledger: SiteLedger
    ) -> Reply:
        """Take the last acknowledgement; at the end of the run, keep the model too."""
        known = enrolment_of(memory)
        policy = self.policy()
        work = self._work(known, entry_of(run, ledger), policy)
        restore = restored(message.vectors, work)
        acknowledged = text_of(message.header, "acknowledged", "state-mismatch")
        nonce = text_of(message.header, "nonce", "bad-offer")
        slots = memory.settle(acknowledged, restore, memory.pending(), nonce).slots
        if message.header.get("over") is True:
            model = named(message.vectors, "model.")
            check_shapes(model, {"params": work.final_parameters})
            check_values(model, math.inf)
            if "fit" not in known.offer:  # what such a run fits is in the next offer
                offer = accepted_names(known.offer, policy)
                rounds = entry_of(run, ledger).last_round
                kept = (offer, model["params"], slots, rounds)
                keep_models(self.state.path, self.name, known, *kept)
            memory.amend(known, over=True)
        return {"status": "yes", **counts(entry_of(run, ledger), ledger)}, {}

    # --- checks

    def _work(self, known: Enrolment, entry: GrantedRun, policy: Policy) -> SiteWork:
        """The run's work under the policy of today. Records may have changed since the site
        enrolled, their public number may not: rates, divisors and weights are made of it."""
        work = self._works.get(known.run) or self.open_work(known.offer, policy)
        self._open(known.run, work)
        check_terms(policy, replace(work.terms, sums=sums_of(entry)))
        if work.public_records != known.records:
            raise Refused(
                "data-changed", f"{work.public_records} records instead of {known.records}"
            )
        return work

    def _open(self, run: str, work: SiteWork) -> None:
        """Hold a run's records, and let those go that were used longest ago."""
        self._works.pop(run, None)
        self._works[run] = work
        for oldest in list(self._works)[:-MOST_OPEN]:
            del self._works[oldest]

    def _cap(self, entry: GrantedRun, policy: Policy, work: SiteWork, ledger: SiteLedger) -> int:
        """How often the site takes part in a run: the grant, or less where the policy has become
        stricter since. The shares ε/``max_runs`` and δ/``max_runs`` are for new grants; every
        number of the file counts at once."""
        granted, cap = entry.grant, entry.grant.participations
        holder = ledger.holder(entry.run)
        if ledger.place(holder) >= policy.max_runs:
            return 0
        if granted.epsilon is None:
            return cap
        left = ledger.left(policy, holder)
        slack = 1 + 1e-9  # sums over runs are rounded
        if granted.delta > left.delta * slack:
            return 0
        terms = replace(work.terms, sums=sums_of(entry))
        facts = (work.records, work.batch, granted.delta, work.declared)
        if granted.epsilon > left.epsilon * slack:
            run = terms.run(*facts)
            cap = participations_within(run, left.epsilon, cap)
        if granted.epsilon_alone is not None and granted.epsilon_alone > left.alone * slack:
            run = terms.run_alone(*facts)
            cap = participations_within(run, left.alone, cap)
        return cap
