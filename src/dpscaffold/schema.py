"""What a row looks like, from the raw columns to the features that a model sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:  # the accountant takes long to import, and data are made without it
    from dpscaffold.privacy import Cost, Protection


class Prepared(Protocol):
    """A step that made the features, as a value: rows (N, d) → rows (N, d′), each by itself.

    A federation keeps its steps and stores them, so that a model can be given raw rows, and so
    that a privately fitted step is released once. The steps that come with the package are in
    :mod:`dpscaffold.data.prepared`.
    """

    @property
    def protection(self) -> Protection:
        """How the records that it was fitted on are protected."""
        ...

    @property
    def cost(self) -> Cost | None:
        """What a private step spent."""
        ...

    @property
    def sentence(self) -> str:
        """What was done, for people; nobody decides anything from its words."""
        ...

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The rows after the step."""
        ...
