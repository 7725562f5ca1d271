"""How large a surrogate is, and what stays the same where it is smaller than what it represents.

A plan is tried a hundred times, so a surrogate has at most some number of users, records, steps,
rounds, features and classes. What is smaller is made up for (docs/planning-method.md says why):

- m, K and b: noise of such a spread that the mean of a round's moves has the variance of the real
  run, (2Cσ_g/b)²/(mK) in every coordinate. The distance of a round, Kη_l = η₀/s, stays.
- T rounds in T' = T/κ: each goes κ times as far with 1/κ of that variance. The distance of all
  rounds, T·η₀/s, and the noise that they gather, T·(η₀/s)²·v/(mK), stay.
- c classes in c': the weights of one class hear of it in 1/c of the records. Steps of c'/c of the
  length, with c/c' of the noise, move them as far towards it and as far astray.
- d features in d': nothing. The noise in a score, of deviation σ‖a‖ for a row a, knows no d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpscaffold.config import Run
from dpscaffold.tasks import Linear, Logistic, Mlp, Task

#: Users, participants, records in a batch and steps of a surrogate, at most.
USERS, PARTICIPANTS, BATCH, STEPS = 200, 20, 32, 10

#: Rounds that train, and rounds that warm up, at most.
ROUNDS = 500

#: Classes and features at most, and the most weights of a linear model of both.
CLASSES, FEATURES, WEIGHTS = 100, 1000, 50_000


#: Rounds that a surrogate has at least, however much one of them computes.
LEAST_ROUNDS = 50

#: What a round computes for a participant besides its steps, as records: uploads, memory, the mean.
ROUND_COSTS = 50


@dataclass(frozen=True)
class Fidelity:
    """How closely a surrogate follows the run that it represents.

    ``participants`` and ``steps`` are those of a round, at most (None: the usual), and
    ``steps_in_all`` are the steps of all rounds together. ``work`` limits what one run computes:
    participants × weights × rounds × the records of a round, which are those of its steps and
    :data:`ROUND_COSTS`. Where this is too much, there are fewer rounds, each going further.
    """

    participants: int | None = None
    steps: int | None = None
    steps_in_all: float = math.inf
    work: float = math.inf

    def most_rounds(self, steps: int, work: float) -> int:
        """The most rounds, where one of them takes ``steps`` and computes ``work``.

        >>> Fidelity(work=1e6).most_rounds(10, 1e4), Fidelity(steps_in_all=800).most_rounds(10, 1e4)
        (100, 80)
        """
        most = min(self.steps_in_all / steps, self.work / max(1.0, work))
        return int(min(ROUNDS, max(LEAST_ROUNDS, most)))


@dataclass(frozen=True)
class Shape:
    """M, m, R, b, K, the rounds (of them ``warm_rounds`` that only set controls), d and c (0: a
    number is predicted) of a surrogate."""

    users: int
    cohort_size: int
    records: int
    batch: int
    steps: int
    rounds: int
    warm_rounds: int
    features: int
    classes: int

    @classmethod
    def of(cls, setting: Run, fidelity: Fidelity | None = None) -> Shape:
        """That of the setting's surrogate: its own numbers, or the most that is tried."""
        fidelity = fidelity or Fidelity()
        share, schema = setting.cohort_size / setting.users, setting.roster.schema
        most = fidelity.participants or PARTICIPANTS
        users = min(setting.users, max(2 * most, round(most / share)), USERS)
        cohort_size = max(1, min(users, round(share * users)))
        if share * USERS < most:  # few of many: as many as can be, so that they are like all
            cohort_size = min(setting.cohort_size, most)
        batch = min(BATCH, max(1, round(float(setting.batch_sizes.double().mean()))))
        records = max(batch, min(int(setting.sizes.double().mean()), round(batch / 0.2)))
        steps = min(fidelity.steps or STEPS, setting.plan.local_steps)
        features, classes = _columns(setting.task, schema.dimension, len(schema.target.classes))
        weights = setting.task.parameters * features / max(1, schema.dimension)
        work = cohort_size * (steps * batch + ROUND_COSTS) * weights
        longest = fidelity.most_rounds(steps, work)
        warm = min(setting.warm_rounds, longest)
        rounds = warm + min(setting.plan.rounds - setting.warm_rounds, longest)
        return cls(users, cohort_size, records, batch, steps, rounds, warm, features, classes)

    def stretch(self, setting: Run) -> float:
        """κ: rounds of the real run that one of the surrogate's represents."""
        return (setting.plan.rounds - setting.warm_rounds) / (self.rounds - self.warm_rounds)

    def crowd(self, setting: Run) -> float:
        """c/c': classes of the real run that one of the surrogate's represents."""
        return len(setting.roster.schema.target.classes) / self.classes if self.classes else 1.0

    def pace(self, setting: Run) -> float:
        """η₀ of the surrogate over that of the real run, at the same s."""
        return self.stretch(setting) / self.crowd(setting)

    def task(self, setting: Run) -> Task:
        """The setting's task, with the surrogate's features and classes."""
        schema = setting.roster.schema
        if (self.features, self.classes) == (schema.dimension, len(schema.target.classes)):
            return setting.task
        task = setting.task
        fewer = self.classes < len(schema.target.classes)
        if isinstance(task, Logistic):
            return Logistic(self.features, self.classes)
        if isinstance(task, Mlp):
            return replace(
                task, features=self.features, classes=self.classes if fewer else task.classes
            )
        assert isinstance(task, Linear)  # the others keep their columns
        return replace(
            task, features=self.features, outputs=self.classes if fewer else task.outputs
        )

    def smaller_than(self, setting: Run) -> str:
        """What was made smaller, as sentences; empty where nothing was."""
        return " ".join(part for part in (self._fewer(setting), *self._shorter(setting)) if part)

    def _fewer(self, setting: Run) -> str:
        whole = (setting.users, setting.cohort_size, setting.plan.local_steps)
        if (self.users, self.cohort_size, self.steps) == whole and self.batch >= int(
            setting.batch_sizes.max()
        ):
            return ""
        return (
            f"The surrogate has {self.users} users of {self.records} records, {self.cohort_size} "
            f"in a round, batches of {self.batch} and {self.steps} local steps, instead of "
            f"{setting.users} users, {setting.cohort_size} in a round, batches of "
            f"{int(setting.batch_sizes.double().mean())} and {setting.plan.local_steps} steps; its "
            f"noise is scaled so that a round's mean has the noise of the real one."
        )

    def _shorter(self, setting: Run) -> list[str]:
        found, schema = [], setting.roster.schema
        if self.rounds < setting.plan.rounds:
            found.append(
                f"The surrogate has {self.rounds} rounds instead of {setting.plan.rounds}, each of "
                f"which goes as far as {self.stretch(setting):.4g} of the real ones and has their "
                f"noise; ε and σ_g are those of all {setting.plan.rounds}."
            )
        if self.features < schema.dimension:
            found.append(
                f"The surrogate has {self.features} features instead of {schema.dimension}."
            )
        if self.classes < len(schema.target.classes):
            found.append(
                f"The surrogate has {self.classes} classes instead of "
                f"{len(schema.target.classes)}, with so much more noise that one of them is as "
                f"hard to hear."
            )
        return found


def _columns(task: Task, features: int, classes: int) -> tuple[int, int]:
    """d' and c': fewer only for a task that can be made with fewer. A module has the columns that
    it was written for, and a loss with weights a weight for each class."""
    if not isinstance(task, Linear | Mlp):
        return features, classes
    fewer = classes if task.loss.weights else min(classes, CLASSES)
    return min(features, FEATURES, max(1, WEIGHTS // max(1, fewer))), fewer
