"""Clipping that holds for every float: what one record adds to a sum is at most C long.

A gradient that is an outer product δaᵀ has norm ‖δ‖·‖a‖. In float32 the squares of long vectors
overflow and those of short ones vanish; either way a record would escape C/‖g‖. So rows are looked
at first. *Tame* rows (‖δ‖² and ‖a‖² at most :data:`TAME`: every ordinary record) are clipped in
float32. The others, *wild* rows, are few. Their norms are taken in float64, where no product of
four float32 numbers can over- or underflow; both factors are rescaled so that neither needs more
range than float32 has; and a gradient that is not finite adds exactly zero, by selection and not by
a product, because 0·NaN is NaN. A wild row changes no other row, not even in its last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce

import torch
from torch import Tensor

from dpscaffold.tasks.base import BOUNDS, Clip, Exact, Task, clip_factors

#: Largest squared norm of a tame row. What underflow takes from the square of a gradient's norm is
#: then less than 1e-35 for every number in a row.
TAME = 1e10

#: Smallest squared norm of a row whose norm float32 keeps to full precision.
_LEAST = 1e-20

#: What represents a norm of zero in float64 where something is divided by it.
_VANISHED = 1e-290

#: Records whose products are added in float32 where a sum over all records is asked for in float64.
RECORDS_ADDED = 64

#: Numbers that are held in float64 at a time.
_HELD = 1 << 22


def row_squares(rows: Tensor) -> Tensor:
    """‖a‖² of every row of (N, D), (N,): summed in float64, a block of rows at a time."""
    size = max(1, _HELD // max(1, rows.shape[1]))
    parts = [part.double().square().sum(1) for part in rows.split(size)]
    return torch.cat(parts).to(rows.dtype)


def all_tame(squares: Tensor) -> bool:
    """Whether no row with these squared norms is extreme; waits for the device, once a dataset.

    >>> all_tame(torch.tensor([1.0, 2.0])), all_tame(torch.tensor([1.0, 1e30]))
    (True, False)
    """
    return bool(((squares >= _LEAST) & (squares <= TAME)).all())


@dataclass
class LayerOuter:
    """One layer's share of all gradients, δaᵀ for each record: ``left`` δ (U, R, B), which
    :func:`clip_outer` scales in place, ``right`` a (U, D, B), and ``known`` ‖a‖² (U, B) where they
    are known already.

    With ``bias`` a 1 follows each a without being stored; ``ones`` takes its place once wild rows
    are rescaled. ``tame`` says that all of ``known`` are between 1e-20 and :data:`TAME`, ``exact``
    asks for a sum in float64.
    """

    left: Tensor
    right: Tensor
    known: Tensor | None = None
    bias: bool = False
    ones: Tensor | None = None
    tame: bool = False
    exact: Exact | None = None

    def squares(self) -> Tensor:
        """‖a‖² of every record, (U, B)."""
        if self.known is not None:
            return self.known
        squares = (self.right * self.right).sum(1)
        return squares.add_(1) if self.bias else squares

    def total(self) -> Tensor:
        """Σ_j δ_j·a_jᵀ of every user, (U, R, D), or (U, R, D+1) with a bias."""
        left, right = self.left, self.right.transpose(1, 2)
        if self.exact is None:
            total = torch.bmm(left, right)
        else:
            total = _sum_in_double(left, right, blocks=self.exact == "blocks")
        if not self.bias:
            return total
        last = left if self.ones is None else left * self.ones[:, None, :]
        return torch.cat([total, last.sum(2, keepdim=True, dtype=total.dtype)], dim=2)

    def length(self, user: Tensor, record: Tensor) -> Tensor:
        """‖a‖ of these records in float64, (W,)."""
        squares = self.right[user, :, record].double().square().sum(1)
        return (squares + 1 if self.bias else squares).sqrt()

    def lengths(self) -> Tensor:
        """‖a‖ of every record in float64, (U, B)."""
        if self.tame and self.known is not None:
            return self.known.double().sqrt_()
        squares = self.right.double().square().sum(1)
        return (squares + 1 if self.bias else squares).sqrt()

    def shrink(self, length: Tensor, shrinkage: Tensor, dropped: Tensor) -> None:
        """Multiply every δaᵀ by its shrinkage (U, B); both sides are 0 where it is dropped.

        ‖a‖ becomes 1, unless all rows are tame: then a is finite and stays as it is.
        """

        def scaled(values: Tensor, scale: Tensor) -> Tensor:
            product = values * scale[:, None]  # in float64, as the scale is
            return product.masked_fill_(dropped[:, None], 0.0).to(values.dtype)

        if self.tame:
            self.left = scaled(self.left, shrinkage)
            return
        self.left = scaled(self.left, shrinkage * length)
        self.right = scaled(self.right, 1 / length)
        if self.bias:
            self.ones = (1 / length).masked_fill_(dropped, 0.0).to(self.left.dtype)

    def rescale(self, user: Tensor, record: Tensor, shrinkage: Tensor) -> None:
        """Multiply δaᵀ of these records by their shrinkage (W,), and let ‖a‖ be 1.

        The products are formed in float64, so that nothing is lost where one factor is huge and the
        other minute. A shrinkage of 0 makes both sides 0, whatever they were.
        """
        length = self.length(user, record)
        length = torch.where(length > 0, length, 1.0)
        keep = (shrinkage > 0)[:, None]

        def put(target: Tensor, scale: Tensor) -> None:
            values = target[user, :, record].double() * scale[:, None]
            target[user, :, record] = torch.where(keep, values, 0.0).to(target.dtype)

        put(self.left, shrinkage * length)
        self.right = self.right.clone()  # it may be the caller's own
        put(self.right, 1 / length)
        if self.bias:
            self.ones = torch.ones_like(self.left[:, 0])
            put(self.ones[:, None, :], 1 / length)


def _sum_in_double(left: Tensor, right: Tensor, blocks: bool) -> Tensor:
    """Σ_j δ_j·a_jᵀ, (U, R, D) float64, of δ (U, R, B) and a (U, B, D).

    With ``blocks``, products of at most :data:`RECORDS_ADDED` records at a time are float32, and
    their sums are added in float64. A record that stays in its place then changes the rounding of
    its own block and of the float64 sums only (docs/privacy-proofs.md, How sums are rounded).
    """
    if not blocks or left.dtype != torch.float32 or not _keeps_float32(left.device.type):
        return torch.bmm(left.double(), right.double())
    total = left.new_zeros(left.shape[0], left.shape[1], right.shape[2], dtype=torch.float64)
    for start in range(0, left.shape[2], RECORDS_ADDED):
        block = slice(start, start + RECORDS_ADDED)
        total += torch.bmm(left[:, :, block], right[:, block])
    return total


def _keeps_float32(device: str) -> bool:
    """Whether products of float32 numbers are rounded as float32 numbers: known for CPUs, unless
    somebody asked for less. Elsewhere products are float64."""
    asked = torch.get_float32_matmul_precision() != "highest"
    return device == "cpu" and not asked and _is_precise()


@cache
def _is_precise() -> bool:
    """Whether the library of products keeps all 24 bits: a variable of the environment may say
    otherwise (``ONEDNN_DEFAULT_FPMATH_MODE``)."""
    one = torch.full((1, 64, 64), 1 + 2.0**-22)
    unit = torch.eye(64)[None]
    return bool(torch.equal(torch.bmm(one, unit), one))


def clip_outer(parts: Sequence[LayerOuter], weight: Tensor | None, clip: Clip) -> Tensor | None:
    """Weigh and clip the gradients that these parts make up together; returns the bound C, (U,).

    Example: two records of one user, of which the second is far beyond the range of float32's
    squares; both gradients end at the clip bound.

    >>> part = LayerOuter(torch.ones(1, 1, 2), torch.tensor([[[3.0, 1e30]]]))
    >>> bound = clip_outer([part], None, torch.tensor([0.5]))
    >>> float(part.total())
    1.0
    """
    if clip is None:
        _weigh(parts, weight)
        return None
    if not _may_look(parts[0].left):
        return clip_unseen(parts, weight, clip)
    norms, (user, record) = _norms(parts)
    exact = _exact_norms(parts, user, record) if len(user) else None
    if exact is not None:
        norms[user, record] = exact.to(norms.dtype)
    factor, bound = clip_factors(norms, weight, clip)
    assert factor is not None and bound is not None
    if exact is not None:
        shrinkage = exact_shrinkage(exact, bound[user])
        for part in parts:
            part.rescale(user, record, shrinkage)
        factor[user, record] = 1.0 if weight is None else weight[user, record]
    for part in parts:
        part.left *= factor[:, None, :]
    return bound


def _norms(parts: Sequence[LayerOuter]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The norms of the gradients, and (user, record) of those that float32 cannot square."""
    own = [(part.left * part.left).sum(1) for part in parts]
    squares = [part.squares() for part in parts]
    wild = _wild([*own, *squares])
    total = own[0] * squares[0]
    for errors, inputs in zip(own[1:], squares[1:], strict=True):
        total += errors * inputs
    return total.sqrt_(), wild


