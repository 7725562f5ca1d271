"""K noised steps of linear models, a launch a step for all rows, users and runs alike.

A step gathers the batch, forms scores and errors, clips them as
:func:`~dpscaffold.tasks.clipping.clip_unseen` does (norms in float64, what is not finite taken out
by selection) and adds them up; the next launch finishes it with noise, regularisation, correction
and move. Between launches nothing but partial sums and y is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpscaffold.engines.fast.kernels import tried, usable

#: Most inputs (with the bias) and scores of a model whose weights one program holds.
MOST_INPUTS, MOST_SCORES = 128, 32

#: The losses that the programs know, by their numbers there.
LOSSES = {"softmax": 0, "logistic": 1, "squared": 2, "huber": 3}

#: Numbers of records that one block holds at a time, in two warps, and the most blocks a row: the
#: fastest of fifteen shapes on an H200, alone and with twelve stacked runs.
_HELD, _WARPS, _SPLITS = 4096, 2, 16


@dataclass(frozen=True)
class LinearModel:
    """z = Wa: inputs with the bias, scores, and the loss (``delta`` is Huber's)."""

    inputs: int
    outputs: int
    loss: str
    delta: float = 0.0


@dataclass(frozen=True)
class Steps:
    """What K steps of U rows are made of, all on one device.

    - ``features`` (N, D) with ones, ``labels``, ``squares`` (N,): tame records.
    - ``index`` (K, V, B) and ``weight`` (K, V, B) or None: the batches of V distinct rows.
    - ``places`` (U,) or None: which of them each row draws; ``starts`` (U,) of its records.
    - ``noise`` (K, V, P) or None.
    - ``numbers`` (U, 5): η_l, λ, b, (unused), and the spread of the noise.
    - ``bound`` (U,) float64 or None: C.
    - ``params`` (U, P): x. The direction of a step is gradient + ``shift`` (U, P) + ``pull``·(y−x),
      or nothing at all where a step ``moves`` not.
    """

    features: Tensor
    labels: Tensor
    squares: Tensor
    index: Tensor
    weight: Tensor | None
    places: Tensor | None
    starts: Tensor
    noise: Tensor | None
    numbers: Tensor
    bound: Tensor | None
    params: Tensor
    shift: Tensor | None = None
    pull: float = 0.0
    moves: bool = True


def fits(model: LinearModel, device: torch.device) -> bool:
    """Whether there is a program for such a model."""
    return (
        usable(device)
        and model.loss in LOSSES
        and model.inputs <= MOST_INPUTS
        and model.outputs <= MOST_SCORES
    )


def run_steps(model: LinearModel, given: Steps) -> tuple[Tensor, Tensor] | None:
    """y after K steps and the sum of the K noised and regularised gradients, (U, P) each; None
    where the program cannot be had."""
    return tried("linear steps", lambda: _run(model, given))


def _run(model: LinearModel, given: Steps) -> tuple[Tensor, Tensor]:
    from dpscaffold.engines.fast.kernels.programs import linear_step

    steps, drawn, width = given.index.shape
    users, size = given.params.shape
    inputs = _power(model.inputs)
    records = max(16, _HELD // inputs)
    blocks = -(-width // records)
    splits = min(_SPLITS, blocks)
    y = [given.params.clone(), torch.empty_like(given.params)]
    total = torch.zeros_like(given.params)
    partials = given.params.new_empty(2, users, splits, size)
    nothing = total  # stands where a program reads nothing
    for step in range(steps + 1):
        # At step 0 there is nothing to finish: y is read, and stays where it is.
        before, after = (y[0], y[0]) if step == 0 else (y[(step - 1) % 2], y[step % 2])
        linear_step[(users, splits if step < steps else 1)](
            given.features, given.labels, given.squares, given.index,
            nothing if given.weight is None else given.weight,
            nothing if given.places is None else given.places,
            given.starts, given.numbers, nothing if given.bound is None else given.bound,
            before, after, total, partials[(step + 1) % 2], partials[step % 2],
            nothing if given.noise is None else given.noise,
            nothing if given.shift is None else given.shift, given.params,
            step, steps, users, drawn, width, model.inputs, float(given.pull), float(model.delta),
            SPLITS=splits, TILES=-(-blocks // splits), RECORDS=records, INPUTS=inputs,
            SCORES=_power(model.outputs), OUTPUTS=model.outputs,
            LOSS=LOSSES[model.loss], CLIPPED=given.bound is not None,
            WEIGHED=given.weight is not None, SHARED=given.places is not None,
            NOISY=given.noise is not None, SHIFTED=given.shift is not None,
            PULLED=given.pull != 0, MOVES=given.moves, num_warps=_WARPS,
        )  # fmt: skip
    return y[steps % 2], total


def _power(count: int) -> int:
    """The next power of two that products have a shape for."""
    return max(16, 1 << (count - 1).bit_length())
