"""SCAFFOLD with balanced controls: drift correction that never pays for its own noise.

c_i is a mean of K *noised* gradients, so SCAFFOLD's correction c − c_i brings old noise back: over
a cohort S the aggregate contains c − c_S, as noisy as the fresh gradients are. Here the correction
is split, with c_S the cohort's mean control and c that of all users seen so far:

    correction of user i = (c_S − c_i) + a·(c − c_S)

The first part sums to zero over the cohort: it removes each user's drift, and its noise cancels in
the aggregate. The second is the same for all, a control variate for *which* users were drawn (as in
FedVARP, Jhunjhunwala et al. 2022); its mean over the draw is zero for every a, so a may be chosen
to minimise variance. a = 1 is SCAFFOLD.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dpscaffold.algorithms.base import (
    Affine,
    AffineDirection,
    Algorithm,
    Cohort,
    Local,
    Partial,
    Participant,
    Server,
    Size,
    Slots,
    Upload,
)
from dpscaffold.algorithms.scaffold_warm import stay
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

Trust = float | Literal["auto"]

#: What every user remembers, and of which the server keeps the mean over all M.
SLOTS: dict[str, Size] = {
    "control": "vector",
    "weight": "number",
    "square": "number",
    "noise": "number",
}


def spread_of(server: Server) -> tuple[Tensor, Tensor, Tensor]:
    """What the server knows of all controls: c, the mean of ‖c_i − c‖², and of the noise in it, all
    weighted as Δy is, over the users seen so far. Nobody seen: all zero.

    The numbers are float64 and stay where the controls are: nothing waits for a device.
    """
    weight, square, noise = (
        server.slots[name].double().reshape(()) for name in ("weight", "square", "noise")
    )
    weight = weight.where(weight > 0, 1.0)
    centre = server.slots["control"] / weight
    apart = (square / weight - centre.double().square().sum()).clamp_min(0.0)
    return centre, apart, noise * len(centre) / weight


def deserved_trust(square: Tensor, noise: Tensor) -> Tensor:
    """a = max(0, 1 − v̄P / mean‖c_i − c‖²), the positive part of James and Stein's estimate of
    ζ²/(ζ² + vP): how much of the spread between users is not noise. Without noise it is 1."""
    a = (1.0 - noise / square).clamp_min(0.0).where(square > 0, 0.0)
    return a.where(noise != 0, 1.0)


def balance(trust: Trust, server: Server, cohort: Cohort) -> Slots:
    """What a cohort receives: ``cohort`` c_S, over those who were seen before and weighted as Δy
    is, and ``common`` a·(c − c_S); zero where nobody of the cohort was seen before."""
    controls, seen = own_controls(cohort.memories)
    weights = cohort.weights.to(controls.device) * seen[:, 0]
    known = weights.sum() > 0
    mean = weights @ controls / weights.sum()
    centre, *numbers = spread_of(server)
    share = deserved_trust(*numbers) if trust == "auto" else float(trust)
    common = share * (centre - mean)
    return {"cohort": mean.where(known, 0.0), "common": common.where(known, 0.0)}


def own_controls(memory: Slots) -> tuple[Tensor, Tensor]:
    """c_i, and whether there is one: a user remembers w_i·c_i and w_i, both 0 until it was seen."""
    weight = memory["weight"]
    return memory["control"] / (weight + (weight == 0)), weight > 0


def balanced(at: Participant) -> Affine:
    """y_i^k ← y_i^{k−1} − η_l(H̃_i^k + (c_S − c_i) + a·(c − c_S)); a user who was never seen has no
    c_i, and gets the common part alone."""
    control, seen = own_controls(at.memory)
    drift = seen * (at.broadcast.shared["cohort"] - control)
    return Affine(drift + at.broadcast.shared["common"])


along_balanced = AffineDirection(balanced)


def send_balanced(local: Local, at: Participant) -> tuple[Upload, Slots]:
    """c_i ← the mean of the K noised gradients. A user remembers w_i·c_i, w_i, w_i·‖c_i‖² and
    w_i·v_i, with v_i = spread_i²/K; what changed of them goes up next to Δy_i."""
    control, known, one = local.mean_gradient, at.known, at.memory["weight"]
    weight = one.new_ones(one.shape) * known.weight
    kept = {
        "control": weight * control,
        "weight": weight,
        "square": weight * control.square().sum(-1, keepdim=True),
        "noise": weight * (known.variance / known.steps),
    }
    totals = {name: value - at.memory[name] for name, value in kept.items()}
    return Upload(local.params - at.broadcast.params, totals), kept


def add_all(server: Server, mean: Upload, rate: float) -> Server:
    """x^t ← x^{t−1} + η_g·Δx^t, and every slot stays the mean of the users' own."""
    added = {name: server.slots[name] + total for name, total in mean.totals.items()}
    return Server(server.params + rate * mean.params, {**server.slots, **added})


def scaffold_balanced(trust: Trust = "auto") -> Algorithm:
    """SCAFFOLD with balanced controls.

    Args:
        trust: How far noisy control variates are trusted: 1 is SCAFFOLD, 0 is the zero-sum
            correction alone, and 'auto' is estimated from the known noise in every round. Value: a
            number from 0 to 1, or 'auto'. Example: ``0.5``

    >>> scaffold_balanced().numbers, scaffold_balanced(0.5).numbers
    ({'trust': 'auto'}, {'trust': 0.5})
    """
    if trust != "auto" and (type(trust) not in (int, float) or not 0 <= trust <= 1):
        raise BadInput(
            "out-of-range", f"algorithm.trust is {trust!r}; give a number in [0, 1], or 'auto'"
        )
    return Algorithm(
        "scaffold-balanced",
        along_balanced,
        send_balanced,
        add_all,
        Partial(balance, (trust,)),
        remembers=SLOTS,
        keeps=SLOTS,
        numbers={"trust": trust},
        title="SCAFFOLD-balanced",
        mirrored=True,
        noise_aware=True,
    )


def scaffold_balanced_warm(trust: Trust = "auto") -> Algorithm:
    """Balanced controls whose first round(4/l) rounds only measure control variates.

    Args:
        trust: How far noisy control variates are trusted: 1 is SCAFFOLD, 0 is the zero-sum
            correction alone, and 'auto' is estimated from the known noise in every round. Value: a
            number from 0 to 1, or 'auto'. Example: ``0.5``
    """
    base = scaffold_balanced(trust)
    warm_up = base.replace(name="warm-up", direction=stay)
    return base.replace(
        name="scaffold-balanced-warm", title="SCAFFOLD-balanced-warm", warm_up=warm_up
    )
