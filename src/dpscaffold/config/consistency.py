"""What keeps parts of a run from going together, each said in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpscaffold.algorithms import Algorithm
from dpscaffold.algorithms.fedavg import add_mean_move
from dpscaffold.algorithms.registry import ONE_PASS
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import ONE_ROUND, Plan
from dpscaffold.config.secure import Secure
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Prepared, Target
from dpscaffold.privacy.mechanism import LEAST_STATED


def check_sums(algorithm: Algorithm, plan: Plan, privacy: Gaussian | None, target: Target) -> None:
    """Bounded sums are taken once, over all records of all users."""
    name = algorithm.name
    for key, value in ONE_ROUND.items():
        if (given := getattr(plan, key)) != value:
            raise BadInput(
                "not-a-sum",
                f"plan.{key} is {given!r}, and {name} sums over all records once, with {key} = "
                f"{value!r}; leave it out (in Python: Plan.one_round())",
            )
    if algorithm.update is not add_mean_move:
        raise BadInput(
            "not-a-sum",
            f"algorithm.server is given, and {name} takes no steps at the server; leave it out",
        )
    clip = privacy.clip if privacy else 1.0
    if isinstance(clip, str) or not math.isfinite(clip):
        raise BadInput(
            "not-a-sum",
            f"privacy.clip is {clip!r}, and {name} needs the largest norm of a row; give a number",
        )
    if target.kind == "number" and target.low is None:
        raise BadInput(
            "not-a-sum",
            f"the target is a number without a range, and {name} needs one; give its low and high",
        )


def check_costs(preparation: Sequence[Prepared], secret: bool) -> None:
    """Private steps of a preparation need noise that hides something, and a release a secret
    one."""
    costs = [step.cost for step in preparation if step.cost is not None]
    quiet = [cost for cost in costs if cost.noise is not None and cost.noise < LEAST_STATED]
    if quiet:
        raise BadInput(
            "noise-out-of-range",
            f"the noise on the private {quiet[0].name} is {quiet[0].noise:.3g} times what one "
            f"record can change, too little to hide anything; give at least {LEAST_STATED:g}",
        )
    seeded = [cost.name for cost in costs if cost.seeded]
    if secret and seeded:
        raise BadInput(
            "noise-not-secret",
            f"privacy.secret is true, but the noise on the private {seeded[0]} came from the "
            f"data's seed and can be taken off again; store the data once with 'dpscaffold "
            f"data prepare', which draws it from the operating system",
        )


def check_pass(plan: Plan, algorithm: Algorithm) -> None:
    """K·s is 1 where a round is one pass over a user's records."""
    one_pass = max(1, round(1 / plan.data_ratio))
    if algorithm.name in ONE_PASS and plan.local_steps != one_pass:
        raise BadInput(
            "one-pass-steps",
            f"plan.local_steps is {plan.local_steps}, but {algorithm.name} takes one pass over "
            f"the data a round; with plan.data_ratio {plan.data_ratio} use {one_pass}",
        )


def check_rounds(plan: Plan, warm_rounds: int) -> None:
    """There are rounds left after the warm start."""
    if warm_rounds >= plan.rounds:
        raise BadInput(
            "no-rounds-left",
            f"plan.rounds is {plan.rounds}, and the warm start alone takes {warm_rounds}; "
            "use more rounds, set plan.warm_rounds, or choose an algorithm without one",
        )


def check_privacy(
    privacy: Gaussian, algorithm: Algorithm, plan: Plan, secure: Secure | None, users: int
) -> None:
    """The noise must be known, and be that of these users."""
    if privacy.epsilon is not None:
        raise BadInput(
            "noise-or-epsilon",
            "privacy.epsilon is given, and a run is made with the noise; use make_run, which "
            "solves for it",
        )
    if secure is not None and privacy.user_epsilon is not None:
        raise BadInput(
            "secure-not-proved",
            f"privacy.user_epsilon is {privacy.user_epsilon}, and a site that declines adds no "
            f"noise to a secure sum; leave it out, or leave secure out",
        )
    needs = {
        f"{algorithm.name} weighs controls by their noise": algorithm.noise_aware,
        "plan.weighting is 'noise'": plan.weighting == "noise",
    }
    reason = next((reason for reason, needed in needs.items() if needed), None)
    if privacy.clip == "median" and reason is not None:
        raise BadInput(
            "median-clip",
            f"privacy.clip is 'median', and {reason}, which is unknown where the clip is computed "
            f"from the batch; give a number",
        )
    noises = privacy.noise_by_user
    if noises is not None and len(noises) != users:
        raise BadInput(
            "count-differs",
            f"privacy.noise has {len(noises)} numbers for {users} users; give one "
            f"for each user, in their order",
        )
