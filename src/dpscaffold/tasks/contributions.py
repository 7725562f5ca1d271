"""Per-example gradients of one parameter, in as few numbers as possible.

A contribution represents the gradients g_j of one parameter, for the U users and N records of a
stack. It knows two things: the squared norms ‖g_j‖², (U, N) in float64, in which squares of float32
numbers neither overflow nor vanish; and the clipped sum Σ_j f_j·g_j per user. Both are computed
from the same numbers, so that what the norm bounds is what is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

#: What writing, measuring and summing one number of a held gradient costs, in multiplications.
_HOLDING = 120

#: What turning one float32 number into float64 and back costs, in multiplications.
_CONVERTING = 40

#: Float32 does not hold factors below this to full precision. On a GPU, where one must not wait to
#: see whether there are any, they count as zero: a gradient 10³⁷ times as long as C adds nothing.
_SMALLEST = 1e-37

#: Norms of nothing, so that 0/0 is 0.
_NOTHING = 1e-300

#: Rows no longer than this may be multiplied in float32: what rounding to its smallest numbers
#: takes or adds is then less than a millionth of any clip bound that counts.
_LONG = 1e12

#: Squares that float32 lost to underflow, times what they would be multiplied with, are below a
#: millionth of the shortest norm that counts (10⁻¹²) if n·‖·‖² is at most this.
_FAINT = 1e-30 / 2.0**-126


@dataclass(frozen=True)
class Factors:
    """The factor f_j of each record, (U, N) float64, and which records are to be kept at all.

    ``sound`` (U, N) is False for records whose gradient is not finite: they are selected away,
    since 0·∞ is not 0. None says that all are sound.
    """

    factor: Tensor
    sound: Tensor | None = None

    def keep(self, values: Tensor) -> Tensor:
        """``values`` (U, N, …) with exact zeros for the records that are not sound."""
        if self.sound is None:
            return values
        return torch.where(_aligned(self.sound, values), values, 0.0)


class Contribution(Protocol):
    """Gradients of one parameter; see the module."""

    @property
    def held(self) -> int:
        """How many numbers are held for one record."""
        ...

    def squares(self) -> Tensor:
        """‖g_j‖², (U, N) float64."""
        ...

    def total(self, scale: Factors) -> Tensor:
        """Σ_j f_j·g_j, flat, (U, p)."""
        ...

    def dense(self) -> Dense:
        """The gradients themselves."""
        ...


@dataclass(frozen=True)
class Dense:
    """The gradients as they are, (U, N, p)."""

    gradients: Tensor

    @property
    def held(self) -> int:
        return self.gradients[0, 0].numel()

    def squares(self) -> Tensor:
        quick = _quick_squares(self.gradients)
        return _mended(quick, quick.isfinite(), lambda: _exact_squares(self.gradients))

    def total(self, scale: Factors) -> Tensor:
        gradients = scale.keep(self.gradients)
        factor = _single(scale.factor, gradients.dtype)
        if gradients.device.type == "cpu":
            minute = _minute(scale.factor)
            plain = gradients
            gradients = _mended(plain, ~minute, lambda: _times(plain, scale.factor))
            factor = factor.masked_fill(minute, 1.0)
        return torch.bmm(factor[:, None], gradients)[:, 0]

    def dense(self) -> Dense:
        return self


@dataclass(frozen=True)
class Outer:
    """A matrix as the product of two vectors: g = l·rᵀ, with ``left`` (U, N, rows) and ``right``
    (U, N, columns); ‖g‖ = ‖l‖·‖r‖."""

    left: Tensor
    right: Tensor

    @property
    def held(self) -> int:
        return self.left[0, 0].numel() + self.right[0, 0].numel()

    def squares(self) -> Tensor:
        left, right = _quick_squares(self.left), _quick_squares(self.right)
        faint = self.left.shape[-1] * right + self.right.shape[-1] * left

        def exact() -> Tensor:
            return _exact_squares(self.left) * _exact_squares(self.right)

        return _mended(left * right, faint <= _FAINT, exact)

    def total(self, scale: Factors) -> Tensor:
        """Σ_j (f_j·l_j)r_jᵀ; for long rows Σ_j (f_j·‖r_j‖·l_j)(r_j/‖r_j‖)ᵀ, of which no part over-
        or underflows where the whole does not."""
        factor = scale.factor
        tame = (_quick_squares(self.right) <= _LONG**2) & ~_minute(factor)

        def length() -> Tensor:
            return _exact_squares(self.right).sqrt_().clamp_min_(_NOTHING)

        left = self.left * _single(factor, self.left.dtype)[..., None]
        left = _mended(left, tame, lambda: _times(self.left, factor * length()))
        right = _mended(self.right, tame, lambda: _times(self.right, 1 / length()))
        return torch.bmm(scale.keep(left).transpose(1, 2), scale.keep(right)).flatten(1)

    def dense(self) -> Dense:
        return Dense((self.left[..., :, None] * self.right[..., None, :]).flatten(2))


@dataclass(frozen=True)
class Outers:
    """A matrix as a sum of products over T places: g = Σ_t l_t·r_tᵀ, with ``left`` (U, N, rows, T)
    and ``right`` (U, N, columns, T).

    ‖g‖² = Σ_{t,t'} (l_t·l_t')(r_t·r_t'), without forming g. Places may cancel, so this is computed
    in float64 and raised by what rounding may have taken: κ(Σ_t‖l_t‖‖r_t‖)² with κ = (T² + rows +
    columns)·2⁻⁵²; the sum is computed in float64 too, from the same numbers.
    """

    left: Tensor
    right: Tensor

    @property
    def held(self) -> int:
        return 3 * (self.left[0, 0].numel() + self.right[0, 0].numel())

    def squares(self) -> Tensor:
        left, right = self.left.double(), self.right.double()
        products = left.transpose(2, 3) @ left
        products *= right.transpose(2, 3) @ right
        lengths = (left.square().sum(2) * right.square().sum(2)).sqrt_().sum(-1)
        rows, places = left.shape[2:]
        rounding = (places**2 + rows + right.shape[2]) * 2.0**-52
        return products.sum((2, 3)).clamp_min_(0.0) + rounding * lengths.square()

    def total(self, scale: Factors) -> Tensor:
        left = scale.keep(self.left.double() * _aligned(scale.factor, self.left))
        right = scale.keep(self.right.double())
        flat = torch.bmm(
            left.transpose(1, 2).flatten(2), right.transpose(1, 2).flatten(2).transpose(1, 2)
        )
        return flat.flatten(1).to(self.left.dtype)

    def dense(self) -> Dense:
        return Dense((self.left @ self.right.transpose(2, 3)).flatten(2))


@dataclass(frozen=True)
class LookedUpRows:
    """Rows of a table that were looked up at T places: g has Σ of ``values`` (U, N, T, columns)
    over the places whose ``index`` (U, N, T) is that row.

    ‖g‖² = Σ_{t,t'} [same row]·(v_t·v_t'), in float64 and raised as in :class:`Outers`.
    """

    index: Tensor
    values: Tensor
    rows: int

    @property
    def held(self) -> int:
        return 3 * self.values[0, 0].numel() + self.index.shape[2] ** 2

    def squares(self) -> Tensor:
        values = self.values.double()
        products = values @ values.transpose(2, 3)
        same = self.index[..., :, None] == self.index[..., None, :]
        lengths = values.square().sum(-1).sqrt_().sum(-1)
        places, columns = values.shape[2:]
        rounding = (places**2 + columns) * 2.0**-52
        found = torch.where(same, products, 0.0).sum((2, 3)).clamp_min_(0.0)
        return found + rounding * lengths.square()

    def total(self, scale: Factors) -> Tensor:
        values = scale.keep(self.values.double() * _aligned(scale.factor, self.values))
        users, columns = values.shape[0], values.shape[-1]
        out = values.new_zeros(users, self.rows, columns)
        index = self.index.flatten(1)[..., None].expand(-1, -1, columns)
        return out.scatter_add_(1, index, values.flatten(1, 2)).flatten(1).to(self.values.dtype)

    def dense(self) -> Dense:
        users, records, _, columns = self.values.shape
        out = self.values.new_zeros(users, records, self.rows, columns)
        index = self.index[..., None].expand(-1, -1, -1, columns)
        return Dense(out.scatter_add_(2, index, self.values).flatten(2))


def joined(parts: list[Contribution]) -> Contribution:
    """The contribution of a parameter that was used several times: exactly the sum of its parts, in
    the cheapest form that tells it.

    >>> one = Outer(torch.ones(1, 1, 2), torch.ones(1, 1, 3))
    >>> joined([one, one]).squares()  # twice a matrix of six ones
    tensor([[24.]], dtype=torch.float64)
    """
    if len(parts) == 1 and not isinstance(parts[0], Outers):
        return _cheaper_table(parts[0])
    places = [_as_outers(part) for part in parts]
    together = [part for part in places if part is not None]
    if len(together) < len(parts):
        return Dense(torch.stack([part.dense().gradients for part in parts]).sum(0))
    if len(together) == 1:
        return _cheaper_product(together[0])
    left, right = zip(*((part.left, part.right) for part in together), strict=True)
    return _cheaper_product(Outers(torch.cat(left, -1), torch.cat(right, -1)))


def _as_outers(part: Contribution) -> Outers | None:
    if isinstance(part, Outer):
        return Outers(part.left[..., None], part.right[..., None])
    return part if isinstance(part, Outers) else None


def _cheaper_product(part: Outers) -> Contribution:
    """Held gradients, or ghost norms: whichever is less work.

    Held: a product of rows × columns × T and three passes over rows × columns numbers. Ghost: two
    Gram matrices of T × T and the sum, in float64.
    """
    rows, places = part.left.shape[2:]
    columns = part.right.shape[2]
    if places == 1:
        return Outer(part.left[..., 0], part.right[..., 0])
    area, rim = rows * columns, rows + columns
    holding = 2 * places * area + _HOLDING * area
    ghost = 4 * places**2 * rim + 4 * places * area + 2 * _CONVERTING * places * rim
    return part if ghost < holding else part.dense()


def _cheaper_table(part: Contribution) -> Contribution:
    """A small table's gradients are held; those of a large one are given by their rows."""
    if isinstance(part, LookedUpRows):
        places, columns = part.values.shape[2:]
        if part.rows * columns <= 2 * places * (places + columns):
            return part.dense()
    return part


def _exact_squares(values: Tensor) -> Tensor:
    """Σ of squares over the last dimension, all in float64."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    return norms.square_()


def _quick_squares(values: Tensor) -> Tensor:
    """Σ of squares over the last dimension, summed pairwise in float32: infinite where a square
    overflows, and without squares below 2⁻¹²⁶. Given as float64."""
    return values.square().sum(-1).double()


def _mended(quick: Tensor, tame: Tensor, exact: Callable[[], Tensor]) -> Tensor:
    """``quick`` (U, N, …) where records are ``tame`` (U, N), and ``exact()`` where they are wild.

    The choice is each record's own: a wild one changes no other, not even in its last bit. On a CPU
    ``exact`` is called only if it is needed; a GPU does not wait to see.
    """
    if tame.device.type == "cpu" and bool(tame.all()):
        return quick
    return torch.where(_aligned(tame, quick), quick, exact())


def _minute(factor: Tensor) -> Tensor:
    """Which factors are too small for float32 without being zero, (U, N)."""
    return (factor > 0) & (factor < _SMALLEST)


def _single(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors in the gradients' own precision; those that it could not hold are zero."""
    return torch.threshold(factor, _SMALLEST, 0.0).to(dtype)


def _times(values: Tensor, factor: Tensor) -> Tensor:
    """Rows (U, N, n) times float64 factors (U, N), rounded once."""
    return (values.double() * factor[..., None]).to(values.dtype)


def _aligned(numbers: Tensor, values: Tensor) -> Tensor:
    """(U, N) numbers shaped to stand next to (U, N, …) values."""
    return numbers.view(*numbers.shape, *[1] * (values.dim() - 2))
