"""Secure sums at a site: which members and attempts it accepts, and the masks it adds.

The site trusts nobody's word here. Members are those whose fingerprints its people confirmed in
``site.toml``; keys count only with a member's signature for this run, plan and roster; the list of
an attempt must be part of the draw that the site computes itself; and the noise follows the list
that the site was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dpscaffold.deployment.protocol.masks import (
    BadKeys,
    Bits,
    EpochKey,
    Session,
    SignedKey,
    agreement_digest,
    announce,
    mask,
    pair_keys,
    verified_keys,
)
from dpscaffold.deployment.protocol.messages import Refused, fingerprint
from dpscaffold.deployment.protocol.sums import Attempt, Members
from dpscaffold.deployment.site.asked import SiteWork
from dpscaffold.deployment.site.file import Policy, SecurePolicy, SiteFile, SumTerms, Terms
from dpscaffold.deployment.site.ledger import GrantedRun
from dpscaffold.deployment.site.memory import Enrolment

#: A sentence for a site's people, and whether what it says is fine.
Found = tuple[str, bool]


def summed(work: SiteWork, name: str, members: Members | None, policy: Policy) -> Terms:
    """The offer's numbers, with those of its secure sums, if it has any, on this roster."""
    if members is None:
        return work.terms
    if policy.secure is None:
        raise Refused("policy-secure", "site.toml has no [secure]")
    if name not in members.names:
        raise Refused("roster-changed", f"{name!r} is not a member")
    return replace(work.terms, sums=work.sum_terms(name, members, policy.secure.least))


def named_members(work: SiteWork, sizes: Mapping[str, int] | None) -> Members | None:
    """The members of a plan that is only checked, without their keys; None without secure sums."""
    if not work.secure or sizes is None:
        return None
    known = () if work.public_records is None else tuple(sizes.values())
    return Members(tuple(sizes), known, {})


def sums_of(entry: GrantedRun) -> SumTerms | None:
    """The secure sums that a run was granted for."""
    granted = entry.account.get("sums")
    return None if granted is None else SumTerms(**granted)


def check_same_members(known: Enrolment, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    """Refuse to begin a run with secure sums with other members than were offered."""
    if not known.members:
        return
    members = Members.from_dict(known.members)
    if (members.names, members.sizes) != (names, sizes):
        raise Refused("roster-changed", "the offer had other members")


def check_members(policy: SecurePolicy, name: str, public: str, members: Members) -> None:
    """Refuse a roster that lacks this site, has another key for a confirmed member, or has more
    unconfirmed members than may collude: the server could have invented them."""
    if members.publics.get(name) != public:
        raise Refused("roster-changed", "this site is not in it with its own key")
    for other, confirmed in policy.members.items():
        known = members.publics.get(other)
        if other != name and known is not None and fingerprint(known) != confirmed:
            raise Refused("member-changed", f"{other!r:.80} has {fingerprint(known)}")
    strangers = sorted(set(members.names) - {name, *policy.members})
    if len(strangers) > policy.colluders:
        said = ", ".join(f"{who} ({fingerprint(members.publics[who])})" for who in strangers)
        raise Refused(
            "policy-members",
            f"not in secure.members: {said}; secure.colluders is {policy.colluders}",
        )


def check_list(attempt: Attempt, name: str, drawn: tuple[str, ...], least: int) -> None:
    """Refuse a list that is not part of the draw, names a member twice, or is too short."""
    names = attempt.names
    if len(set(names)) != len(names) or not set(names) <= set(drawn) or name not in names:
        raise Refused("bad-list", f"{', '.join(names):.200} of {', '.join(drawn):.200}")
    if len(names) < least:
        raise Refused("bad-list", f"{len(names)} members, at least {least}")


def check_attempt(attempt: Attempt, round: int, entry: GrantedRun, voids: int) -> None:
    """Refuse a second value under one label, and more repetitions than the site accepts.

    The ledger decides: it has a line for every attempt that was ever begun, whether or not its
    upload was stored. Rounds never go back (``stale-round``).
    """
    if round != entry.last_round:
        return
    if attempt.number <= entry.last_attempt:
        raise Refused("attempt-used", f"{attempt.number}, after {entry.last_attempt}")
    if entry.voids >= voids:
        raise Refused("voids-spent", f"{entry.voids} of {voids}")


@dataclass
class KeyRing:
    """This site's keys of one run since its process started, in memory only."""

    name: str
    session: Session
    members: Members
    key: EpochKey = field(default_factory=EpochKey.fresh)
    #: The last list of keys that was verified, and the secrets with its members.
    _last: tuple[tuple[SignedKey, ...], dict[str, bytes]] | None = field(default=None, repr=False)

    def announced(self, signer: Ed25519PrivateKey) -> SignedKey:
        """This site's public key, signed."""
        return announce(self.session, self.name, self.key, signer)

    def mask(
        self, attempt: Attempt, round: int, model: bytes, count: int, bits: Bits
    ) -> np.ndarray:
        """What this site adds to its integers in an attempt. ``model`` is the digest of what the
        server sent."""
        epochs = {key.name: key.epoch for key in attempt.keys}
        agreed = agreement_digest(epochs, model)
        return mask(self.pairs(attempt), self.name, round, attempt.number, agreed, count, bits)

    def pairs(self, attempt: Attempt) -> dict[str, bytes]:
        """The secrets with the other members of a list; refuses keys that must not be used. The
        same keys as the last time are not verified again."""
        if self._last is None or self._last[0] != attempt.keys:
            self._last = attempt.keys, self._verified_pairs(attempt)
        return self._last[1]

    def _verified_pairs(self, attempt: Attempt) -> dict[str, bytes]:
        own = [key for key in attempt.keys if key.name == self.name]
        if not own or (own[0].epoch, own[0].key) != (self.key.epoch, self.key.public):
            raise Refused("stale-key")
        try:
            trusted = verified_keys(self.session, attempt.keys, self.members.publics)
            return pair_keys(self.session, self.name, self.key, trusted)
        except BadKeys as error:
            raise Refused("bad-keys", str(error)) from error


def described_members(file: SiteFile, public: str, offered: Iterable[Members]) -> Iterator[Found]:
    """Who this site and the others are, for its people: sentences, and whether each is fine.
    ``offered`` are the members that servers told this site of."""
    yield f"this site is {file.name}, fingerprint {fingerprint(public)}", True
    if file.secure is None:
        return
    known = file.secure.members
    for name, confirmed in sorted(known.items()):
        if name != file.name:
            yield f"confirmed member {name}: fingerprint {confirmed}", True
    announced = {name: key for members in offered for name, key in members.publics.items()}
    for name, key in sorted(announced.items()):
        shown = fingerprint(key)
        if name == file.name or known.get(name) == shown:
            continue
        yield (
            f"a server named {name} with fingerprint {shown}, which secure.members does not have; "
            f"ask the people of {name} for theirs by another channel before you write it there",
            name not in known,
        )
    others = len(set(known) - {file.name})
    yield (
        f"secure sums have at least {file.secure.least} members, {file.secure.colluders} of whom "
        f"may collude; {others} others are confirmed",
        others + 1 + file.secure.colluders >= file.secure.least,
    )
