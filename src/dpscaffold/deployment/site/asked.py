"""What an offer asks for, as the protocol needs to know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from dpscaffold.deployment.protocol.messages import Vectors
from dpscaffold.deployment.protocol.sums import Members
from dpscaffold.deployment.site.file import SumTerms, Terms


class SiteWork(Protocol):
    """What an offer asks for, on this site's data: its public numbers and its computation."""

    @property
    def terms(self) -> Terms:
        """The offer's numbers that a policy looks at."""
        ...

    @property
    def final_parameters(self) -> int:
        """The number of parameters of the model that arrives at the end."""
        ...

    @property
    def records(self) -> int:
        """R_i, of which rates, divisors and the account are made."""
        ...

    @property
    def batch(self) -> int:
        """b_i, public."""
        ...

    @property
    def declared(self) -> bool:
        """Whether R_i is a constant that the site declared."""
        ...

    @property
    def public_records(self) -> int | None:
        """R_i as the server may know it; None where a user's whole data are protected."""
        ...

    @property
    def secure(self) -> bool:
        """Whether the server sees only sums of uploads."""
        ...

    def sum_terms(self, name: str, members: Members, least: int) -> SumTerms:
        """The numbers of the run's secure sums for the site ``name``, which takes part in no list
        of fewer than ``least`` members."""
        ...

    def integers(
        self, round: int, name: str, received: Vectors, members: Members, count: int
    ) -> np.ndarray:
        """One participation in a secure sum of ``count`` members, with noise of its own: the words
        (uint32 or uint64) that go up under a mask."""
        ...

    def cohort(self, round: int, users: int, seed: int | None) -> tuple[int, ...]:
        """Who of ``users`` is drawn for a round, from the joint seed or, where that is None, from
        the plan's."""
        ...

    def expects(self, round: int) -> Mapping[str, int]:
        """Names and lengths of the vectors of a round's task, without ``restore.*``."""
        ...

    def remembers(self) -> Mapping[str, int]:
        """Names and lengths of the site's slots."""
        ...

    def shares(self) -> Mapping[str, int]:
        """Names and lengths of the slots that the server may know and restore."""
        ...

    def participate(
        self, round: int, user: int, received: Vectors, slots: Vectors
    ) -> tuple[Vectors, Vectors]:
        """One participation with noise of its own: the upload's vectors, and the new slots."""
        ...
