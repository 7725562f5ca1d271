"""What a run's ε means for one person: how often the best membership test would be right.

All figures come from the run's own loss distribution through its trade-off function, are upper
bounds on what any test can do, whatever it knows besides, and are rounded towards the adversary.

>>> from dpscaffold.privacy import RANDOM_PARTICIPATION, describe
>>> run = describe(rounds=400, local_steps=50, users=100, cohort_size=20,
...                records=4000, batch_sizes=800, noise=60, delta=2.5e-6)
>>> from dpscaffold.privacy import round_up
>>> terms = human_terms(RANDOM_PARTICIPATION, run)
>>> round_up(terms.accuracy), round_up(terms.true_positives[0].rate), round_up(terms.mu)
('0.543', '0.018', '0.218')
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dpscaffold.privacy.bound import Bound, Laws
from dpscaffold.privacy.costs import Cost, with_costs
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.ledger import Ledger
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.statement_types import GroupTerms, HumanTerms, TruePositives
from dpscaffold.privacy.tradeoff import TradeOff

#: The false-positive rates at which a membership test is evaluated (Carlini et al. 2022).
FALSE_POSITIVES = (0.01, 0.001)
#: How many records of one person are looked at together.
GROUPS = (2, 5, 10)
#: Where the curve is tabulated: dense near 0, where a careful adversary works.
CURVE = (0.0, *(float(a) for a in np.geomspace(1e-4, 0.1, 13)), *(k / 20 for k in range(3, 21)))


def losses(
    bound: Bound,
    run: Mechanism,
    rounds: int | None = None,
    costs: Sequence[Cost] = (),
    repeats: Sequence[int] = (),
) -> Laws:
    """The loss distributions that a bound rests on, further mechanisms composed in.

    Raises :class:`PrivacyError` for a bound that does not apply, or that has no loss distribution
    (the Rényi ones and the published one).
    """
    reason = bound.applies(run)
    if reason:
        raise PrivacyError(
            "bound-not-applicable", f"the bound {bound.name!r} does not apply: {reason}"
        )
    if run.noise == 0.0:
        raise PrivacyError(
            "no-noise", "noise=0 hides nothing, so there is no trade-off; give a noise above 0"
        )
    rounds = run.rounds if rounds is None else rounds
    if repeats and bound.repeated is not None:
        laws = bound.repeated(run, rounds, tuple(repeats))
    elif bound.laws is not None and not repeats:
        laws = bound.laws(run, rounds)
    else:
        raise PrivacyError(
            "no-trade-off",
            f"the bound {bound.name!r} has no loss distribution, and so no trade-off function; "
            f"ask for the server's view",
        )
    return tuple(with_costs(law, tuple(costs)) for law in laws)


@lru_cache(maxsize=256)
def human_terms(
    bound: Bound,
    run: Mechanism,
    rounds: int | None = None,
    costs: tuple[Cost, ...] = (),
    repeats: tuple[int, ...] = (),
    groups: tuple[int, ...] = GROUPS,
) -> HumanTerms:
    """A run in human terms, by one of its bounds."""
    return terms_of(losses(bound, run, rounds, costs, repeats), run, bound.name, groups)


def terms_of(laws: Laws, run: Mechanism, bound: str, groups: Sequence[int] = GROUPS) -> HumanTerms:
    """The same from loss distributions that are at hand, such as the ledger's."""
    for size in groups:
        check_group(size)
    curve = TradeOff.of(laws)
    advantage = curve.advantage()
    return HumanTerms(
        bound=bound,
        protects=run.unit,
        neighbours=run.neighbours,
        delta=run.delta,
        advantage=advantage,
        accuracy=0.5 + advantage / 2,
        true_positives=_true_positives(curve, 1),
        mu=_finite(curve.mu(run.delta)) if run.delta < 0.5 else None,
        mu_range=(run.delta, 1.0 - run.delta),
        groups=tuple(_group(curve, size, run.delta) for size in groups),
        curve=tuple((a, math.floor(float(curve(a)) * 1e6) / 1e6) for a in CURVE),
    )


def spent_laws(ledger: Ledger, costs: Sequence[Cost] = ()) -> Laws:
    """The loss distributions of what was spent given who took part; none before anyone did."""
    return tuple(with_costs(law, tuple(costs)) for law in ledger.laws())


def ledger_terms(
    ledger: Ledger, costs: Sequence[Cost] = (), groups: Sequence[int] = GROUPS
) -> HumanTerms | None:
    """The ledger in human terms, given who took part; None before anyone did."""
    laws = spent_laws(ledger, costs)
    return terms_of(laws, ledger.run, "ledger", groups) if laws else None


def check_group(size: int) -> None:
    """Refuse a group that is none."""
    if not 1 <= size <= 1000:
        raise PrivacyError(
            "out-of-range", f"group={size} is not a number of records; give 1 to 1000"
        )


def _group(curve: TradeOff, size: int, delta: float) -> GroupTerms:
    return GroupTerms(
        size=size,
        accuracy=0.5 + curve.advantage(size) / 2,
        true_positives=_true_positives(curve, size),
        epsilon=_finite(curve.epsilon(delta, size)),
    )


def _true_positives(curve: TradeOff, group: int) -> tuple[TruePositives, ...]:
    rates = curve.power(np.array(FALSE_POSITIVES), group)
    return tuple(TruePositives(a, float(r)) for a, r in zip(FALSE_POSITIVES, rates, strict=True))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
