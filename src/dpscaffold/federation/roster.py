"""What a server may know of a federation: who takes part, how much each holds, what a row looks
like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Schema

#: Up to this many users all take part in every round: in drafts, in plans unless fewer are asked
#: for, and in the advice after a run.
FEW_USERS = 200


@dataclass(frozen=True)
class Roster:
    """The users of a federation without their records: R_i training records each, their names, the
    schema of a row, and a title for tables and figures. No record can be reached from here.
    ``declared`` says that the sizes are constants that do not depend on the data.

    >>> from dpscaffold import synthetic
    >>> roster = synthetic(users=3, records=10).roster
    >>> roster.users, roster.sizes, roster.schema.dimension
    (3, (8, 8, 8), 40)
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    schema: Schema
    title: str = "federation"
    declared: bool = False

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise BadInput(
                "user-without-records",
                f"a roster has sizes {self.sizes[:5]}; give one or more users, each with one or "
                f"more records",
            )
        if self.names and len(self.names) != len(self.sizes):
            raise BadInput(
                "count-differs",
                f"a roster has {len(self.names)} names for {len(self.sizes)} users; give one each",
            )

    @property
    def users(self) -> int:
        """M."""
        return len(self.sizes)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "sizes": list(self.sizes),
            "names": list(self.names),
            "schema": self.schema.to_dict(),
            "title": self.title,
            **({"declared": True} if self.declared else {}),
        }
