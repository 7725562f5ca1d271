"""Models judged beside the rounds that follow: on a GPU nothing waits for an evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from dpscaffold.metrics import Evaluator, Metrics, evaluate_all


class Evaluations:
    """The evaluations of a stack, in the order in which they were asked for.

    On a GPU they run in a thread and on a stream of their own, after what was launched before them
    and beside what is launched next. A CPU would have to share its cores: there they are made at
    once. Use it as a context: whatever ends the rounds, its thread ends too.
    """

    def __init__(
        self, evaluators: Sequence[Evaluator], full: bool, device: torch.device, ahead: bool = False
    ) -> None:
        self._evaluators, self._full = evaluators, full
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        aside = ahead or self._stream is not None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation") if aside else None
        self._asked: deque[tuple[int, Future[list[Metrics]]]] = deque()

    def __enter__(self) -> Evaluations:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def ask(self, round: int, models: Sequence[Tensor]) -> None:
        """Judge these models, (P,) each, of a round that is launched."""
        held = list(models)  # the memory of each stays theirs until they are judged
        if self._thread is None:
            made: Future[list[Metrics]] = Future()
            made.set_result(self._judged(held, None))
        else:
            launched = None if self._stream is None else torch.cuda.current_stream().record_event()
            made = self._thread.submit(self._judged, held, launched)
        self._asked.append((round, made))

    def found(self, wait: bool = False) -> Iterator[tuple[int, list[Metrics]]]:
        """The rounds that are judged by now, or all with ``wait``, each handed out once."""
        while self._asked and (wait or self._asked[0][1].done()):
            round, made = self._asked.popleft()
            yield round, made.result()

    def _judged(self, models: list[Tensor], launched: torch.cuda.Event | None) -> list[Metrics]:
        if launched is not None and self._stream is not None:
            self._stream.wait_event(launched)
        # No stream is a context that does nothing.
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return evaluate_all(self._evaluators, models, self._full)