def clip_unseen(parts: Sequence[LayerOuter], weight: Tensor | None, clip: Clip) -> Tensor:
    """The same for every row in float64 and without a look at any: a GPU is never waited for.

    Every ‖a‖ becomes 1, so that neither factor needs more range than float32 has.

    >>> part = LayerOuter(torch.ones(1, 1, 2), torch.tensor([[[3.0, 1e30]]]))
    >>> bound = clip_unseen([part], None, torch.tensor([0.5]))
    >>> float(part.total())
    1.0
    """
    lengths = [part.lengths() for part in parts]
    own = [
        torch.linalg.vector_norm(part.left, dim=1, dtype=torch.float64).mul_(length)
        for part, length in zip(parts, lengths, strict=True)
    ]
    norms = own[0] if len(own) == 1 else torch.stack(own).square_().sum(0).sqrt_()
    dropped = ~(norms < float("inf"))  # NaN too
    if isinstance(clip, str):
        seen = norms.masked_fill(dropped, float("nan")).to(parts[0].left.dtype)
        _, bound = clip_factors(seen, weight, clip)
        assert bound is not None
    else:
        assert clip is not None
        bound = clip
    used = torch.threshold(bound.double(), BOUNDS[0], 0.0).clamp_max_(BOUNDS[1])
    shrinkage = (used[:, None] / norms.clamp_min_(_VANISHED)).clamp_max_(1.0)
    if weight is not None:
        shrinkage *= weight
        dropped |= weight == 0
    for part, length in zip(parts, lengths, strict=True):
        part.shrink(length.clamp_min_(_VANISHED), shrinkage, dropped)
    return bound


