"""The ε that a run must keep within (``privacy.target_epsilon``), round by round."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpscaffold.config.budget import Budget
from dpscaffold.privacy import Cost, Ledger, Mechanism, epsilon, largest_rounds
from dpscaffold.runs.parts import Parts, spent_in_parts


@dataclass(frozen=True)
class EpsilonTarget:
    """An ε towards the budget's view, with all that was released and lost; ``most_rounds`` keep
    within it where none is run again."""

    epsilon: float
    run: Mechanism
    costs: tuple[Cost, ...]
    budget: Budget
    most_rounds: int

    @classmethod
    def of(
        cls, run: Mechanism, costs: tuple[Cost, ...], budget: Budget, planned: int
    ) -> EpsilonTarget:
        """The target of a budget that has one, for a run of this many rounds at most."""
        target = budget.target_epsilon
        assert target is not None
        most = largest_rounds(run, target, budget.against(run), costs, planned)
        return cls(target, run, costs, budget, most)

    def refuses(self, round: int, again: bool, ledger: Ledger, parts: Parts) -> str:
        """Why this round must not run, perhaps once more, or the empty string."""
        if self._keeps(round, again, ledger, parts):
            return ""
        return f"one more would exceed epsilon = {self.epsilon:g} towards the {self.budget.view}"

    def _keeps(self, round: int, again: bool, ledger: Ledger, parts: Parts) -> bool:
        """Whether ε stays within the target after this round."""
        rounds, extra = ledger.with_round(round, again=again)
        if parts.several:
            once_more = round if again else 0
            return spent_in_parts(parts, ledger, self._spent, round, once_more) <= self.epsilon
        if not extra:
            return rounds <= self.most_rounds
        return self._spent(0, rounds, extra) <= self.epsilon

    def _spent(self, part: int, rounds: int, extra: int) -> float:
        """ε of this many rounds of a part; what preparing the data cost is spent in the first."""
        run = replace(self.run, extra=max(self.run.extra, extra))
        costs = () if part else self.costs
        return epsilon(run, self.budget.against(run), rounds, costs=costs)
