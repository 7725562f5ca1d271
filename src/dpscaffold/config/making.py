"""How a run is made of its parts, and how its noise is found where they give an ε."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dpscaffold.algorithms import Algorithm
from dpscaffold.config.budgets import (
    Epsilon,
    alike,
    budgets_of,
    joint_noises,
    keeps_budgets,
    own_noises,
)
from dpscaffold.config.consistency import check_pass
from dpscaffold.config.gaussian import Gaussian, NoisedStep
from dpscaffold.config.plan import Plan
from dpscaffold.config.run import Run
from dpscaffold.config.secure import Secure
from dpscaffold.errors import BadInput
from dpscaffold.federation.roster import Roster
from dpscaffold.privacy import charged
from dpscaffold.privacy import solve_noise as least_noise
from dpscaffold.privacy.mechanism import Relation
from dpscaffold.privacy.numbers import digits_up
from dpscaffold.tasks import Task


def make_run(
    roster: Roster,
    task: Task,
    algorithm: Algorithm,
    plan: Plan,
    privacy: Gaussian | None = None,
    secure: Secure | None = None,
    absent: str | None = None,
) -> Run:
    """The run of these parts. Where ``privacy`` gives an ε, its noise is solved for, here and
    nowhere else; where the algorithm takes bounded sums, they are its task.

    >>> from dpscaffold import Logistic, fedavg, synthetic
    >>> roster = synthetic(users=10, records=50).roster
    >>> asked = Gaussian(epsilon=1.0, delta=1e-3)
    >>> make_run(roster, Logistic(40, 10), fedavg(), Plan(), asked).privacy.epsilon is None
    True
    """
    check_pass(plan, algorithm)
    if privacy is None or privacy.epsilon is None:
        task = _sums_in_place_of(task, algorithm, roster, privacy)
        return Run(roster, task, algorithm, plan, privacy, secure, absent)
    unsolved = privacy.changed(epsilon=None, noise=1.0)
    asked = make_run(roster, task, algorithm, plan, unsolved, secure, absent)
    return solve_noise(asked, privacy.epsilon)


def solve_noise(run: Run, epsilon: Epsilon) -> Run:
    """This run with the smallest noise that keeps ε towards the adversary that its privacy names,
    the cost of its data's preparation included. With a table of budgets every user has noise of its
    own."""
    described, privacy = run.mechanism, run.privacy
    if described is None or privacy is None:
        raise BadInput(
            "no-privacy", "epsilon is asked of a run without privacy; give it a mechanism"
        )
    costs, _ = charged(run.roster.schema.preparation, described)
    equal = alike(described)
    if not isinstance(epsilon, Mapping):
        return _with_noise(run, [least_noise(equal, epsilon, privacy.against(equal), costs)])

    epsilons = budgets_of(epsilon, run.roster)
    if run.secure is None:  # a user's own noise hides it from everybody
        return _with_noise(run, own_noises(equal, epsilons, costs))

    noises = joint_noises(equal, epsilons, costs)
    while True:  # what is found is checked user by user
        solved = _with_noise(run, [float(digits_up(float(noise), 5)) for noise in noises])
        if solved.mechanism is not None and keeps_budgets(solved.mechanism, epsilons, costs):
            return solved
        noises = noises * 1.001


def _with_noise(run: Run, noises: Sequence[float]) -> Run:
    """The run with this noise of all users, or of each."""
    assert run.privacy is not None
    noise = tuple(noises) if len(set(noises)) > 1 else noises[0]
    solved = run.privacy.changed(noise=noise, epsilon=None)
    task = _sums_in_place_of(run.task, run.algorithm, run.roster, solved)
    return replace(run, task=task, privacy=solved)


def _sums_in_place_of(
    task: Task, algorithm: Algorithm, roster: Roster, privacy: Gaussian | None
) -> Task:
    """The task of an algorithm: of one that takes bounded sums, the sums."""
    rule = algorithm.sums
    given = NoisedStep(noise=0.0) if privacy is None else privacy
    if rule is None or isinstance(given.clip, str):
        return task
    relation: Relation = "zero-out" if given.sampling == "poisson" else "replace-one"
    noises = (given.noise,) * len(roster.sizes)
    if privacy is not None and privacy.noise_by_user is not None:
        noises = privacy.noise_by_user
    # Every user adds 2Cσ_i to its sum, in each scaled coordinate.
    noise = 2 * math.hypot(*noises) / sum(roster.sizes)
    made: Task = rule(task, roster.schema, relation, given.clip, noise)
    return made