def exact_shrinkage(norms: Tensor, bound: Tensor) -> Tensor:
    """min(1, C/‖g‖) in float64 from norms in float64; exactly 0 where the norm is not finite."""
    used = torch.threshold(bound.double(), BOUNDS[0], 0.0).clamp_max(BOUNDS[1])
    shrunk = torch.where(norms > 0, (used / norms).clamp_max(1.0), 1.0)
    return torch.where(norms.isfinite(), shrunk, 0.0)


def _may_look(values: Tensor) -> bool:
    """Whether a number may be read on the way: a GPU would have to be waited for."""
    return not values.is_cuda


def _wild(squares: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Users and places of the rows where one of these squared norms (U, B) is above TAME or NaN."""
    if squares[0].numel() == 0 or _largest(squares) <= TAME:  # false for NaN
        none = torch.empty(0, dtype=torch.int64)
        return none, none
    tame = squares[0] <= TAME
    for square in squares[1:]:
        tame &= square <= TAME
    user, record = (~tame).nonzero(as_tuple=True)
    return user, record


def _largest(values: Sequence[Tensor]) -> float:
    """The largest number of all, NaN if there is one: one look, for which a GPU is waited for
    once."""
    return float(reduce(torch.maximum, [value.amax() for value in values]))


def _exact_norms(parts: Sequence[LayerOuter], user: Tensor, record: Tensor) -> Tensor:
    """‖g‖ of these records in float64, (W,): NaN where the gradient is not finite."""
    total = torch.zeros(len(user), dtype=torch.float64, device=user.device)
    for part in parts:
        left = part.left[user, :, record].double().square().sum(1).sqrt()
        total += (left * part.length(user, record)).square()
    return torch.where(total.isfinite(), total, float("nan")).sqrt()


def _weigh(parts: Sequence[LayerOuter], weight: Tensor | None) -> None:
    """Weigh gradients that are not clipped; padding is 0 on both sides, even where it is NaN."""
    if weight is None:
        return
    padding = (weight == 0)[:, None, :]
    for part in parts:
        part.left.mul_(weight[:, None, :]).masked_fill_(padding, 0.0)
        # Padding is finite as a rule; only where it may not be, all of the right side is copied.
        if part.tame:
            continue
        if not _may_look(part.right) or not bool(part.right.sum().isfinite()):
            part.right = part.right.masked_fill(padding, 0.0)


def prepared(task: Task, features: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features as the task wants them, on the device, and their squared row norms."""
    features = task.prepare(features.to(device))
    return features, row_squares(features)
