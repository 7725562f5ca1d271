"""Models evaluated next to the rounds that follow: on a GPU nothing waits for an evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from dpscaffold.engines.machine import BackgroundWorker
from dpscaffold.training.evaluator import Evaluator, Metrics, evaluate_all


class Evaluations:
    """The evaluations of a stack, in the order in which they were asked for; on a GPU they run
    :class:`~dpscaffold.engines.machine.BackgroundWorker`. Use it as a context."""

    def __init__(
        self, evaluators: Sequence[Evaluator], full: bool, device: torch.device, ahead: bool = False
    ) -> None:
        self._evaluators, self._full = evaluators, full
        self._worker = BackgroundWorker(device, ahead)
        self._asked: deque[tuple[int, Future[list[Metrics]]]] = deque()

    def __enter__(self) -> Evaluations:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.__exit__()

    def ask(self, round: int, models: Sequence[Tensor]) -> None:
        """Evaluate these models, (P,) each, of a round that is launched."""
        held = list(models)  # the memory of each stays theirs until they are evaluated

        def evaluated() -> list[Metrics]:
            return evaluate_all(self._evaluators, held, self._full)

        self._asked.append((round, self._worker.begin(evaluated)))

    def found(self, wait: bool = False) -> Iterator[tuple[int, list[Metrics]]]:
        """The rounds that are evaluated by now, or all with ``wait``, each returned once."""
        while self._asked and (wait or self._asked[0][1].done()):
            round, made = self._asked.popleft()
            yield round, made.result()
