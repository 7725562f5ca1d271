"""A checkpoint: what a run needs to continue after a round as if it had never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpscaffold.engine import State
from dpscaffold.errors import BadInput
from dpscaffold.runs.journal import Anchor

#: The layout of checkpoint.pt; raise it when an older one can no longer be read.
CHECKPOINT_FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    """The state of the server after a round, with all of its tensors on the CPU.

    ``journal`` is the ledger's journal at that moment, and ``metrics`` the digest of the evaluated
    rounds. ``memories`` are the slots of a simulated run's users, ``sites`` what a deployed run
    knows of its sites; the object that wrote them restores them. ``chunk`` and ``threads`` are how
    a simulated run shared out its work, which decides the last bits of its sums.
    """

    state: State
    journal: Anchor | None = None
    seconds: float = 0.0
    metrics: str | None = None
    memories: Mapping[str, Any] = field(default_factory=dict)
    sites: Mapping[str, Any] = field(default_factory=dict)
    chunk: int | None = None
    threads: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The content of ``checkpoint.pt``."""
        return {
            "format": CHECKPOINT_FORMAT,
            **vars(self),
            "state": self.state.to_dict(),
            "journal": vars(self.journal) if self.journal else None,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], where: str) -> Checkpoint:
        """The inverse of :meth:`to_dict`; ``where`` names the file in the message if it
        is of another version."""
        if saved.get("format") != CHECKPOINT_FORMAT:
            raise BadInput(
                "wrong-version",
                f"{where} has format {saved.get('format')}, and this version reads format "
                f"{CHECKPOINT_FORMAT}; resume it with the version that wrote it",
            )
        given = {name: value for name, value in saved.items() if name != "format"}
        journal, state = given.pop("journal"), State.from_dict(given.pop("state"))
        return cls(state, journal and Anchor(**journal), **given)
