"""How large an honest upload can be: a public bound, above which a server uses no upload.

With d_k = y_k − x, a step is d_{k+1} = (1 − η(λ + μ))·d_k − η(H_k + ξ_k + λx + c − c_i), where
H_k is a mean of clipped gradients, ‖H_k‖ ≤ C, and ξ_k is noise of standard deviation s. So with
r = |1 − η(λ + μ)|

    ‖Δy‖ ≤ η·Σr^j·(C + λ‖x‖ + ‖c − c_i‖) + η·√(Σr^2j)·s·‖ζ‖,

where ζ is standard normal and ‖ζ‖ ≤ √P + √(2t) but for a chance of e^−t (Laurent and Massart 2000).
Everything in it is known to the server, so refusing a larger upload tells nobody anything, and
what is done with uploads costs no ε.

A mean-regularised user steps on a model of its own, w ← w − η(g_k + ρ(w − x)) with its pull ρ and
g_k = H_k + λw + ξ_k, and uploads what the base algorithm makes of the mean of all g_k; the pull is
not in it. Where η(λ + ρ) ≤ 1 a step is a weighted mean of w, of x and of −(H_k + ξ_k)/λ, so with
X the largest ‖x‖ that was ever sent, and all ‖ξ_k‖ ≤ n,

    λ‖w‖ ≤ max(λX, C + n),  ‖mean g_k‖ ≤ C + max(λX, C + n) + n/√K.

The server never sees w, and needs not. Without λ nothing of it is left but C + n/√K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpscaffold.algorithms import (
    Algorithm,
    Broadcast,
    Known,
    Local,
    Participant,
    Slots,
    Upload,
)
from dpscaffold.algorithms.base import FAST_FIELDS, Affine, AffineDirection, Partial
from dpscaffold.algorithms.fedprox import Proximal
from dpscaffold.algorithms.mean_regularised import (
    FIRST,
    common_move,
    keep_own,
    measured_move,
    own_start,
    pulled_by_noise,
)
from dpscaffold.config import Run

#: The chance that any upload of a run in which all are honest is refused.
FALSE_ALARM = 1e-9
#: For the rounding of float32 sums.
_SLACK = 1.001
#: How an upload grows with a move is the same for every direction, so it is looked at with a move
#: along this many of the parameters; only an algorithm of one's own may know how many there are.
_ENOUGH = 64
#: The fields of an algorithm that are taken into account: steps may begin anywhere.
KNOWN = FAST_FIELDS | {"begin_at"}
#: A round may be asked again, with noise that is drawn again: at most this often in the mean.
_ASKED = 16


@dataclass(frozen=True)
class _Reach:
    """How far K honest steps can go: ‖y − x‖ and the norm of the mean gradient."""

    move: float
    gradient: float


@dataclass(frozen=True)
class _Norms:
    """Bounds of one participation: ``clipped`` of a mean of clipped gradients, ``noise`` of the
    noise of each step, K ``steps`` and their ``size``."""

    clipped: float
    noise: float
    steps: float
    size: float


def upload_bounds(
    setting: Run,
    phase: Algorithm,
    broadcast: Broadcast,
    slots: Mapping[int, Slots],
    farthest: float | None = None,
) -> dict[int, Mapping[str, float] | None]:
    """The largest norm of each vector of an honest upload, by the names that uploads have, for each
    user; None where none is known: without privacy, with a clip bound computed from the batch, and
    for algorithms whose steps are not known.

    Args:
        setting: The run.
        phase: What the algorithm does in this round.
        broadcast: What the participants were sent.
        slots: What the server knows of the users' memories by their numbers, (1, P) each.
        farthest: The largest norm of the parameters that were ever sent in this run, if it is
            known. Users with a model of their own may still be where they were sent then.
    """
    known = setting.known(tuple(slots), broadcast.round)
    shared = {name: value[None] for name, value in broadcast.shared.items()}
    sent = Broadcast(broadcast.round, broadcast.params[None], shared)
    bounds: dict[int, Mapping[str, float] | None] = {}
    for place, (user, memory) in enumerate(slots.items()):
        at = Participant(sent, memory, _of_one(known, place))
        bounds[user] = _bounds_of_user(setting, phase, at, user, farthest)
    return bounds


def _of_one(known: Known, place: int) -> Known:
    """The numbers of one of the users that ``known`` is of."""
    numbers = {
        name: value[place : place + 1] if isinstance(value, Tensor) else value
        for name, value in vars(known).items()
    }
    return Known(**numbers)


def _bounds_of_user(
    setting: Run, phase: Algorithm, at: Participant, user: int, farthest: float | None
) -> dict[str, float] | None:
    norms = _norms(setting, at, user, phase)
    if norms is None:
        return None
    if phase.private:
        return _of_own_models(setting, phase, at, norms, farthest)
    reach = _reach(setting, phase, at, norms)
    return None if reach is None else _bounds(setting, phase, at, reach)


def _bounds(setting: Run, phase: Algorithm, at: Participant, reach: _Reach) -> dict[str, float]:
    part = at if ":" in setting.algorithm.name else _first(at, _ENOUGH)
    x = part.broadcast.params
    unit = torch.full_like(x, 1 / math.sqrt(x.shape[1]))
    looked_at = ((0.0, 0.0), (reach.move, 0.0), (0.0, reach.gradient))
    made = [phase.finish(Local(x + move * unit, grad * unit), part) for move, grad in looked_at]
    still, moved, steep = (_vectors(phase, *one) for one in made)
    x = at.broadcast.params
    start = still
    if part is not at:
        start = _vectors(phase, *phase.finish(Local(x, torch.zeros_like(x)), at))
    bounds = {}
    for name, here in still.items():  # of each a constant, and what grows with either norm
        grown = float((moved[name] - here).norm() + (steep[name] - here).norm())
        bounds[name] = _SLACK * (float(start[name].norm()) + grown) + 1e-6
    return bounds


def _first(at: Participant, count: int) -> Participant:
    """A participant of a model of its first ``count`` parameters; itself where it has no more."""
    size = at.broadcast.params.shape[-1]
    if size <= count:
        return at

    def cut(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {k: v[..., :count] if v.shape[-1] == size else v for k, v in values.items()}

    x, shared = at.broadcast.params[..., :count], cut(at.broadcast.shared)
    return Participant(Broadcast(at.broadcast.round, x, shared), cut(at.memory), at.known)


def _vectors(phase: Algorithm, upload: Upload, kept: Slots) -> dict[str, Tensor]:
    found = {"params": upload.params}
    for name, value in upload.totals.items():
        if phase.mirrored and name in kept:
            found[f"kept.{name}"] = kept[name]
        else:
            found[f"totals.{name}"] = value
    return found


def _norms(setting: Run, at: Participant, user: int, phase: Algorithm) -> _Norms | None:
    """What clipping and noise allow; None where no public number bounds a gradient."""
    privacy, plan, known = setting.privacy, setting.plan, at.known
    if privacy is None or isinstance(privacy.clip, str) or known.spread is None:
        return None
    steps, size, spread = (
        float(torch.as_tensor(v)) for v in (known.steps, known.step_size, known.spread)
    )
    chances = _ASKED * plan.rounds * setting.cohort_size * (steps + 2)
    t = math.log(chances / FALSE_ALARM)
    noise = spread * (math.sqrt(at.broadcast.params.numel()) + math.sqrt(2 * t))
    clipped = float(privacy.clip) * _crowd(setting, user, t)
    clipped *= 1 if phase.sums is None else 2  # two records of a bounded sum are 2C apart
    return _Norms(clipped, noise, steps, size)


def _reach(setting: Run, phase: Algorithm, at: Participant, norms: _Norms) -> _Reach | None:
    form, decay = phase.form(at), setting.plan.regularisation
    if form is None:
        return None
    at_x = norms.clipped + decay * float(at.broadcast.params.norm())
    shift = 0.0 if form.shift is None else float(form.shift.norm())
    rate = abs(1 - norms.size * (decay + float(form.pull)))
    sums = [sum(rate ** (p * j) for j in range(int(norms.steps))) for p in (1, 2)]
    far = norms.size * (sums[0] * (at_x + shift) + math.sqrt(sums[1]) * norms.noise)
    move = far if form.moves else 0.0
    farthest = move * max(1.0, rate**norms.steps)
    gradient = at_x + decay * farthest + norms.noise / math.sqrt(norms.steps)
    return _Reach(move, gradient)


def _of_own_models(
    setting: Run, phase: Algorithm, at: Participant, norms: _Norms, farthest: float | None
) -> dict[str, float] | None:
    """The bounds where a user steps on a model of its own, which the server does not know."""
    base, form = _base_of(phase), phase.form(at, KNOWN)
    if base is None or form is None:
        return None
    decayed = _decayed(setting, form, norms, farthest)
    if decayed is None:
        return None
    gradient = norms.clipped + decayed + norms.noise / math.sqrt(norms.steps)
    bounds = _bounds(setting, base, at, _Reach(0.0, gradient))
    if isinstance(form.pull, Tensor):
        first = float(at.broadcast.round == 1)
        spread = float(torch.as_tensor(at.known.spread)) ** 2 * norms.steps
        most = {
            "first_square": bounds["params"] ** 2,
            "first_noise": norms.size**2 * spread * at.broadcast.params.numel(),
            "first_spread": spread,
            "first_count": 1.0,
        }
        told = {name: first * most[name] for name in FIRST if name in most}
        bounds |= {f"totals.{name}": _SLACK * value + 1e-6 for name, value in told.items()}
    return bounds


def _decayed(setting: Run, form: Affine, norms: _Norms, farthest: float | None) -> float | None:
    """The largest λ‖w‖; None where it is not known how far w may be."""
    decay = setting.plan.regularisation
    if not decay:
        return 0.0
    if farthest is None:
        return None
    largest = setting.settled.step_size  # no schedule ever goes above it
    # λ = "auto" is a tensor, and in proportion to 1/η of this round.
    size = norms.size if isinstance(form.pull, Tensor) else largest
    if not largest * decay + size * float(form.pull) <= 1:
        return None
    return max(decay * farthest, norms.clipped + norms.noise)


def _base_of(phase: Algorithm) -> Algorithm | None:
    """What a mean-regularised algorithm uploads, as an algorithm whose ``finish`` needs the mean
    gradient alone; None for any other with private memory."""
    direction: object = phase.direction
    keep: Any = phase.finish
    known = phase.begin_at is own_start and not phase.in_use_beyond(KNOWN)
    if not known or type(direction) is not AffineDirection or not _calls(keep_own, keep):
        return None
    (move,) = keep.first
    if _calls(measured_move, move) and direction.form is pulled_by_noise:
        (move,) = move.first
    elif type(direction.form) is not Proximal:
        return None
    if not _calls(common_move, move):
        return None
    return Algorithm(phase.name, direction, move, phase.update, mirrored=phase.mirrored)


def _calls(function: object, value: object) -> bool:
    return type(value) is Partial and value.function is function


def _crowd(setting: Run, user: int, t: float) -> float:
    """How many times more records than planned a batch has at most: those of a Poisson batch vary,
    but for a chance of e^−t by no more than √(2bt) + t (Bernstein)."""
    privacy = setting.privacy
    if privacy is None or privacy.sampling != "poisson" or privacy.unit == "user":
        return 1.0
    planned = float(setting.batch_sizes[user])
    return (planned + math.sqrt(2 * planned * t) + t) / planned
