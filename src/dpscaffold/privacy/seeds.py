"""Which seed a run draws from, and who may know it. Everything that needs a seed asks here.

==============  ===================================  ====================================
``plan.seed``   with secret noise                    without secret noise
==============  ===================================  ====================================
given           that seed draws the participants     that seed draws everything
left out        a new seed from the operating        seed 0 draws everything, as in all
                system draws the participants        runs that leave it out
==============  ===================================  ====================================

The first weights of a network come from the seed that was given, or from seed 0. A seed of the
operating system is kept in the run folder (``secret.json``), so that the run can be resumed, and is
in nothing that is published. A seed of which nothing is known counts as shared with every other.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dpscaffold.errors import BadInput

#: Who chose a seed: somebody (``given``), nobody (``default``), the operating system, or the sites
#: of a deployed run together.
Origin = Literal["given", "default", "system", "sites", "unknown"]
#: Where two seeds are the same only if one is a copy of the other.
FRESH = ("system", "sites")
#: The file of a run folder that keeps the run's seed, for its owner alone.
SECRET = "secret.json"
#: The seed of runs that were given none and whose noise is not secret.
DEFAULT = 0


def public_seed(given: int | None) -> int:
    """The seed of first weights, and of all draws of a run without secret noise.

    >>> public_seed(7), public_seed(None)
    (7, 0)
    """
    return DEFAULT if given is None else given


def origin_of(given: int | None, secret: bool) -> Origin:
    """Who chooses the seed that draws the participants of a new run."""
    if given is not None:
        return "given"
    return "system" if secret else "default"


@dataclass(frozen=True)
class SeedKnowledge:
    """What is known about the seed of a run.

    ``mark`` is an HMAC of the seed under a key of its own. It stands in the first line of the
    journal and tells nobody the seed. ``journal`` is the chain of that line, which copies of a run
    folder share. What is not known is None.
    """

    origin: Origin = "unknown"
    mark: str | None = None
    value: int | None = field(default=None, repr=False)
    journal: str | None = None

    @property
    def given(self) -> bool:
        """Whether somebody may have chosen the draw: then only ε given the draw can be quoted."""
        return self.origin != "system"

    def is_copy_of(self, other: SeedKnowledge) -> bool:
        """Whether both are of one run that was copied: their journals begin with the same line."""
        return self.journal is not None and self.journal == other.journal

    def is_shared_with(self, other: SeedKnowledge) -> bool:
        """Whether the two runs may draw from the same seed; what is unknown counts as the same.

        >>> SeedKnowledge("given", "5c", 3).is_shared_with(SeedKnowledge("default", "9e", 0))
        False
        >>> SeedKnowledge("system", "5c").is_shared_with(SeedKnowledge("system", "9e"))
        False
        >>> SeedKnowledge("given", "5c", 3).is_shared_with(UNKNOWN)
        True
        """
        if self.is_copy_of(other) or (self.mark is not None and self.mark == other.mark):
            return True
        if self.value is not None and other.value is not None:
            return self.value == other.value
        return not (self.origin in FRESH and other.origin in FRESH)


#: Nothing is known about the seed: it may be that of any other run.
UNKNOWN = SeedKnowledge()
#: A draw that nobody chose, of a run that is not there yet.
FROM_SYSTEM = SeedKnowledge("system")


@dataclass(frozen=True)
class Seed:
    """The seed of one run, by whom it was chosen, and the key of its mark."""

    origin: Origin
    value: int = field(repr=False)
    key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    @property
    def mark(self) -> str:
        """HMAC-SHA256 of the seed: binds it without telling it."""
        text = f"{self.origin} {self.value}".encode()
        return hmac.new(self.key.encode(), text, hashlib.sha256).hexdigest()

    @classmethod
    def of(cls, given: int | None, secret: bool) -> Seed:
        """The seed of a new run. A seed of the operating system is another one at every call.

        >>> Seed.of(None, secret=False).value, Seed.of(5, secret=True).value
        (0, 5)
        >>> Seed.of(None, secret=True)
        Seed(origin='system')
        """
        origin = origin_of(given, secret)
        return cls(origin, secrets.randbits(128) if origin == "system" else public_seed(given))

    @property
    def drawn(self) -> SeedKnowledge:
        """What whoever reads the run's files knows about it."""
        return SeedKnowledge(self.origin, self.mark, self.value)

    def to_json(self) -> dict[str, str]:
        """As kept in a run folder, for its owner alone."""
        return {"origin": self.origin, "seed": str(self.value), "key": self.key}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> Seed:
        """The inverse of :meth:`to_json`; ``where`` names the file if it is damaged."""
        try:
            return cls(values["origin"], int(values["seed"]), str(values["key"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                "seed-damaged",
                f"{where} does not hold the seed of its run ({error}); restore it or start a new "
                f"run",
            ) from error
