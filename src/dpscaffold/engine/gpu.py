"""What a GPU does in its own way: a round recorded once as a graph and launched as a whole, and the
K steps of linear models as a program of their own.

A round is thousands of small kernels, and launching each from Python takes longer than running it.
Whatever cannot be recorded (an algorithm that looks at a number on its way, an old driver) runs as
it is, and so do steps for which there is no program: PyTorch's operations are the definition.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dpscaffold.algorithms import Local
from dpscaffold.algorithms.base import Affine
from dpscaffold.engine.device import tried, warn
from dpscaffold.engine.draws import HELD_NOISE, DrawnSteps
from dpscaffold.engine.query import NoisedMean, Plain
from dpscaffold.engine.records import Records
from dpscaffold.engine.steps import Participation
from dpscaffold.tasks import Task
from dpscaffold.tasks.base import BOUNDS
from dpscaffold.tasks.linear import Linear
from dpscaffold.tasks.logistic import Logistic
from dpscaffold.tasks.losses import (
    HuberErrors,
    OfScores,
    logistic_errors,
    softmax_errors,
    squared_errors,
)

Tensors = dict[str, Tensor]
Work = Callable[[Tensors], Tensors]

#: Makes a replay of some work: it reads the tensors that it is handed, and fills those it returns.
Capture = Callable[[Work, Tensors], tuple[Callable[[], None], Tensors]]

#: How many graphs are kept; each holds the memory of its work.
_KEPT = 6

#: The losses that the program knows, by their functions, as your own loss may have any name.
_LOSSES: dict[OfScores, int] = {softmax_errors: 0, logistic_errors: 1, squared_errors: 2}
_HUBER = 3

#: Most inputs (with the bias) and scores of a model whose weights one program holds.
_INPUTS, _SCORES = 128, 32

#: Numbers of records that one block holds at a time, in two warps, and the most blocks a row: the
#: fastest of fifteen shapes on an H200, alone and with twelve stacked runs.
_HELD, _WARPS, _SPLITS = 4096, 2, 16


class _Recorded(NamedTuple):
    """Recorded work: ``replay`` reads ``given`` and fills ``made``. What it reads besides belongs
    to ``work``, which is held for that."""

    work: Work
    given: Tensors
    replay: Callable[[], None]
    made: Tensors
    #: The tensors that were copied to ``given`` last.
    last: Tensors


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
        self._held: OrderedDict[Hashable, _Recorded | None] = OrderedDict()

    def run(self, key: Hashable, work: Work, given: Tensors) -> Tensors:
        """``work(given)``, recorded when it is first asked for; equal keys mean equal work."""
        shapes = tuple((name, value.shape, value.dtype) for name, value in given.items())
        if (key, shapes) not in self._held:
            self._held[key, shapes] = self._recorded(work, given)
            if len(self._held) > _KEPT:
                self._held.popitem(last=False)
        self._held.move_to_end((key, shapes))
        recorded = self._held[key, shapes]
        if recorded is None:
            return work(given)
        new = [name for name in given if recorded.last.get(name) is not given[name]]
        torch._foreach_copy_([recorded.given[name] for name in new], [given[name] for name in new])
        recorded.last.update(given)
        recorded.replay()
        # What is kept is stored before the next replay.
        return {k: v if k.startswith("kept.") else v.clone() for k, v in recorded.made.items()}

    def clear(self) -> None:
        """Forget all graphs, and so give back what they hold."""
        self._held.clear()

    def _recorded(self, work: Work, given: Tensors) -> _Recorded | None:
        places = {name: value.clone() for name, value in given.items()}
        try:
            return _Recorded(work, places, *self._capture(work, places), {})
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is, the same work runs without a graph
            warn("a round could not be recorded as a graph", error)
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


def linear_steps(of: Participation, records: Records, drawn: DrawnSteps) -> Local | None:
    """What K steps leave behind, (U, P) each, by a launch a step for all rows; None where
    :func:`~dpscaffold.engine.steps.local_steps` has to take them."""
    loss, delta = _loss_of(of.task)
    plain = type(of.query) in (Plain, NoisedMean) and isinstance(of.numbers.steps, int)
    if loss is None or not plain or not records.tame or records.weight is not None:
        return None
    steps, rows, _ = drawn.batches.index.shape
    if (drawn.noise or 0) * steps * rows > HELD_NOISE:
        return None
    way = of.phase.form(of.at)
    if way is None or isinstance(way.pull, Tensor):
        return None
    given = (of, (loss, delta), way, records, drawn)
    return tried("linear steps", records.features.device, partial(_launched, *given))


def _loss_of(task: Task) -> tuple[int | None, float]:
    """The number of a linear task's loss in the program, and Huber's delta."""
    if type(task) not in (Linear, Logistic):
        return None, 0.0
    assert isinstance(task, Linear)
    if task.features >= _INPUTS or task.outputs > _SCORES:
        return None, 0.0
    errors = task.loss.errors
    if type(errors) is HuberErrors:  # a subclass may be another loss
        assert isinstance(errors, HuberErrors)
        return _HUBER, errors.delta
    return _LOSSES.get(errors), 0.0


def _launched(
    of: Participation,
    loss: tuple[int, float],
    way: Affine,
    records: Records,
    drawn: DrawnSteps,
) -> Local:
    """y after K steps and the mean of the K noised and regularised gradients.

    A step gathers the batch, forms scores and errors, clips them as
    :func:`~dpscaffold.tasks.clipping.clip_unseen` does and adds them up; the next launch finishes
    it with noise, regularisation, correction and move. Between launches nothing but partial sums
    and y is in memory.
    """
    from dpscaffold.engine.programs import linear_step

    task, numbers, plain = of.task, of.numbers, type(of.query) is Plain
    assert isinstance(task, Linear)
    params, batches = of.at.broadcast.params.contiguous(), drawn.batches
    steps, count, width = batches.index.shape
    users, size = params.shape
    inputs = _power(task.features + 1)
    rows = max(16, _HELD // inputs)
    blocks = -(-width // rows)
    splits = min(_SPLITS, blocks)
    y, total = [params.clone(), torch.empty_like(params)], torch.zeros_like(params)
    partials = params.new_empty(2, users, splits, size)
    columns = [numbers.step_size, numbers.regularisation, numbers.divisor, numbers.spread]
    scales = torch.cat(columns, dim=1)
    bound = torch.threshold(numbers.clip[:, 0].double(), BOUNDS[0], 0.0).clamp_max_(BOUNDS[1])
    weight = None if batches.weight is None else batches.weight.contiguous()
    shift = None if way.shift is None else way.shift.contiguous()
    normals = drawn.all_normals
    kept = [total if one is None else one for one in (weight, drawn.places, normals, shift)]
    for step in range(steps + 1):
        # At step 0 there is nothing to finish: y is read, and stays where it is.
        before, after = (y[0], y[0]) if step == 0 else (y[(step - 1) % 2], y[step % 2])
        linear_step[(users, splits if step < steps else 1)](
            records.features, records.labels, records.squares, batches.index, kept[0], kept[1],
            drawn.starts, scales, bound, before, after, total,
            partials[(step + 1) % 2], partials[step % 2], kept[2], kept[3], params,
            step, steps, users, count, width, task.features + 1, float(way.pull), loss[1],
            SPLITS=splits, TILES=-(-blocks // splits), RECORDS=rows, INPUTS=inputs,
            SCORES=_power(task.outputs), OUTPUTS=task.outputs, LOSS=loss[0], CLIPPED=not plain,
            WEIGHED=weight is not None, SHARED=drawn.places is not None,
            NOISY=normals is not None, SHIFTED=shift is not None,
            PULLED=way.pull != 0, MOVES=way.moves, num_warps=_WARPS,
        )  # fmt: skip
    return Local(y[steps % 2], total / steps)


def _power(count: int) -> int:
    """The next power of two that products have a shape for."""
    return max(16, 1 << (count - 1).bit_length())
