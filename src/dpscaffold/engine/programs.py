"""The programs themselves, in Triton's dialect of Python: each runs once for every block of a grid.

Names in capitals are constants of the compilation. What each program computes is said, and called,
in :mod:`~dpscaffold.engine.draws` and :mod:`~dpscaffold.engine.gpu`.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: 2⁶³ − 1: no key of a record is larger.
_LARGEST = tl.constexpr(9223372036854775807)

#: What represents a norm of zero where something is divided by it.
_VANISHED = tl.constexpr(1e-290)

#: 2⁻⁴⁰ and 2π·2⁻²⁴.
_FINEST = tl.constexpr(9.094947017729282e-13)
_ANGLE = tl.constexpr(3.7450702829239286e-07)


@triton.jit
def _words(place, step, where, KEY: tl.constexpr):
    """Philox-4x32-10 at (place, step, user, round), under the two words from column ``KEY``."""
    user = tl.load(where).to(tl.uint32)
    round = tl.load(where + 1).to(tl.uint32)
    first = tl.load(where + KEY).to(tl.uint32)
    second = tl.load(where + KEY + 1).to(tl.uint32)
    none = place * 0
    return tl.philox_impl(
        place, none + step.to(tl.uint32), none + user, none + round, none + first, none + second
    )


@triton.jit
def _record_keys(where, step, PLACES: tl.constexpr):
    """Numbers in [0, 2⁶³) for records 0, 1, …, 2·PLACES − 1, in their order."""
    place = tl.arange(0, PLACES).to(tl.uint32)
    a, b, c, d = _words(place, step, where, 2)
    even = ((a & 0x7FFFFFFF).to(tl.int64) << 32) | b.to(tl.int64)
    odd = ((c & 0x7FFFFFFF).to(tl.int64) << 32) | d.to(tl.int64)
    return tl.interleave(even, odd)


@triton.jit
def fixed(index, draws, sizes, users, width, PLACES: tl.constexpr):
    """The b records with the smallest keys, ascending, of one participant's step."""
    user, step = tl.program_id(0), tl.program_id(1)
    where = draws + user * 6
    size = tl.load(sizes + user * 4)
    batch = tl.load(sizes + user * 4 + 1)
    low = tl.load(sizes + user * 4 + 2)
    number = tl.arange(0, 2 * PLACES)
    keys = _record_keys(where, step, PLACES)
    keys = tl.where(number < size, (keys & ~low) | number, _LARGEST)
    # Bisection for a bound below which there are exactly b keys; no two are equal.
    below = tl.full((), 0, tl.int64)
    above = tl.full((), _LARGEST, tl.int64)
    bound = above
    count = size
    while count != batch:
        bound = below + ((above - below) >> 1)
        count = tl.sum((keys < bound).to(tl.int32), 0).to(tl.int64)
        below = tl.where(count < batch, bound, below)
        above = tl.where(count > batch, bound, above)
    chosen = (number < size) & ((keys < bound) | (size == batch))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    out = index + (step.to(tl.int64) * users + user) * width
    tl.store(out + place, number.to(tl.int64), mask=chosen & (place < width))


@triton.jit
def poisson(index, counts, draws, sizes, users, width, PLACES: tl.constexpr):
    """The records whose 63 bits are below the rate, ascending, and how many there are."""
    user, step = tl.program_id(0), tl.program_id(1)
    where = draws + user * 6
    number = tl.arange(0, 2 * PLACES)
    keys = _record_keys(where, step, PLACES)
    chosen = (keys < tl.load(sizes + user * 4 + 3)) & (number < tl.load(sizes + user * 4))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    row = step.to(tl.int64) * users + user
    tl.store(index + row * width + place, number.to(tl.int64), mask=chosen & (place < width))
    tl.store(counts + row, tl.sum(chosen.to(tl.int64), 0))


@triton.jit
def normals(out, draws, first, users, size, PLACES: tl.constexpr):
    """Four standard normals a place, by Box and Muller in float64."""
    user, step = tl.program_id(0), tl.program_id(1)
    place = tl.program_id(2) * PLACES + tl.arange(0, PLACES)
    a, b, c, d = _words(place.to(tl.uint32), first + step, draws + user * 6, 4)
    row = out + (step.to(tl.int64) * users + user) * size
    at = place * 4
    for pair in tl.static_range(2):
        high = (a if pair == 0 else c).to(tl.int64)
        low = (b if pair == 0 else d).to(tl.int64)
        uniform = (((high << 8) | (low >> 24)).to(tl.float64) + 0.5) * _FINEST
        angle = ((low & 0xFFFFFF).to(tl.float64) + 0.5) * _ANGLE
        radius = tl.sqrt(-2.0 * tl.log(uniform))
        put = at + 2 * pair
        tl.store(row + put, (radius * tl.cos(angle)).to(tl.float32), mask=put < size)
        tl.store(row + put + 1, (radius * tl.sin(angle)).to(tl.float32), mask=put + 1 < size)


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
    rate = tl.load(scales + user * 4)
    gradient = total / tl.load(scales + user * 4 + 2)
    if NOISY:
        drawn = noise + ((step - 1) * users + place) * size
        gradient += tl.load(scales + user * 4 + 3) * tl.load(drawn + at, mask=inside, other=0.0)
    gradient += tl.load(scales + user * 4 + 1) * old
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
