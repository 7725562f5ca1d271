"""What a server may know of a federation: who takes part, how much each holds, what a row looks
like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Schema

#: Up to this many users all take part in every round: in drafts, in plans unless fewer are asked
#: for, and in the advice after a run.
FEW_USERS = 200


class NumberedNames(Sequence[str]):
    """Users that are called by their numbers, ``"0"``, ``"1"`` and so on, which are made when they
    are asked for: ten million names would take more memory than a model.

    >>> names = NumberedNames(range(3))
    >>> names[1:] == ("1", "2"), "3" in names, names.index("2")
    (True, False, 2)
    """

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> NumberedNames: ...
    def __getitem__(self, place: int | slice) -> str | NumberedNames:
        if isinstance(place, slice):
            return NumberedNames(self.numbers[place])
        return str(self.numbers[place])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.isdecimal() and self._called(name)

    def _called(self, name: str) -> bool:
        return str(int(name)) == name and int(name) in self.numbers

    def index(self, name: Any, start: int = 0, stop: int | None = None) -> int:
        """The place of a name."""
        if name not in self:
            raise ValueError(f"{name!r} is not a name")
        place = self.numbers.index(int(name))
        if not start <= place < (len(self) if stop is None else stop):
            raise ValueError(f"{name!r} is not a name from {start} to {stop}")
        return place

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberedNames):
            return self.numbers == other.numbers
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


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
    names: Sequence[str]
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
