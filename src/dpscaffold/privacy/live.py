"""ε while training runs, and the round at which a target would be exceeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dpscaffold.privacy.bound import Bound
from dpscaffold.privacy.bounds import RANDOM_PARTICIPATION
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.ledger import largest_count, next_knot
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.showing import round_up


@dataclass
class Spending:
    """ε towards the server after t rounds, cheap enough to show at every round.

    :meth:`after` composes the loss of one round t times and remembers the answer. :meth:`shown` is
    never below it and never more than a few per cent above: it answers with the value at the next
    of about log(T)/log(1.1) rounds, each computed once, so a long run spends well under a hundredth
    of its time here.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=40, local_steps=5, users=10, cohort_size=2, records=400,
    ...                batch_sizes=80, noise=10)
    >>> spending = Spending(run)
    >>> spending.after(0), spending.after(40) <= spending.shown(40) <= spending.after(40) * 1.1
    (0.0, True)
    """

    run: Mechanism
    bound: Bound = RANDOM_PARTICIPATION
    costs: tuple[Cost, ...] = ()
    _known: dict[tuple[int, tuple[int, ...]], float] = field(default_factory=dict, repr=False)

    def after(self, rounds: int, repeats: tuple[int, ...] = ()) -> float:
        """ε after ``rounds`` rounds, exactly as the bound gives it.

        ``repeats`` has, for each of them that was released again with fresh noise, how many times.
        """
        if (rounds, repeats) not in self._known:
            value = self.bound.epsilon(self.run, rounds, self.costs, repeats)
            self._known[rounds, repeats] = value
        return self._known[rounds, repeats]

    def shown(self, rounds: int, repeats: tuple[int, ...] = ()) -> float:
        """An upper value of ε after ``rounds`` rounds, at hand for most of them."""
        return self.after(max(rounds, min(next_knot(rounds), self.run.rounds)), repeats)


def largest_rounds(
    run: Mechanism,
    epsilon: float,
    bound: Bound = RANDOM_PARTICIPATION,
    at_most: int = 1_000_000,
    costs: Sequence[Cost] = (),
) -> int:
    """The largest T with ε(T) ≤ ``epsilon``, at most ``at_most``; the run's own T plays no part.

    ε(T) does not fall with T, so the answer is found by doubling and halving. Training that halts
    there never exceeds the target, and halts for a reason that does not depend on the data.
    ``costs`` are further mechanisms that the budget must cover too.

    >>> from dpscaffold.privacy import describe, PAPER_THIRD_PARTY
    >>> run = describe(rounds=1, local_steps=5, users=100, cohort_size=5,
    ...                records=4000, batch_sizes=800, noise=10, delta=2.5e-6)
    >>> largest_rounds(run, 3.0, PAPER_THIRD_PARTY)
    488
    """
    if not epsilon > 0:
        raise PrivacyError(
            "out-of-range", f"epsilon={epsilon} leaves no budget; give a number above 0"
        )
    first = bound.epsilon(run, 1, costs)
    if first > epsilon:
        noise = "the noise is 0" if run.noise == 0 else f"the noise is {run.noise:g}"
        raise PrivacyError(
            "goal-not-met",
            f"epsilon={epsilon:g} cannot be met even at one round, which costs "
            f"{round_up(first, 4)} ({noise}); give more noise or a larger epsilon",
        )
    return largest_count(lambda rounds: bound.epsilon(run, rounds, costs) <= epsilon, at_most)
