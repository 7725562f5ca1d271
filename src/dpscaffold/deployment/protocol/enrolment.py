"""The beginning of a deployed run: offers, commitments, and a draw that is nobody's choice.

The server and every site commit to a nonce, then all are shown, and the seed of the draw is
SHA-256(run, all nonces). Whoever wants another draw must begin another run, which costs a grant at
every site, or let more sites join the rest of a run, which uses the grants that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dpscaffold import __version__
from dpscaffold.deployment.protocol.exchange import Exchange
from dpscaffold.deployment.protocol.messages import (
    REASONS,
    SERVER,
    Header,
    Json,
    SignedMessage,
    Vectors,
    ask,
    commitment,
    digest,
    fresh_id,
    joint_seed,
)
from dpscaffold.deployment.protocol.sums import Members
from dpscaffold.errors import BadInput
from dpscaffold.runs.journal import Anchor

#: A server remembers this many heads of a site's ledger that the site has not confirmed yet.
MOST_HEADS = 16


@dataclass(frozen=True)
class EnrolledRun:
    """A run as its server knows it, from the first offer on; a plain value, for a file.

    ``names`` is the roster in order, ``sizes`` and ``caps`` what the sites answered; ``declared``
    says that every size is a constant that its site declared. With a user as unit there are no
    sizes: the guarantee hides them.

    ``continues`` is the run whose rounds from ``after`` + 1 on this one takes, and ``earlier`` how
    often its sites say that they have taken part in it.
    """

    run: str
    offer: Mapping[str, Any]
    names: tuple[str, ...]
    nonce: str
    sizes: tuple[int, ...] = ()
    caps: tuple[int, ...] = ()
    declared: bool = False
    commitments: Mapping[str, str] = field(default_factory=dict)
    nonces: Mapping[str, str] = field(default_factory=dict)
    continues: str = ""
    after: int = 0
    earlier: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def fresh(
        cls,
        offer: Mapping[str, Any],
        names: tuple[str, ...],
        records: Mapping[str, int] | None = None,
    ) -> EnrolledRun:
        """A run that nobody has heard of yet. With secure sums the public sizes (``records``) are
        part of what is offered."""
        enrolled = cls(fresh_id(), offer, names, fresh_id())
        if not enrolled.secure or enrolled.hides_sizes:
            return enrolled
        if records is None or set(records) != set(names):
            raise BadInput(
                "sites-differ",
                f"[secure] is given, and the noise of a sum depends on the sizes of all members; "
                f"give deploy.records with the public size of {', '.join(names)}, and of nobody "
                f"else",
            )
        return replace(enrolled, sizes=tuple(records[name] for name in names))

    @property
    def plan(self) -> str:
        """The plan's identity: the offer's digest."""
        return digest(self.offer)

    @property
    def hides_sizes(self) -> bool:
        """Whether the offer protects a user's whole data, its size included."""
        privacy = self.offer.get("privacy") or {}
        return privacy.get("unit") == "user"

    @property
    def secure(self) -> bool:
        """Whether the server sees only sums of uploads."""
        return bool(self.offer.get("secure"))

    @property
    def begun(self) -> bool:
        """Whether everybody's nonce is known."""
        return bool(self.nonces)

    @property
    def seed(self) -> int:
        """The seed of the draw."""
        return joint_seed(self.run, self.nonces)

    def to_dict(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> EnrolledRun:
        """From a file."""
        values = dict(saved)
        for name in ("names", "sizes", "caps"):
            values[name] = tuple(values[name])
        return cls(**values)


class NotEnrolled(BadInput):
    """Some sites refuse the offer, or did not answer; the run does not start."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        said = "; ".join(
            f"{name}: {reason} ({REASONS.get(reason, 'it did not answer')})"
            for name, reason in sorted(reasons.items())
        )
        super().__init__(
            "not-enrolled",
            f"the run does not start: {said}; --resume tries the same run again, at no cost to any "
            f"site; or change the plan, or leave sites out with --without",
        )
        self.reasons = dict(reasons)


@dataclass
class SignedExchange:
    """Asks sites and believes only what they signed.

    ``publics`` are the sites' public keys by name; ``seen`` and ``totals`` the largest counts of
    participations that each has reported, in this run and in all.

    ``heads`` are the ledger heads that each site has shown. Every question names them, and a site
    says yes only if its ledger contains them all; its answer then replaces them. So two copies of
    one site, whose ledgers differ after their first answers, cannot both go on.
    """

    exchange: Exchange
    key: Ed25519PrivateKey
    publics: Mapping[str, str]
    seen: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    heads: dict[str, tuple[Anchor, ...]] = field(default_factory=dict)
    #: The sites that may be asked now; None: all. One that was removed is asked nothing more.
    admitted: Callable[[], Collection[str]] | None = None

    def message(
        self,
        kind: str,
        run: str,
        name: str,
        fields: Header,
        vectors: Vectors | None = None,
        digests: Mapping[str, bytes] | None = None,
    ) -> SignedMessage:
        """A message to one site, with what is known of its counts."""
        known: dict[str, Json] = {
            "seen": self.seen.get(name, 0),
            "seen_total": self.totals.get(name, 0),
            "heads": [dict(vars(head)) for head in self.heads.get(name, ())],
        }
        return ask(kind, run, name, {**fields, **known}, vectors or {}, self.key, digests)

    def ask(
        self, questions: Mapping[str, SignedMessage]
    ) -> tuple[dict[str, SignedMessage], dict[str, str]]:
        """The answers that say yes, and everybody else's reason; counts are noted."""

        def accept(name: str, answer: SignedMessage) -> bool:
            if not answer.is_answer(self.publics[name]):
                return False
            self._note_head(name, answer)  # also one that came late, or from a copy of the site
            return answer.names_question(questions[name])

        yes: dict[str, SignedMessage] = {}
        no: dict[str, str] = dict.fromkeys(questions, "no-answer")
        for name, answer in self.exchange.ask(self._asked(questions), accept).items():
            header = answer.header
            if header.get("status") == "yes" and self.still_admitted([name]):
                yes[name] = answer
                del no[name]
                self._confirm_heads(name, questions[name])
            elif header.get("status") != "yes":
                reason = header.get("reason")
                no[name] = str(reason) if reason in REASONS else "site-error"
            self._note_head(name, answer)
            for known, key in ((self.seen, "participations"), (self.totals, "total")):
                count = header.get(key)
                if type(count) is int:
                    known[name] = max(count, known.get(name, 0))
        for reason in no.values():
            self.refusals[reason] = self.refusals.get(reason, 0) + 1
        return yes, no

    def _asked(self, questions: Mapping[str, SignedMessage]) -> Mapping[str, SignedMessage]:
        """The questions to sites that are still admitted."""
        admitted = self.still_admitted(questions)
        return {name: asked for name, asked in questions.items() if name in admitted}

    def still_admitted(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of these sites that are on the roster now, and whose keys are known."""
        live = self.publics if self.admitted is None else self.admitted()
        return tuple(name for name in names if name in live and name in self.publics)

    def _confirm_heads(self, name: str, asked: SignedMessage) -> None:
        """The site's ledger contains the heads that it was asked with; later ones stay."""
        sent = asked.header.get("heads")
        confirmed = sent if isinstance(sent, list) else []
        known = self.heads.get(name, ())
        self.heads[name] = tuple(head for head in known if dict(vars(head)) not in confirmed)

    def _note_head(self, name: str, answer: SignedMessage) -> None:
        """Remember the ledger's head of an answer, until the site confirms that it is its own."""
        head, known = answer.ledger_head, self.heads.get(name, ())
        if head is not None and head not in known and len(known) < MOST_HEADS:
            self.heads[name] = (*known, head)


def offer_to(post: SignedExchange, enrolled: EnrolledRun) -> EnrolledRun:
    """Offer the plan to all; who they are and what they committed to, or a refusal."""
    promise = commitment(enrolled.run, SERVER, enrolled.nonce)
    fields = _offered(post, enrolled, promise)
    questions = {n: post.message("offer", enrolled.run, n, fields) for n in enrolled.names}
    yes, no = post.ask(questions)
    hidden = enrolled.hides_sizes
    found = {name: _promise(answer, hidden) for name, answer in yes.items()}
    no |= {name: "bad-answer" for name, said in found.items() if said is None}
    if no:
        raise NotEnrolled(no)
    said = {name: promised for name, promised in found.items() if promised is not None}
    return replace(
        enrolled,
        sizes=() if hidden else tuple(said[name][0] for name in enrolled.names),
        caps=tuple(said[name][1] for name in enrolled.names),
        declared=not hidden and all(yes[n].header.get("declared") is True for n in enrolled.names),
        commitments={SERVER: promise} | {name: said[name][2] for name in enrolled.names},
        earlier=_earlier(yes) if enrolled.continues else {},
    )


def _earlier(answers: Mapping[str, SignedMessage]) -> dict[str, int]:
    """How often sites say that they took part in the runs that this one continues; a site that
    goes on with no grant says nothing."""
    said = {name: answer.header.get("earlier") for name, answer in answers.items()}
    return {name: count for name, count in said.items() if type(count) is int}


def _offered(post: SignedExchange, enrolled: EnrolledRun, promise: str) -> dict[str, Json]:
    """What an offer says. With secure sums it names all members, so that a site can refuse them
    before anything is reserved anywhere."""
    fields: dict[str, Json] = {"offer": dict(enrolled.offer), "commitment": promise}
    fields["package"] = __version__
    if enrolled.continues:
        fields |= {"continues": enrolled.continues, "after": enrolled.after}
    if enrolled.secure:
        members = members_in(post, enrolled).to_dict()
        fields |= {"roster": members["names"], "publics": members["publics"]}
        fields |= {"sizes": members["sizes"]} if members["sizes"] else {}
    return fields


def members_in(post: SignedExchange, enrolled: EnrolledRun) -> Members:
    """The members of a run with secure sums."""
    publics = {name: post.publics[name] for name in enrolled.names}
    return Members(enrolled.names, enrolled.sizes, publics)


def _promise(answer: SignedMessage, hidden: bool) -> tuple[int, int, str] | None:
    """Size (0 where it is hidden, whatever was answered), cap and commitment of a site."""
    size = 0 if hidden else answer.header.get("records")
    cap, promise = answer.header.get("cap"), answer.header.get("commitment")
    if type(size) is not int or type(cap) is not int or not isinstance(promise, str):
        return None
    return (size, cap, promise) if hidden or size > 0 else None


def begin_with(post: SignedExchange, enrolled: EnrolledRun) -> EnrolledRun:
    """Fix the roster and all commitments, and collect the nonces."""
    questions = {name: begin_message(post, enrolled, name) for name in enrolled.names}
    yes, no = post.ask(questions)
    nonces = {SERVER: enrolled.nonce}
    for name, answer in yes.items():
        nonce = str(answer.header.get("nonce_shown"))
        if commitment(enrolled.run, name, nonce) == enrolled.commitments[name]:
            nonces[name] = nonce
        else:
            no[name] = "bad-draw"
    if no:
        raise NotEnrolled(no)
    return replace(enrolled, nonces=nonces)


def begin_message(post: SignedExchange, enrolled: EnrolledRun, name: str) -> SignedMessage:
    """The message that fixes the roster."""
    fields: dict[str, Json] = {
        "roster": list(enrolled.names),
        "commitments": dict(enrolled.commitments),
    }
    if enrolled.sizes:
        fields["sizes"] = list(enrolled.sizes)
    return post.message("begin", enrolled.run, name, fields)


def tell_draw(
    post: SignedExchange, enrolled: EnrolledRun, names: tuple[str, ...]
) -> dict[str, str]:
    """Show all nonces to these sites; gives the reasons of those who did not take them. One that
    misses them now will say so when it is asked, and gets them again."""
    fields: dict[str, Json] = {"nonces": dict(enrolled.nonces)}
    return post.ask({n: post.message("draw", enrolled.run, n, fields) for n in names})[1]


def enrol_again(post: SignedExchange, enrolled: EnrolledRun, names: tuple[str, ...]) -> None:
    """Everything from the offer to the draw, for sites that lost their folder of the run or missed
    a message; what was fixed stays fixed."""
    fields = _offered(post, enrolled, enrolled.commitments[SERVER])
    yes, _ = post.ask({n: post.message("offer", enrolled.run, n, fields) for n in names})
    yes, _ = post.ask({name: begin_message(post, enrolled, name) for name in yes})
    if yes:
        tell_draw(post, enrolled, tuple(yes))
