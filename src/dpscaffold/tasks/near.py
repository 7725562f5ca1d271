"""Fit parameters to the records of one site, near given ones: (1/R)Σf_j(w) + (λ/2)‖w − x‖².

λ is the strength. It is chosen by the loss of records that were not fitted: leave-one-out in closed
form for a linear model with the squared loss, cross-validation otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from dpscaffold.errors import BadInput
from dpscaffold.tasks.base import Task
from dpscaffold.tasks.linear import Linear
from dpscaffold.tasks.losses import LOSSES

#: The strengths that are tried, strongest first; ∞ leaves the given parameters as they are.
STRENGTHS = (math.inf, 100.0, 10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)
#: The same for closed forms, where a strength costs almost nothing.
FINE_STRENGTHS = (math.inf, *(10.0 ** (k / 2) for k in range(4, -11, -1)))
#: Records up to which every record is held out once; above, a fifth is held out once, unless there
#: are so few features that all folds take no time (:data:`DOUBLE`).
MANY, FOLDS = 1000, 5
#: Steps of the solver, and the pairs of differences that it remembers.
STEPS, PAIRS = 40, 8
#: How many standard errors a fit that forgets the common model must be better.
DOUBT = 0.25
#: A weaker strength is not tried any more once the held-out loss has risen this often.
PATIENCE = 2
#: Numbers of features that are held at once; bounds the memory of many sites.
HELD = 1 << 25
#: Numbers of features of a site up to which convex losses are minimised in float64.
DOUBLE = 1 << 19


@dataclass(frozen=True)
class SiteRows:
    """The records of one site: prepared features (N, d) as a federation holds them, and labels on
    the scale of the task, (N,)."""

    features: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def on(self, device: torch.device) -> SiteRows:
        """The rows on a device."""
        return SiteRows(self.features.to(device), self.labels.to(device))

    def some(self, chosen: Tensor) -> SiteRows:
        """The rows of these numbers."""
        return SiteRows(self.features[chosen], self.labels[chosen])


@dataclass(frozen=True)
class NearFit:
    """Parameters (P,) that were fitted near others.

    ``strength`` is λ; ∞ means that the given parameters were best. ``held_out`` is the loss (N,) of
    each record under parameters that were fitted without it; NaN for records that were always
    fitted. ``near`` is the place of the given parameters among those that were tried.
    """

    params: Tensor
    strength: float
    held_out: Tensor
    near: int = 0

    @property
    def loss(self) -> float:
        """The mean loss of records that were not fitted; NaN where none was held out."""
        return float(self.held_out.nanmean()) if len(self.held_out) else math.nan


def fit_near(task: Task, rows: SiteRows, centre: Tensor, strength: float | None = None) -> NearFit:
    """Parameters for the records of one site, near ``centre`` (P,).

    Args:
        task: The model and its loss.
        rows: The records.
        centre: The parameters to stay near, such as those of the common model; their device does
            the work.
        strength: λ, 0 or more; None chooses it by the loss of records that are held out.

    >>> from dpscaffold.tasks.losses import LOSSES
    >>> task = Linear(features=1, outputs=1, loss=LOSSES["squared"])
    >>> rows = SiteRows(torch.tensor([[1.0], [-1.0]]), torch.tensor([3.0, -1.0]))
    >>> fit_near(task, rows, torch.zeros(2), strength=1.0).params.tolist()
    [1.0, 0.5]
    """
    return fit_sites(task, [rows], centre, strength)[0]


def fit_sites(
    task: Task, sites: Sequence[SiteRows], centre: Tensor, strength: float | None = None
) -> list[NearFit]:
    """As :func:`fit_near` for each of many sites; no site's fit depends on another's records."""
    if not all(map(len, sites)):
        raise BadInput(
            "no-rows", "a personal model is asked for without records; give the site's own rows"
        )
    if strength is not None and not strength >= 0:
        raise BadInput(
            "out-of-range", f"personal.strength is {strength}; give a number, 0 or more, or 'auto'"
        )
    if isinstance(task, Linear) and task.loss == LOSSES["squared"]:
        return [_ClosedForm(task, rows, centre).fit(strength) for rows in sites]
    order = sorted(range(len(sites)), key=lambda k: len(sites[k]))
    found: dict[int, NearFit] = {}
    for places in _portions(order, sites):
        stack = _Stack.of(task, [sites[k] for k in places], centre)
        found |= zip(places, stack.fits(strength), strict=True)
    return [found[k] for k in range(len(sites))]


def better_of(fits: Sequence[NearFit]) -> NearFit:
    """The first fit, or a later one where its held-out loss is smaller by more than a quarter of
    the standard error of the difference (:data:`DOUBT`)."""
    best = 0
    for place in range(1, len(fits)):
        gain = fits[best].held_out - fits[place].held_out
        gain = gain[gain.isfinite()]
        if len(gain) > 1 and float(gain.mean()) > DOUBT * float(gain.std()) / math.sqrt(len(gain)):
            best = place
    return replace(fits[best], near=best)


def _portions(order: Sequence[int], sites: Sequence[SiteRows]) -> Iterable[list[int]]:
    """The sites in groups of similar sizes that fit the memory."""
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order):
            numbers = (stop + 1 - start) * sites[order[stop]].features.numel()
            if numbers > HELD:
                break
            stop += 1
        yield list(order[start:stop])
        start = stop


class _ClosedForm:
    """Ridge regression towards given parameters, from one singular value decomposition.

    With residuals r = t − Xx and the hat matrix H of the strength, the residual of record j under
    the fit without it is (r − Hr)_j / (1 − H_jj).
    """

    def __init__(self, task: Linear, rows: SiteRows, centre: Tensor) -> None:
        rows = rows.on(centre.device)
        x = task.prepare(rows.features.double())
        self.centre = centre.double()
        self.residuals = rows.labels.double() - x @ self.centre
        self.left, self.values, self.right = torch.linalg.svd(x, full_matrices=False)
        self.projected = self.left.T @ self.residuals

    def fit(self, strength: float | None) -> NearFit:
        """The parameters for this strength, or for the one of the smallest held-out loss (the
        strongest where several are equal)."""
        if strength is None and len(self.residuals) < 2:  # nothing could be held out
            strength = math.inf
        tried = FINE_STRENGTHS if strength is None else (strength,)
        losses = {one: self.held_out(one) for one in tried}
        chosen = min(losses, key=lambda one: float(losses[one].mean()))
        return NearFit(self.whole(chosen).float(), chosen, losses[chosen])

    def _shrunk(self, strength: float) -> Tensor:
        """s²/(s² + Rλ) of every singular value s."""
        squares = self.values.square()
        total = squares + len(self.residuals) * strength
        return torch.where(total > 0, squares / total.where(total > 0, 1.0), 0.0)

    def held_out(self, strength: float) -> Tensor:
        """The loss of each record under the fit without it, (N,)."""
        if strength == math.inf:
            return 0.5 * self.residuals.square()
        shrunk = self._shrunk(strength)
        left = 1 - self.left.square() @ shrunk
        errors = (self.residuals - self.left @ (shrunk * self.projected)) / left
        # A record that the fit follows exactly says nothing of others.
        found: Tensor = (0.5 * errors.square()).where(left > 1e-9, math.inf)
        return found

    def whole(self, strength: float) -> Tensor:
        """The parameters that are fitted to all records."""
        if strength == math.inf:
            return self.centre
        safe = self.values.where(self.values > 1e-12, math.inf)
        found: Tensor = self.right.T @ (self._shrunk(strength) / safe * self.projected)
        return self.centre + found


@dataclass(frozen=True)
class _Stack:
    """Sites side by side, each with its folds: features (S, N, D), labels (S, N), weights of the
    fitted records (S, F + 1, N), of which the last row is all records, and held-out records
    (S, F, N)."""

    task: Task
    features: Tensor
    labels: Tensor
    fitted: Tensor
    held: Tensor
    sizes: list[int]
    centre: Tensor

    @classmethod
    def of(cls, task: Task, sites: Sequence[SiteRows], centre: Tensor) -> _Stack:
        """Padded to the longest site with records of weight 0."""
        sizes = [len(rows) for rows in sites]
        longest = max(sizes)
        small = max(rows.features.numel() for rows in sites) <= DOUBLE
        exact = task.convex and small and centre.device.type == "cpu"
        dtype = torch.float64 if exact else torch.float32
        pad = [torch.arange(longest).clamp_max(size - 1) for size in sizes]
        features = torch.stack([r.features[p] for r, p in zip(sites, pad, strict=True)])
        labels = torch.stack([r.labels[p] for r, p in zip(sites, pad, strict=True)])
        folds = FOLDS if small or max(sizes) <= MANY else 1
        held = torch.zeros(len(sites), folds, longest, dtype=torch.bool)
        real = torch.zeros(len(sites), longest, dtype=torch.bool)
        for k, size in enumerate(sizes):
            real[k, :size] = True
            order = torch.from_numpy(np.random.default_rng(0).permutation(size))
            for fold, part in enumerate(order.tensor_split(FOLDS)[:folds]):
                held[k, fold, part] = size > 1
        fitted = torch.cat([real[:, None] & ~held, real[:, None]], dim=1).to(dtype)
        fitted /= fitted.sum(2, keepdim=True)
        numbers = labels.to(dtype) if labels.is_floating_point() else labels
        made = task.prepare(features.to(dtype))
        where = centre.device
        made, numbers = made.to(where), numbers.to(where)
        return cls(task, made, numbers, fitted.to(where), held.to(where), sizes, centre.to(dtype))

    def fits(self, strength: float | None) -> list[NearFit]:
        """The fit of each site, for this strength or for the best one."""
        path = _path_to(strength)
        sites, folds, _ = self.fitted.shape
        params = self.centre.expand(sites, folds, -1).clone()
        best = _Best(sites)
        for one in path:
            active = best.active if strength is None else torch.arange(sites)
            active = active.to(params.device)
            if one < math.inf and len(active):
                params[active] = self._solved(active, one, params[active])
            if strength is None or one == strength:
                best.add(one, active, self._held_out(params), params[:, -1])
        return [
            NearFit(best.params[k].float(), best.strength[k], best.losses[k][:size])
            for k, size in enumerate(self.sizes)
        ]

    def _held_out(self, params: Tensor) -> Tensor:
        """The loss of each record under the fit of its fold, (S, N); NaN for the others."""
        with torch.no_grad():
            over_folds = vmap(self.task.losses, in_dims=(0, None, None))
            losses = vmap(over_folds)(params[:, :-1], self.features, self.labels).double()
        some = losses.where(self.held, 0.0).sum(1)
        return some.where(self.held.any(1), math.nan)

    def _solved(self, active: Tensor, strength: float, start: Tensor) -> Tensor:
        """The minima of some sites and all their folds, from ``start`` (A, F, P)."""

        def objective(w: Tensor, features: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
            near = 0.5 * strength * (w - self.centre).square().sum()
            return weight @ self.task.losses(w, features, labels) + near

        each = vmap(vmap(grad_and_value(objective), in_dims=(0, None, None, 0)))
        given = self.features[active], self.labels[active], self.fitted[active]

        def evaluate(flat: Tensor) -> tuple[Tensor, Tensor]:
            gradients, values = each(flat.view(start.shape), *given)
            return values.flatten(), gradients.flatten(0, 1)

        return minimise(evaluate, start.flatten(0, 1)).view(start.shape)


def _path_to(strength: float | None) -> tuple[float, ...]:
    """The strengths to solve for, each from the one before; None: all that are tried."""
    if strength is None:
        return STRENGTHS
    return (*(one for one in STRENGTHS if one > strength), strength)


@dataclass
class _Best:
    """The best strength of each site so far, and who still improves."""

    sites: int
    strength: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    risen: list[int] = field(default_factory=list)

    @property
    def active(self) -> Tensor:
        """The sites whose held-out loss has not risen too often."""
        if not self.risen:
            return torch.arange(self.sites)
        return torch.tensor([k for k, n in enumerate(self.risen) if n < PATIENCE], dtype=torch.long)

    def add(self, strength: float, active: Tensor, losses: Tensor, params: Tensor) -> None:
        """What a strength gave; a site without a held-out record keeps the first one."""
        if not self.risen:
            self.strength, self.risen = [strength] * self.sites, [0] * self.sites
            self.losses, self.params = list(losses), list(params.clone())
            return
        for k in active.tolist():
            if float(losses[k].nanmean()) < float(self.losses[k].nanmean()):
                self.strength[k], self.losses[k] = strength, losses[k]
                self.params[k], self.risen[k] = params[k].clone(), 0
            else:
                self.risen[k] += 1


def minimise(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, steps: int = STEPS
) -> Tensor:
    """Minimise many functions side by side by L-BFGS, from ``start`` (U, P).

    ``evaluate(points)`` gives the values (U,) and the gradients (U, P). No value ever rises: a step
    that would is halved, and a function whose steps fail stays where it is.

    >>> ends = minimise(lambda x: (x.square().sum(1), 2 * x), torch.ones(2, 3))
    >>> bool((ends.abs() < 1e-3).all())
    True
    """
    point = start
    value, gradient = evaluate(point)
    moves: list[Tensor] = []
    turns: list[Tensor] = []
    still = torch.zeros(len(start), dtype=torch.bool, device=start.device)
    for _ in range(steps):
        direction = -_two_loops(gradient, moves, turns)
        slope = (direction * gradient).sum(1)
        downhill = slope < 0
        direction = direction.where(downhill[:, None], -gradient)
        slope = slope.where(downhill, -gradient.square().sum(1))
        size = torch.ones_like(value)
        if not moves:
            size = size / gradient.norm(dim=1).clamp_min(1.0)
        found, taken = _line_search(evaluate, point, value, direction, slope, size, still)
        new_value, new_gradient = found
        new_point = point + taken[:, None] * direction
        fallen = value - new_value
        moves, turns = (
            [*moves, new_point - point][-PAIRS:],
            [*turns, new_gradient - gradient][-PAIRS:],
        )
        still = still | (fallen <= 1e-8 * value.abs().clamp_min(1e-3))
        point, value, gradient = new_point, new_value, new_gradient
        if bool(still.all()):
            break
    return point


def _line_search(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    point: Tensor,
    value: Tensor,
    direction: Tensor,
    slope: Tensor,
    size: Tensor,
    still: Tensor,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Values and gradients after a step that lowers each value enough, and the steps (U,); 0 where
    none was found or a function stands still."""
    size = size.where(~still, 0.0)
    for _ in range(6):
        found = evaluate(point + size[:, None] * direction)
        fine = (found[0] <= value + 1e-4 * size * slope) & found[1].isfinite().all(1)
        if bool(fine.all()):
            return found, size
        size = size.where(fine, 0.5 * size)
    size = size.where(fine, 0.0)
    return evaluate(point + size[:, None] * direction), size


def _two_loops(gradient: Tensor, moves: Sequence[Tensor], turns: Sequence[Tensor]) -> Tensor:
    """The inverse Hessian of L-BFGS times the gradients, (U, P)."""
    result = gradient.clone()
    used = []
    for move, turn in zip(reversed(moves), reversed(turns), strict=True):
        curvature = (move * turn).sum(1)
        good = curvature > 1e-10 * turn.square().sum(1)
        factor = torch.where(good, 1 / curvature.where(good, 1.0), 0.0)
        alpha = factor * (move * result).sum(1)
        result = result - alpha[:, None] * turn
        used.append((move, turn, factor, alpha))
    if moves:
        scale = (moves[-1] * turns[-1]).sum(1) / turns[-1].square().sum(1).clamp_min(1e-30)
        result = result * scale.where(scale > 0, 1.0)[:, None]
    for move, turn, factor, alpha in reversed(used):
        beta = factor * (turn * result).sum(1)
        result = result + (alpha - beta)[:, None] * move
    return result
