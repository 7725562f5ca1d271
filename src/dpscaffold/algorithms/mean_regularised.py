"""A model for each user while training: min Σ_i F_i(w_i) + (λ/2)‖w_i − x‖² (MR-MTL, Liu et al.
2022).

User i keeps its own w_i. A participation begins there and takes the K noised steps
w_i ← w_i − η_l(H̃_i^k + λ(w_i − x)). The pull is added **after** the noise, from what the server
sent and from noised gradients alone, so that ε is that of the same steps without it. x moves by the
same noised gradients, as the base algorithm does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from dpscaffold.algorithms.balanced import along_balanced
from dpscaffold.algorithms.base import (
    FAST_FIELDS,
    Affine,
    AffineDirection,
    Algorithm,
    Announce,
    Cohort,
    Direction,
    Finish,
    Local,
    Partial,
    Participant,
    Server,
    Size,
    Slots,
    Update,
    Upload,
)
from dpscaffold.algorithms.fedavg import along_gradient
from dpscaffold.algorithms.fedprox import Proximal
from dpscaffold.algorithms.scaffold import along_corrected
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

#: A user's own model, and how often it took part. They never leave the user.
OWN: dict[str, Size] = {"personal": "vector", "joined": "number"}
#: With λ = "auto" also the variance of the noise on each coordinate of w_i, a public number.
OWN_NOISE: dict[str, Size] = {"own_noise": "number"}
#: What λ = "auto" is estimated from: means over all users of ‖Δy_i‖², of the noise in it, of the
#: noise in a coordinate of the sum of K gradients and of 1, over the participants of the first
#: round, and the square of the norm of their mean Δy.
FIRST: dict[str, Size] = {
    "first_square": "number",
    "first_noise": "number",
    "first_spread": "number",
    "first_count": "number",
    "first_centre": "number",
}
#: The largest λ, in units of 1/(η_l·K): a participation leaves about e⁻² of w_i − x. A stronger
#: pull would start every step at x, so that K steps were worth one.
MOST = 2.0


def own_start(at: Participant) -> Tensor:
    """w_i; x for a user that takes part for the first time."""
    return at.memory["personal"].where(at.memory["joined"] > 0, at.broadcast.params)


def pulled_by_noise(at: Participant) -> Affine:
    """λ = "auto" of a participation: (v_i/ζ²)/(η_l·K), where v_i is the variance of the noise on
    this user's own Δy_i and ζ² the spread of Δy_i between users that is not noise; at most
    :data:`MOST`/(η_l·K), and never beyond x. Users with little noise are pulled little.

    For a quadratic loss of curvature h the error of w_i is about η_l·s²/(2(h + λ)) from noise of
    variance s² on each step, and (λ/(h + λ))²τ² from the pull. It is smallest near
    λ = η_l·s²/(4τ²); with τ² = ζ²/(η_l·K·h)² and h of the order 2/(η_l·K), the curvature that
    K steps can see, that is this λ.
    """
    known, noisy = at.known, at.broadcast.shared["pull"]
    usual = at.broadcast.shared["pull_noise"].square()  # 0 before the first round, or without noise
    own = usual.new_ones(usual.shape) * known.variance * known.steps
    louder = (own / usual).where(usual > 0, 1.0)
    ratio = (noisy / (1 - noisy) * louder).clamp_max(MOST)
    return Affine(pull=(ratio / known.steps).clamp_max(1.0) / known.step_size)


def common_move(
    direction: Direction, finish: Finish, local: Local, at: Participant
) -> tuple[Upload, Slots]:
    """What the base algorithm would upload and keep of the same noised gradients:
    Δy_i = −η_l·K·(their mean, with the base's correction). Of the mean gradient alone."""
    x, known = at.broadcast.params, at.known
    moved = known.step_size * known.steps * direction(local.mean_gradient, x, at)
    return finish(Local(x - moved, local.mean_gradient), at)


def keep_own(move: Finish, local: Local, at: Participant) -> tuple[Upload, Slots]:
    """The common move, and w_i ← w_i^K."""
    upload, kept = move(local, at)
    return upload, {**kept, "personal": local.params, "joined": at.memory["joined"] + 1}


def measured_move(move: Finish, local: Local, at: Participant) -> tuple[Upload, Slots]:
    """The common move of λ = "auto": what λ is estimated from goes up in the first round, and the
    noise of w_i is kept. All of it functions of Δy_i and public numbers; the sums are zero after
    the first round."""
    upload, kept = move(local, at)
    known, joined = at.known, at.memory["joined"]
    first = joined.new_ones(joined.shape) * (at.broadcast.round == 1)
    spread = first * known.variance * known.steps
    measured = {
        "first_square": first * upload.params.square().sum(-1, keepdim=True),
        "first_noise": known.step_size**2 * spread * upload.params.shape[-1],
        "first_spread": spread,
        "first_count": first,
    }
    totals = {**upload.totals, **measured}
    return replace(upload, totals=totals), {**kept, "own_noise": _own_noise(at)}


def _own_noise(at: Participant) -> Tensor:
    """The variance on each coordinate of w_i after K steps, from that before. It is an upper bound
    for a convex loss, whose curvature shrinks the noise further."""
    known, before = at.known, at.memory["own_noise"]
    one = before.new_ones(before.shape)
    kept = one * (1 - known.step_size * pulled_by_noise(at).pull) ** 2
    whole = kept**known.steps
    times = ((1 - whole) / (1 - kept)).where(kept <= 1 - 1e-6, one * known.steps)
    return whole * before + known.step_size**2 * known.variance * times


def given_out(own: Slots, common: Tensor) -> Tensor:
    """The personal models (U, P) of users with these slots: w_i, and x for users that never took
    part.

    With λ = "auto" it is x + a_i(w_i − x) with a_i = τ²/(τ² + v_i), where v_i is the known noise of
    a coordinate of w_i and τ² what is left of the spread of all w_i without it, as James and Stein
    estimate it. Where all of it is noise, x is given out.
    """
    models, joined = own["personal"], own["joined"] > 0
    if "own_noise" in own:
        apart = (models - common).where(joined, 0.0)
        models = common + _shrinkage(apart, own["own_noise"], joined) * apart
    return models.where(joined, common)


def _shrinkage(apart: Tensor, noise: Tensor, joined: Tensor) -> Tensor:
    """a_i (U, 1), from w_i − x (U, P) and v_i (U, 1); users with little noise count most."""
    certain = joined & (noise > 0)
    weight = (1 / noise.where(certain, 1.0).double() ** 2).where(certain, 0.0)
    left = apart.double().square().mean(-1, keepdim=True) - noise
    signal = ((weight * left).sum() / weight.sum().clamp_min(1e-300)).clamp_min(0.0)
    shrunk = signal / (signal + noise).clamp_min(1e-300)
    return shrunk.where(noise > 0, 1.0).to(apart.dtype)


def announce_pull(base: Announce, server: Server, cohort: Cohort) -> Slots:
    """What the base announces, v/(v + ζ²) as estimated from the first round, 1 where all of the
    spread may be noise, and the deviation of the noise that v is the mean of, so that users can
    compare theirs with it.

    ζ² = mean‖Δy_i‖² − ‖mean Δy‖² − v, its positive part: the estimate of James and Stein, as for
    the trust in balanced controls.
    """
    square, noise, spread, count, centre = (server.slots[name].double() for name in FIRST)
    signal = ((square - noise) / count - centre).clamp_min(0.0)
    noisy = noise / count / (noise / count + signal)
    told = {
        "pull": noisy.where((count > 0) & (noise > 0), 0.0),
        "pull_noise": (spread / count).sqrt().where(count > 0, 0.0),
    }
    told = {name: value.to(server.params.dtype) for name, value in told.items()}
    return {**base(server, cohort), **told}


def update_measured(base: Update, server: Server, mean: Upload, rate: float) -> Server:
    """The base's update, and the sums over the first round; ‖mean Δy‖² is kept in the round that
    has sums."""
    centre = mean.params.square().sum().reshape(1).where(mean.totals["first_count"] > 0, 0.0)
    sums = {**mean.totals, "first_centre": centre}
    added = {name: server.slots[name] + sums[name] for name in FIRST}
    rest = {name: value for name, value in mean.totals.items() if name not in FIRST}
    moved = base(server, replace(mean, totals=rest), rate)
    return replace(moved, slots={**moved.slots, **added})


def mean_regularised(base: Algorithm, strength: float | Literal["auto"] = "auto") -> Algorithm:
    """An algorithm that trains a model for each user next to the common one.

    The base may be any whose direction is the noised gradient plus what stands still during a
    participation: FedAvg, SCAFFOLD, balanced controls. Their correction acts on the common model
    alone: on a user's own model it would remove what is personal.

    Args:
        base: The algorithm that moves the common model.
        strength: λ, 0 or more, or ``"auto"``: estimated from the uploads of the first round.

    >>> from dpscaffold import fedavg
    >>> mean_regularised(fedavg(), 0.5).numbers
    {'pull': 0.5}
    """
    fits = base.direction in (along_gradient, along_corrected, along_balanced)
    if not fits or base.in_use_beyond(FAST_FIELDS - {"warm_up"}):
        raise BadInput(
            "not-applicable",
            f"personal.kind is 'mean-regularised', and {base.shown} is no algorithm that it was "
            f"proved with; use FedAvg, SCAFFOLD or balanced controls without warm start, or "
            f"personal.kind = 'fine-tune'",
        )
    move = Partial(common_move, (base.direction, base.finish))
    changed = base.replace(
        begin_at=own_start,
        finish=Partial(keep_own, (move,)),
        remembers={**base.remembers, **OWN},
        private=(*base.private, *OWN),
        numbers={**base.numbers, "pull": strength},
        title=f"{base.shown}, mean-regularised",
    )
    if strength != "auto":
        return changed.replace(direction=AffineDirection(Proximal(strength)))
    return changed.replace(
        direction=AffineDirection(pulled_by_noise),
        finish=Partial(keep_own, (Partial(measured_move, (move,)),)),
        remembers={**changed.remembers, **OWN_NOISE},
        private=(*changed.private, *OWN_NOISE),
        announce=Partial(announce_pull, (base.announce,)),
        update=Partial(update_measured, (base.update,)),
        keeps={**base.keeps, **FIRST},
        noise_aware=True,
    )
