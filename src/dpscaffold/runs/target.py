"""The ε that a run must keep within (``privacy.target_epsilon``), round by round."""

from __future__ import annotations

from dataclasses import dataclass

from dpscaffold.privacy import Cost, Ledger, Mechanism, PrivacyError, largest_rounds
from dpscaffold.privacy.composition import costs_of_part
from dpscaffold.runs.parts import Parts, spent_in_parts
from dpscaffold.setting.budget import Budget


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
        epsilon = budget.target_epsilon
        assert epsilon is not None
        most = largest_rounds(run, epsilon, budget.bound(run), at_most=planned, costs=costs)
        return cls(epsilon, run, costs, budget, most)

    def refuses(self, round: int, again: bool, ledger: Ledger, parts: Parts) -> str:
        """Why this round must not run, perhaps once more, or the empty string."""
        try:
            if self._keeps(round, again, ledger, parts):
                return ""
        except PrivacyError as error:  # a bound that holds for no run with repeated rounds
            return str(error)
        return f"one more would exceed epsilon = {self.epsilon:g} towards the {self.budget.view}"

    def _keeps(self, round: int, again: bool, ledger: Ledger, parts: Parts) -> bool:
        """Whether ε stays within the target after this round."""
        rounds, repeats = ledger.with_round(round, again=again)
        if parts.several:
            once_more = round if again else 0
            return spent_in_parts(parts, ledger, self._spent, round, once_more) <= self.epsilon
        if not repeats:
            return rounds <= self.most_rounds
        return self._spent(0, rounds, repeats) <= self.epsilon

    def _spent(self, part: int, rounds: int, repeats: tuple[int, ...]) -> float:
        """ε of this many rounds of a part."""
        bound = self.budget.bound(self.run, repeats)
        return bound.epsilon(self.run, rounds, costs_of_part(self.costs, part), repeats)
