"""Secure sums between a server and its sites: who the members are, and what an attempt is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpscaffold.deployment.protocol.masks import BadKeys, Session, SignedKey
from dpscaffold.deployment.protocol.messages import (
    Header,
    Json,
    Refused,
    checked_public,
    digest,
    texts_of,
    whole_of,
)
from dpscaffold.errors import BadInput

LABEL = b"dpscaffold secure sums 1"
#: The vector of a masked upload.
SUM = "sum"
#: No list has more members: keys travel with every question.
MOST_MEMBERS = 1000


@dataclass(frozen=True)
class Members:
    """Everybody in a run with secure sums, as its server tells it: names, public sizes (none where
    the unit is a user), and public signing keys."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    publics: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """For a file; it is also what the roster's digest is made of."""
        return {
            "names": list(self.names),
            "sizes": list(self.sizes),
            "publics": dict(self.publics),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Members:
        """From a file."""
        return cls(tuple(saved["names"]), tuple(saved["sizes"]), dict(saved["publics"]))

    def session(self, run: str, plan: str) -> Session:
        """What keys are signed for."""
        return Session(LABEL, run, plan, digest(self.to_dict()))


def members_of(header: Header, names: tuple[str, ...], sizes: tuple[int, ...]) -> Members:
    """The members in an offer; ``names`` and ``sizes`` are its roster's."""
    publics = texts_of(header, "publics", "roster-changed")
    if set(publics) != set(names) or len(set(publics.values())) != len(names):
        raise Refused("roster-changed", "not every member has a signing key of its own")
    if len(names) > MOST_MEMBERS:
        raise Refused("roster-changed", f"{len(names)} members")
    for name, public in publics.items():
        try:
            checked_public(name, public)
        except BadInput as error:
            raise Refused("roster-changed", str(error)) from error
    return Members(names, sizes, publics)


@dataclass(frozen=True)
class Attempt:
    """One attempt at a round: its number from 1, and the keys of the list's members in order."""

    number: int
    keys: tuple[SignedKey, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The list A."""
        return tuple(key.name for key in self.keys)

    @property
    def identity(self) -> dict[str, Json]:
        """What makes two attempts the same."""
        return {"attempt": self.number, "keys": [dict(vars(key)) for key in self.keys]}


def attempt_of(header: Header) -> Attempt:
    """The attempt that a task names."""
    keys = header.get("keys")
    if not isinstance(keys, list) or len(keys) > MOST_MEMBERS:
        raise Refused("bad-keys", "the keys are not a list")
    try:
        found = tuple(SignedKey.read(key) for key in keys)
    except BadKeys as error:
        raise Refused("bad-keys", str(error)) from error
    return Attempt(whole_of(header, "attempt", "attempt-used", least=1), found)
