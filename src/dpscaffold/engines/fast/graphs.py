"""Work on a GPU recorded once as a graph and launched as a whole.

A round is thousands of small kernels, and launching each from Python takes longer than running it.
:class:`Graphs` records the work for given shapes, and from then on copies new numbers into the
places it reads and replays it. Whatever cannot be recorded (an algorithm that looks at a number on
its way, an old driver) runs as it is.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Work = Callable[[Tensors], Tensors]

#: Makes a replay of some work: it reads the tensors that it is handed, and fills those it returns.
Capture = Callable[[Work, Tensors], tuple[Callable[[], None], Tensors]]

#: How many graphs are kept; each holds the memory of its work.
_KEPT = 6

#: Workers record one after the other: each begins by waiting for the whole device, which spoils a
#: recording that is under way.
_recording = threading.Lock()

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordedGraph:
    """Recorded work: ``replay`` reads ``given`` and fills ``made``."""

    given: Tensors
    replay: Callable[[], None]
    made: Tensors

    def __call__(self, given: Tensors) -> Tensors:
        """The work on other numbers of the same shapes; what it makes is the caller's own."""
        for name, place in self.given.items():
            place.copy_(given[name], non_blocking=True)
        self.replay()
        return {name: value.clone() for name, value in self.made.items()}


class Graphs:
    """The recorded work of one device, by whatever decides its shapes and constants.

    >>> def eager(work, given):  # on a CPU nothing is recorded
    ...     made = work(given)
    ...     return lambda: made.update(work(given)), made
    >>> double = lambda given: {"y": 2 * given["x"]}
    >>> Graphs(eager).run("double", double, {"x": torch.tensor([3.0])})["y"].tolist()
    [6.0]
    """

    def __init__(self, capture: Capture | None = None) -> None:
        self._capture = capture or cuda_graph
        self._held: OrderedDict[Hashable, RecordedGraph | None] = OrderedDict()

    def run(
        self, key: Hashable, work: Work, given: Tensors, otherwise: Work | None = None
    ) -> Tensors:
        """``work(given)``, recorded when it is first asked for; equal keys mean equal work.

        What cannot be recorded is done by ``otherwise``, which may also use this round's numbers.
        """
        if key not in self._held:
            self._held[key] = self._recorded(work, given)
            if len(self._held) > _KEPT:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        recorded = self._held[key]
        return (otherwise or work)(given) if recorded is None else recorded(given)

    def clear(self) -> None:
        """Forget all graphs, and so give back what they hold."""
        self._held.clear()

    def _recorded(self, work: Work, given: Tensors) -> RecordedGraph | None:
        places = {name: value.clone() for name, value in given.items()}
        try:
            with _recording:
                return RecordedGraph(places, *self._capture(work, places))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is, the same work runs without a graph
            _log.warning(
                "a round could not be recorded as a graph (%s); it runs kernel by kernel, which is "
                "slower",
                (str(error).splitlines() or [type(error).__name__])[0],
            )
            return None


def cuda_graph(work: Work, given: Tensors) -> tuple[Callable[[], None], Tensors]:
    """Record work as a CUDA graph on a stream of its own."""
    device = next(iter(given.values())).device
    # A capture that fails leaves its stream behind as the current one; the second context puts back
    # that which was there, or later work would run next to what it must wait for.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries set themselves up, and modules are looked at
                work(given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            made = work(given)
    return graph.replay, made
