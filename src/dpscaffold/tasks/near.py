"""Fit parameters to the records of one site, near given ones: (1/R)Σf_j(w) + (λ/2)‖w − x‖².

λ is the strength. It is chosen by the loss of records that were not fitted: leave-one-out in closed
form for a linear model with the squared loss, cross-validation otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits
from torch import Tensor

from dpscaffold.errors import BadInput
from dpscaffold.tasks.base import Task
from dpscaffold.tasks.linear import Linear
from dpscaffold.tasks.losses import LOSSES

#: The strengths that are tried, strongest first; ∞ leaves the given parameters as they are.
STRENGTHS = (math.inf, 100.0, 10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)
#: The same for closed forms, where a strength costs almost nothing.
FINE_STRENGTHS = (math.inf, *(10.0 ** (k / 2) for k in range(4, -11, -1)))
#: Records up to which every record is held out once; above, a fifth is held out once.
MANY, FOLDS = 1000, 5
#: Steps of the solver.
STEPS = 40
#: A weaker strength is not tried any more once the held-out loss has risen this often.
PATIENCE = 2
#: How many standard errors a fit that forgets the common model must be better.
DOUBT = 0.25


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
    fitted.
    """

    params: Tensor
    strength: float
    held_out: Tensor

    @property
    def loss(self) -> float:
        """The mean loss of records that were not fitted; NaN where none was held out."""
        return float(self.held_out.nanmean()) if len(self.held_out) else math.nan


def fit_sites(
    task: Task, sites: Sequence[SiteRows], centre: Tensor, strength: float | None = None
) -> list[NearFit]:
    """Parameters for the records of each site, near ``centre`` (P,); no site's fit depends on
    another's records.

    Args:
        task: The model and its loss.
        sites: The records of each site.
        centre: The parameters to stay near, such as those of the common model; their device does
            the work.
        strength: λ, 0 or more; None chooses it by the loss of records that are held out.

    >>> from dpscaffold.tasks.losses import LOSSES
    >>> task = Linear(features=1, outputs=1, loss=LOSSES["squared"])
    >>> rows = SiteRows(torch.tensor([[1.0], [-1.0]]), torch.tensor([3.0, -1.0]))
    >>> fit_sites(task, [rows], torch.zeros(2), strength=1.0)[0].params.tolist()
    [1.0, 0.5]
    """
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
    with threadpool_limits(1, "blas"):  # its threads and PyTorch's would wait for each other
        return [_Fits(task, rows, centre).fit(strength) for rows in sites]


def better_of(fits: Sequence[NearFit]) -> NearFit:
    """The first fit, or a later one where its held-out loss is smaller by more than a quarter of
    the standard error of the difference (:data:`DOUBT`)."""
    best, *others = fits
    for other in others:
        gain = best.held_out - other.held_out
        gain = gain[gain.isfinite()]
        if len(gain) > 1 and float(gain.mean()) > DOUBT * float(gain.std()) / math.sqrt(len(gain)):
            best = other
    return best


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


class _Fits:
    """Fits of one site by L-BFGS, from strong to weak: each begins where the stronger one ended.

    ``parts`` are the records that are held out, one set for each fold. Convex losses are minimised
    in float64 on CPUs.
    """

    def __init__(self, task: Task, rows: SiteRows, centre: Tensor) -> None:
        exact = task.convex and centre.device.type == "cpu"
        self.task, self.centre = task, centre.double() if exact else centre.float()
        made = task.prepare(rows.features.to(self.centre.dtype)).to(centre.device)
        numbers = rows.labels.to(centre.device)
        if numbers.is_floating_point():
            numbers = numbers.to(self.centre.dtype)
        self.rows = SiteRows(made, numbers)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(rows)))
        folds = FOLDS if len(rows) <= MANY else 1
        self.parts = order.tensor_split(FOLDS)[:folds] if len(rows) > 1 else ()

    def fit(self, strength: float | None) -> NearFit:
        """The parameters for this strength, or for the one of the smallest held-out loss."""
        if strength is not None:
            return [*self._path([*(one for one in STRENGTHS if one > strength), strength])][-1]
        fits = self._path(STRENGTHS if self.parts else STRENGTHS[:1])
        best, risen = next(fits), 0
        for found in fits:
            best, risen = (found, 0) if found.loss < best.loss else (best, risen + 1)
            if risen == PATIENCE:
                break
        return best

    def _path(self, strengths: Sequence[float]) -> Iterator[NearFit]:
        """A fit for each strength; without the folds' held-out records, and with all records."""
        every = torch.arange(len(self.rows))
        kept = [every[~torch.isin(every, part)] for part in self.parts]
        starts = [self.centre] * (len(kept) + 1)
        for strength in strengths:
            if strength < math.inf:
                fitted = zip([*kept, every], starts, strict=True)
                starts = [self._solved(self.rows.some(k), strength, w) for k, w in fitted]
            yield NearFit(starts[-1].float(), strength, self._held_out(starts))

    def _held_out(self, params: Sequence[Tensor]) -> Tensor:
        """The loss of each record under the fit of its fold, (N,); NaN for the others."""
        losses = torch.full((len(self.rows),), math.nan, dtype=torch.float64)
        for part, w in zip(self.parts, params, strict=False):
            rows = self.rows.some(part)
            with torch.no_grad():
                losses[part] = self.task.losses(w, rows.features, rows.labels).double().cpu()
        return losses

    def _solved(self, rows: SiteRows, strength: float, start: Tensor) -> Tensor:
        """The minimum for these records, from ``start`` (P,)."""

        def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
            w = torch.from_numpy(point).to(self.centre).requires_grad_()
            near = 0.5 * strength * (w - self.centre).square().sum()
            value = self.task.losses(w, rows.features, rows.labels).mean() + near
            (gradient,) = torch.autograd.grad(value, w)
            return float(value.detach()), gradient.double().cpu().numpy()

        given = start.double().cpu().numpy()
        end = minimize(objective, given, jac=True, method="L-BFGS-B", options={"maxiter": STEPS})
        return torch.from_numpy(end.x).to(self.centre) if np.isfinite(end.x).all() else start
