"""The programs themselves, in Triton's dialect of Python: each runs once for every block of a grid.

Names in capitals are constants of the compilation. What each program computes is said, and called,
in :mod:`~dpscaffold.engines.fast.kernels.linear`.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: What represents a norm of zero where something is divided by it.
_VANISHED = tl.constexpr(1e-290)


@triton.jit
def _moved(
    step, user, y, partials, noise, shift, anchor, scales, place, at, inside, users, size, pull,
    SPLITS: tl.constexpr, NOISY: tl.constexpr, SHIFTED: tl.constexpr, PULLED: tl.constexpr,
    MOVES: tl.constexpr,
):  # fmt: skip
    """y after a step and its gradient H̃ + λy, from the partial sums that the step left."""
    old = tl.load(y + user * size + at, mask=inside, other=0.0)
    total = tl.zeros_like(old)
    for split in range(SPLITS):
        total += tl.load(partials + (user * SPLITS + split) * size + at, mask=inside, other=0.0)
    rate = tl.load(scales + user * 5)
    gradient = total / tl.load(scales + user * 5 + 2)
    if NOISY:
        drawn = noise + ((step - 1) * users + place) * size
        gradient += tl.load(scales + user * 5 + 4) * tl.load(drawn + at, mask=inside, other=0.0)
    gradient += tl.load(scales + user * 5 + 1) * old
    way = gradient
    if SHIFTED:
        way += tl.load(shift + user * size + at, mask=inside, other=0.0)
    if PULLED:
        way += pull * (old - tl.load(anchor + user * size + at, mask=inside, other=0.0))
    new = old
    if MOVES:
        new = old - rate * way
    return new, gradient


@triton.jit
def _errors(scores, label, output, OUTPUTS: tl.constexpr, LOSS: tl.constexpr, delta):
    """δ = ∂loss/∂scores of every record, (records, outputs); 0 for outputs that are not there."""
    real = output[None, :] < OUTPUTS
    if LOSS == 0:  # softmax
        scores = tl.where(real, scores, float("-inf"))
        powers = tl.exp(scores - tl.max(scores, 1)[:, None])
        target = output[None, :] == label[:, None]
        found = powers / tl.sum(powers, 1)[:, None] - target.to(tl.float32)
    elif LOSS == 1:  # logistic
        away = 1.0 - 2.0 * label.to(tl.float32)[:, None]
        found = away / (1.0 + tl.exp(-scores * away))
    else:  # squared, and Huber with a finite delta
        found = scores - label.to(tl.float32)[:, None]
        if LOSS == 3:
            found = tl.where(found > delta, delta, tl.where(found < -delta, -delta, found))
    return tl.where(real, found, 0.0)


@triton.jit(do_not_specialize=["step"])
def linear_step(
    features, labels, squares, index, weight, places, starts, scales, bounds,
    before, after, total, partials, fresh, noise, shift, anchor,
    step, steps, users, drawn, width, columns, pull, delta,
    SPLITS: tl.constexpr, TILES: tl.constexpr, RECORDS: tl.constexpr, INPUTS: tl.constexpr,
    SCORES: tl.constexpr, OUTPUTS: tl.constexpr, LOSS: tl.constexpr, CLIPPED: tl.constexpr,
    WEIGHED: tl.constexpr, SHARED: tl.constexpr, NOISY: tl.constexpr, SHIFTED: tl.constexpr,
    PULLED: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """Finish the last step of one row, and add up this step's clipped gradients of some records.

    Every block of a row finishes the last step for itself (a few hundred numbers), so that no block
    waits for another; the first one writes it down.
    """
    user, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = columns * OUTPUTS
    place = user
    if SHARED:
        place = tl.load(places + user)
    column = tl.arange(0, INPUTS)
    output = tl.arange(0, SCORES)
    at = output[None, :] * columns + column[:, None]
    inside = (column[:, None] < columns) & (output[None, :] < OUTPUTS)
    if step == 0:
        y = tl.load(before + user * size + at, mask=inside, other=0.0)
    else:
        y, gradient = _moved(
            step, user, before, partials, noise, shift, anchor, scales, place, at, inside, drawn,
            size, pull, SPLITS, NOISY, SHIFTED, PULLED, MOVES,
        )  # fmt: skip
        if split == 0:
            tl.store(after + user * size + at, y, mask=inside)
            sums = total + user * size + at
            tl.store(sums, gradient + tl.load(sums, mask=inside, other=0.0), mask=inside)
    if step < steps:
        start = tl.load(starts + user)
        row = (step * drawn + place) * width
        mine = tl.zeros((INPUTS, SCORES), tl.float32)
        for tile in range(TILES):
            record = (split * TILES + tile) * RECORDS + tl.arange(0, RECORDS)
            there = record < width
            where = start + tl.load(index + row + record, mask=there, other=0)
            counts = there.to(tl.float32)
            if WEIGHED:
                counts = tl.load(weight + row + record, mask=there, other=0.0)
            held = there[:, None] & (column[None, :] < columns)
            a = tl.load(features + where[:, None] * columns + column[None, :], held, other=0.0)
            label = tl.load(labels + where, mask=there, other=0)
            scores = tl.dot(a, y, input_precision="ieee")
            errors = _errors(scores, label, output, OUTPUTS, LOSS, delta)
            if CLIPPED:
                # In float64, where no product of four float32 numbers over- or underflows.
                exact = errors.to(tl.float64)
                length = tl.load(squares + where, mask=there, other=1.0).to(tl.float64)
                norm = tl.sqrt(tl.sum(exact * exact, 1)) * tl.sqrt(length)
                keep = (norm < float("inf")) & (counts != 0)
                bound = tl.load(bounds + user).to(tl.float64)
                factor = bound / tl.maximum(norm, _VANISHED)
                factor = tl.where(factor < 1.0, factor, 1.0) * counts
                # By selection and not by a product: 0·NaN is NaN.
                errors = tl.where(keep[:, None], (exact * factor[:, None]).to(tl.float32), 0.0)
            else:
                errors = tl.where((counts != 0)[:, None], errors * counts[:, None], 0.0)
            mine += tl.dot(tl.trans(a), errors, input_precision="ieee")
        out = fresh + (user * SPLITS + split) * size + at
        tl.store(out, mine, mask=inside)
