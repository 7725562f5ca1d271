"""What is known about the seed that a run's participants were drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: Who chose a seed: somebody (``given``), nobody (``default``), the operating system, or the sites
#: of a deployed run together.
Origin = Literal["given", "default", "system", "sites", "unknown"]
#: Where two seeds are the same only if one is a copy of the other.
FRESH = ("system", "sites")


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
