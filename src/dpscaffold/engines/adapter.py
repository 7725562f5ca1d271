"""Engines that gather uploads, as an engine that takes whole rounds of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dpscaffold.config import Run
from dpscaffold.engines import Count, Draw, Gatherer, Loop, Round, Simulator, State
from dpscaffold.engines.rounds import rounds


@dataclass(frozen=True)
class Adapter:
    """A :class:`~dpscaffold.engines.Engine` over what gathers the uploads of one run."""

    run: Run
    gatherer: Gatherer

    def round(self, state: State, draws: Sequence[Draw], count: Count) -> Round:
        """The round after ``state``. One whose batches were cut short is taken again here: nothing
        of it has left."""
        for done in rounds(self.run, self.gatherer, lambda number: draws[0], state):
            finite = bool(torch.isfinite(done.state.params).all())
            if finite or not self._is_cut_short():
                break
        return Round(done.state, done.gathered.arrived, done.gathered.metrics)

    def _is_cut_short(self) -> bool:
        return isinstance(self.gatherer, Simulator) and self.gatherer.cut_short()

    def acknowledge(self, round: int) -> None:
        """Users in this process keep no uploads."""

    def memory(self) -> dict[str, Any]:
        """The slots of the users, and how the work was shared out: it decides the last bits of
        sums."""
        assert isinstance(self.gatherer, Simulator | Loop)
        return {
            "memories": self.gatherer.memories.to_dict(),
            "chunk": getattr(self.gatherer, "chunk", None),
            "threads": torch.get_num_threads(),
        }

    def restore(self, memory: Mapping[str, Any]) -> None:
        """Take up what :meth:`memory` gave; the engine was made with its chunk and threads."""
        self.gatherer.memories.restore(memory["memories"])

    def norms(self) -> dict[str, float]:
        """The largest norm of each slot of the users."""
        return self.gatherer.memories.largest()
