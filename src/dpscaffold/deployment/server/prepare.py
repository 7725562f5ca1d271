"""Preparation that is fitted at the sites: one run of one round for each step, before the training.

Such a run is like any other: sites judge its offer by their policy, record it in their ledgers
before they compute, add their own noise, and with ``[secure]`` mask their sums. Its folder stands
next to that of the training, so that a server which was killed takes it up again. What it fits goes
into the offer of the training, as constants with their cost.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dpscaffold.config import Run
from dpscaffold.data.preparation import leading_components
from dpscaffold.data.preprocessing import FittedStep, Pca
from dpscaffold.deployment.protocol.agreement import Offer, fitting_cost
from dpscaffold.deployment.protocol.steps import Fitted
from dpscaffold.tasks.moments import MomentSums


def with_fitted(
    offer: Offer, place: int, setting: Run, params: Tensor, participations: Sequence[int]
) -> Offer:
    """The offer of the training with the step that a finished run has fitted.

    Args:
        offer: The offer of the training.
        place: The place of the step.
        setting: The run that fitted it.
        params: The noised sums.
        participations: How often each site took part in that run.
    """
    step = offer.rows.prepare[place]
    assert isinstance(step, FittedStep)
    cost = fitting_cost(offer.secure, offer.privacy, step, setting.users, max(1, *participations))
    made = fitted_step(step, setting, params)
    return offer.fitted(place, made.model_copy(update={"spent": cost}))


def fitted_step(step: FittedStep, setting: Run, params: Tensor) -> Fitted:
    """A fitted step with its constants, from the noised sums."""
    task = setting.task
    assert isinstance(task, MomentSums)
    if isinstance(step, Pca):
        basis = leading_components(task.matrix(params), step.components)
        text = base64.b64encode(np.ascontiguousarray(basis.T, "<f4").tobytes()).decode()
        return Fitted(step="fitted", basis=text, components=step.components)
    mean = task.mean(params)
    if task.kind == "mean":
        return Fitted(step="fitted", mean=_plain(mean))
    variance = task.squares(params) - mean**2
    # A variance that the noise drowns is worth its noise level, which is public.
    deviation = np.sqrt(np.maximum(variance, _level(setting, task)))
    return Fitted(step="fitted", mean=_plain(mean), factor=_plain(1 / deviation))


def _level(setting: Run, task: MomentSums) -> float:
    """The standard deviation of the noise on the mean of a square."""
    assert setting.privacy is not None
    each = 2 * task.bound * setting.privacy.noise
    return task.square_noise(each * math.sqrt(setting.users) / float(setting.sizes.sum()))


def _plain(values: np.ndarray) -> tuple[float, ...]:
    return tuple(values.astype(np.float32).astype(float).tolist())
