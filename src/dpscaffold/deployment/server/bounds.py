"""How large an honest upload can be: a public bound, above which a server uses no upload.

With d_k = y_k − x, a step is d_{k+1} = (1 − η(λ + μ))·d_k − η(H_k + ξ_k + λx + c − c_i), where
H_k is a mean of clipped gradients, ‖H_k‖ ≤ C, and ξ_k is noise of standard deviation s. So with
r = |1 − η(λ + μ)|

    ‖Δy‖ ≤ η·Σr^j·(C + λ‖x‖ + ‖c − c_i‖) + η·√(Σr^2j)·s·‖ζ‖,

where ζ is standard normal and ‖ζ‖ ≤ √P + √(2t) but for a chance of e^−t (Laurent and Massart 2000).
Everything in it is known to the server, so refusing a larger upload tells nobody anything, and
what is done with uploads costs no ε.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Broadcast, Local, Participant, Slots
from dpscaffold.algorithms.affine import affine
from dpscaffold.setting import Setting

#: The chance that any upload of a run in which all are honest is refused.
FALSE_ALARM = 1e-9
#: For the rounding of float32 sums.
_SLACK = 1.001
#: A round may be asked again, with noise that is drawn again: at most so often in the mean.
_ASKED = 16


@dataclass(frozen=True)
class _Reach:
    """How far K honest steps can go: ‖y − x‖ and the norm of the mean gradient."""

    move: float
    gradient: float


def upload_bounds(
    setting: Setting, phase: Algorithm, broadcast: Broadcast, user: int, slots: Slots
) -> Mapping[str, float] | None:
    """The largest norm of each vector of a user's honest upload, by the names that uploads have;
    None where none is known: without privacy, with a clip bound computed from the batch, and for
    algorithms whose steps are not known.

    Args:
        setting: The run.
        phase: What the algorithm does in this round.
        broadcast: What the participants were sent.
        user: The user's number.
        slots: What the server knows of the user's memory, (1, P) each.
    """
    reach_of = _reach(setting, phase, broadcast, user, slots)
    if reach_of is None:
        return None
    at, reach = reach_of
    x = broadcast.params[None]
    unit = torch.full_like(x, 1 / math.sqrt(x.shape[1]))
    still, moved, steep = (
        _vectors(phase, Local(x + move * unit, gradient * unit), at)
        for move, gradient in ((0.0, 0.0), (reach.move, 0.0), (0.0, reach.gradient))
    )
    bounds = {}
    for name, start in still.items():  # of each a constant, and what grows with either norm
        grown = float((moved[name] - start).norm() + (steep[name] - start).norm())
        bounds[name] = _SLACK * (float(start.norm()) + grown) + 1e-6
    return bounds


def _vectors(phase: Algorithm, local: Local, at: Participant) -> dict[str, Tensor]:
    upload, kept = phase.finish(local, at)
    found = {"params": upload.params}
    for name, value in upload.totals.items():
        if phase.mirrored and name in kept:
            found[f"kept.{name}"] = kept[name]
        else:
            found[f"totals.{name}"] = value
    return found


def _reach(
    setting: Setting, phase: Algorithm, broadcast: Broadcast, user: int, slots: Slots
) -> tuple[Participant, _Reach] | None:
    privacy, plan = setting.privacy, setting.plan
    if privacy is None or isinstance(privacy.clip, str) or phase.private:
        return None
    known = setting.known([user], broadcast.round)
    shared = {name: value[None] for name, value in broadcast.shared.items()}
    at = Participant(Broadcast(broadcast.round, broadcast.params[None], shared), slots, known)
    form = affine(phase, at)
    if form is None or known.spread is None:
        return None
    steps, size, spread = (
        float(torch.as_tensor(v)) for v in (known.steps, known.step_size, known.spread)
    )
    chances = _ASKED * plan.rounds * setting.cohort_size * (steps + 2)
    t = math.log(chances / FALSE_ALARM)
    noise = spread * (math.sqrt(broadcast.params.numel()) + math.sqrt(2 * t))
    clipped = float(privacy.clip) * _crowd(setting, user, t)
    clipped *= 1 if phase.sums is None else 2  # two records of a bounded sum are 2C apart
    at_x = clipped + plan.regularisation * float(broadcast.params.norm())
    shift = 0.0 if form.shift is None else float(form.shift.norm())
    rate = abs(1 - size * (plan.regularisation + float(form.pull)))
    sums = [sum(rate ** (p * j) for j in range(int(steps))) for p in (1, 2)]
    move = size * (sums[0] * (at_x + shift) + math.sqrt(sums[1]) * noise) if form.moves else 0.0
    farthest = move * max(1.0, rate**steps)
    gradient = at_x + plan.regularisation * farthest + noise / math.sqrt(steps)
    return at, _Reach(move, gradient)


def _crowd(setting: Setting, user: int, t: float) -> float:
    """How many times more records than planned a batch has at most: those of a Poisson batch vary,
    but for a chance of e^−t by no more than √(2bt) + t (Bernstein)."""
    privacy = setting.privacy
    if privacy is None or privacy.sampling != "poisson" or privacy.unit == "user":
        return 1.0
    planned = float(setting.batch_sizes[user])
    return (planned + math.sqrt(2 * planned * t) + t) / planned
