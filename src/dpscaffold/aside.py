"""Work beside what is launched next: nothing waits for it until its answer is wanted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

Answer = TypeVar("Answer")


class Aside:
    """Begins work; its answer is a future.

    On a GPU it runs in a thread and on a stream of its own, after what was launched before it and
    beside what is launched next. A CPU would have to share its cores: there it is done at once,
    unless ``ahead`` asks for the thread. Use it as a context: its thread ends with it.

    >>> with Aside(torch.device("cpu")) as aside:
    ...     aside.begin(lambda: 7).result()
    7
    """

    def __init__(self, device: torch.device, ahead: bool = False, name: str = "evaluation") -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        #: Whether work goes on behind the caller's back.
        self.overlaps = ahead or self._stream is not None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name) if self.overlaps else None

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def begin(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Begin work on what is launched by now; tensors that it reads must stay as they are."""
        if self._thread is None:
            made: Future[Answer] = Future()
            made.set_result(work())
            return made
        launched = None if self._stream is None else torch.cuda.current_stream().record_event()
        return self._thread.submit(self._done, work, launched)

    def _done(self, work: Callable[[], Answer], launched: torch.cuda.Event | None) -> Answer:
        if launched is not None and self._stream is not None:
            self._stream.wait_event(launched)
        # No stream is a context that does nothing.
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return work()
