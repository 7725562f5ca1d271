"""One run as a value: which data, which task, which algorithm, under which plan and privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Known
from dpscaffold.algorithms.base import MomentRule, RidgeRule
from dpscaffold.algorithms.fedavg import add_mean_move
from dpscaffold.config.budget import Budget, View
from dpscaffold.config.budgets import (
    Epsilon,
    alike,
    budgets_of,
    checked,
    heterogeneity_of,
    joint_noises,
    noise_weight,
    own_noises,
)
from dpscaffold.config.gaussian import STORED, Gaussian, choose_relation
from dpscaffold.config.identity import algorithm_identity, task_identity
from dpscaffold.config.plan import ONE_ROUND, Plan
from dpscaffold.config.rate import choose_rate
from dpscaffold.config.secure import Secure, SumPlan
from dpscaffold.config.table import RunTable
from dpscaffold.errors import BadInput
from dpscaffold.federation.roster import Roster
from dpscaffold.privacy import (
    Mechanism,
    adversaries,
    charged,
    noise_seen,
    solve_noise,
    unproved,
)
from dpscaffold.privacy.adversary import MOST_SUMMED
from dpscaffold.privacy.mechanism import Delta, Relation, Sampling
from dpscaffold.privacy.preparation import Cost
from dpscaffold.privacy.seeds import Seed, SeedKnowledge, origin_of
from dpscaffold.randomness.streams import Randomness
from dpscaffold.tasks import Task
from dpscaffold.tasks.fitting import check_task
from dpscaffold.tasks.moments import MomentSums
from dpscaffold.tasks.ridge import ridge_task


@dataclass(frozen=True)
class Run:
    """Everything that determines a run but the records, checked as a whole: what parties agree on.

    No record can be reached from here, so it can be sent, compared, accounted and calibrated by
    anyone; engines and evaluators take the federation next to it.

    The numbers that engines use (m, b_i, the warm rounds) and the numbers that are accounted come
    from the same properties, so what runs and what is stated cannot differ.
    """

    roster: Roster
    task: Task
    algorithm: Algorithm
    plan: Plan
    privacy: Gaussian | None = None
    budget: Budget = field(default_factory=Budget)
    secure: Secure | None = None

    def __post_init__(self) -> None:
        if self.algorithm.sums is not None:
            self._check_sums()
        _ = self.batch_sizes, self.cohort_size  # refuses what cannot be drawn
        self._check_limits()
        if self.algorithm.sums is not None:
            self._set_sums(self.algorithm.sums)
        check_task(self.task, self.roster.schema, self.plan.public_seed)
        self._check_preparation()
        self._check_neighbours()
        plan = self.plan
        if self.algorithm.full_pass and plan.local_steps != max(1, round(1 / plan.data_ratio)):
            raise BadInput(
                "one-pass-steps",
                f"plan.local_steps is {plan.local_steps}, but {self.algorithm.name} takes one pass "
                f"over the data a round; with plan.data_ratio {plan.data_ratio} use "
                f"{max(1, round(1 / plan.data_ratio))}",
            )
        if self.algorithm.noise_aware and self.privacy and self.privacy.clip == "median":
            raise BadInput(
                "median-clip",
                f"privacy.clip is 'median', but {self.algorithm.name} weighs controls by their "
                "noise, which is unknown where the clip is computed from the batch; give a number",
            )
        if self.warm_rounds >= plan.rounds:
            raise BadInput(
                "no-rounds-left",
                f"plan.rounds is {plan.rounds}, and the warm start alone takes {self.warm_rounds}; "
                "use more rounds, set plan.warm_rounds, or choose an algorithm without one",
            )
        self._check_noise()
        if self.secure is not None:
            self._check_secure(self.secure)
        self._solve()

    def _check_limits(self) -> None:
        """Limits of the mechanism must be those of the run: one that is passed over is not kept."""
        given = Budget() if self.privacy is None else replace(self.privacy.budget, view="server")
        if given != Budget() and given != replace(self.budget, view="server", absent=None):
            raise BadInput(
                "conflicting-arguments",
                "privacy has limits (delta, user_epsilon, budget_file, colluders), "
                "and the budget of the run has others; give them in one place",
            )

    def _check_sums(self) -> None:
        """Bounded sums are taken once, over all records of all users."""
        name = self.algorithm.name
        for key, value in ONE_ROUND.items():
            if getattr(self.plan, key) != value:
                raise BadInput(
                    "not-a-sum",
                    f"plan.{key} is {getattr(self.plan, key)!r}, and {name} sums over all records "
                    f"once, with {key} = {value!r}; leave it out (in Python: Plan.one_round())",
                )
        if self.algorithm.update is not add_mean_move:
            raise BadInput(
                "not-a-sum",
                f"algorithm.server is given, and {name} takes no steps at the server; leave it out",
            )
        clip = self.privacy.clip if self.privacy else 1.0
        if isinstance(clip, str) or not math.isfinite(clip):
            raise BadInput(
                "not-a-sum",
                f"privacy.clip is {clip!r}, and {name} needs the largest norm of a row; give a "
                f"number",
            )
        if self.roster.schema.target.kind == "number" and self.roster.schema.target.low is None:
            raise BadInput(
                "not-a-sum",
                f"the target is a number without a range, and {name} needs one; give its low and "
                f"high",
            )

    def _set_sums(self, rule: RidgeRule | MomentRule) -> None:
        """The task of the sums; that of ridge regression with the penalty that the noise asks
        for."""
        privacy = self.privacy
        relation: Relation = "zero-out" if self.sampling == "poisson" else "replace-one"
        bound = 1.0 if privacy is None else float(privacy.clip)
        if isinstance(rule, MomentRule):
            schema = self.roster.schema
            outputs = max(1, len(schema.target.classes))
            given = (schema.dimension, rule.kind, rule.norm_bound, relation, bound, outputs)
            object.__setattr__(self, "task", MomentSums(*given))
            return
        task, noise = ridge_task(self.task, rule.share, relation, bound), 0.0
        if privacy is not None:  # every user adds 2Cσ_g to its sum, in each scaled coordinate
            noises = privacy.noise_by_user or (privacy.noise,) * self.users
            noise = 2 * math.hypot(*noises) / float(self.sizes.sum())
        penalty = rule.strength * math.sqrt(2 * task.inputs) * noise / task.scales.gram
        object.__setattr__(self, "task", replace(task, penalty=penalty))

    def _check_noise(self) -> None:
        """Noise of each user, and weights by it, need as many numbers, and a known spread."""
        privacy = self.privacy
        noises = None if privacy is None else privacy.noise_by_user
        if noises is not None and len(noises) != self.users:
            raise BadInput(
                "count-differs",
                f"privacy.noise_by_user has {len(noises)} numbers for {self.users} users; give one "
                f"for each user, in their order",
            )
        if self.plan.weighting == "noise" and privacy and privacy.clip == "median":
            raise BadInput(
                "median-clip",
                "privacy.clip is 'median', and plan.weighting is 'noise', which is unknown where "
                "the clip is computed from the batch; give a number",
            )

    def _solve(self) -> None:
        """A mechanism that was given by its ε gets its noise here, before anything uses it."""
        if self.privacy is not None and self.privacy.epsilon is not None:
            solved = self.calibrated(self.privacy.epsilon, self.privacy.view)
            vars(self).clear()  # what was derived of the run without its noise
            vars(self).update(vars(solved))

    def _check_preparation(self) -> None:
        """A secret run must not stand on statistics whose noise can be drawn again from a seed."""
        costs = [step.cost for step in self.roster.schema.preparation if step.cost is not None]
        seeded = [cost.name for cost in costs if cost.seeded]
        if self.privacy is not None and self.privacy.secret and seeded:
            raise BadInput(
                "noise-not-secret",
                f"privacy.secret is true, but the noise on the private {seeded[0]} came from the "
                f"data's seed and can be taken off again; store the data once with 'dpscaffold "
                f"data prepare', which draws it from the operating system",
            )

    def _check_neighbours(self) -> None:
        """The neighbours that are asked for must be those of the sampling and the data."""
        privacy, declared = self.privacy, self.roster.declared
        if privacy is not None and privacy.neighbours is not None:
            choose_relation(privacy.neighbours, privacy.sampling, privacy.unit, declared)
        if self.sampling != "poisson" and declared:
            raise BadInput(
                "not-applicable",
                "data.declared_sizes is given, but batches of fixed size need the true sizes; set "
                "privacy.sampling = 'poisson' or leave the sizes out",
            )

    def _check_summed(self) -> None:
        """One step, a plain mean and no memory: what the proof of secure sums needs."""
        plan = self.plan
        if plan.local_steps != 1:
            raise BadInput(
                "secure-not-proved",
                f"plan.local_steps is {plan.local_steps}, and secure sums are proved for one local "
                f"step; set plan.local_steps = 1, or leave secure out",
            )
        if self.algorithm.memory or self.algorithm.warm_up is not None:
            raise BadInput(
                "secure-not-proved",
                f"algorithm.name is {self.algorithm.name!r}, whose users keep a memory between "
                f"rounds, and secure sums are not proved for it; use 'fedavg', or leave secure out",
            )

    def _check_secure(self, secure: Secure) -> None:
        """Secure sums only where they are proved; everything else is refused."""
        privacy, budget = self.privacy, self.budget
        if privacy is None or privacy.noise == 0:
            raise BadInput(
                "no-noise",
                "secure is given without noise, which sums need; give privacy.noise or "
                "privacy.epsilon, or leave secure out",
            )
        self._check_summed()
        if budget.user_epsilon is not None:
            raise BadInput(
                "secure-not-proved",
                f"privacy.user_epsilon is {budget.user_epsilon}, and a site that declines adds no "
                f"noise to a secure sum; leave it out, or leave secure out",
            )
        secure.smallest_list(self.cohort_size)
        run = self.describe()
        if run is None:
            return
        reason = unproved(run) or noise_seen(run, adversaries(run)["server"]).not_more
        if reason is not None:
            raise BadInput(
                "secure-not-proved", f"secure sums are not proved for this run: {reason}"
            )
        _ = self.sums  # refuses numbers that do not fit its integers

    @cached_property
    def sums(self) -> SumPlan | None:
        """The secure sums of this run; None where the server sees every upload."""
        if self.secure is None or self.privacy is None:
            return None
        privacy, clip, batches = self.privacy, self.privacy.clip, self.batch_sizes.tolist()
        if isinstance(clip, str):
            raise BadInput(
                "median-clip", "privacy.clip is 'median', which has no guarantee; give a number"
            )
        if self.algorithm.sums is None and max(self.roster.sizes) > MOST_SUMMED:
            raise BadInput(
                "too-many-records",
                f"a site has {max(self.roster.sizes)} records, and the rounding of secure sums is "
                f"bounded for {MOST_SUMMED}; divide them among several sites",
            )
        # A Poisson batch may have more than b records; beyond this margin a sum wraps.
        wide = privacy.sampling == "poisson" and privacy.unit == "record"
        mechanisms = [self.privacy_of(user) or privacy for user in range(self.users)]
        each = zip(mechanisms, batches, strict=True)
        return SumPlan.of(
            self.secure,
            weights=self.weights.tolist(),
            deviations=[float(one.scale(clip, batch)) for one, batch in each],
            bounds=[clip * (1 + (10 / math.sqrt(b) + 10 / b) * wide) for b in batches],
            participants=self.cohort_size,
            noise=privacy.noise,
        )

    def privacy_of(self, user: int, members: int | None = None) -> Gaussian | None:
        """A user's mechanism, with σ_i as its noise. In a secure sum the noise follows the list:
        ``members`` is how many take part, by default all that are drawn."""
        if self.privacy is None:
            return None
        noise = self.privacy.noise_of(user)
        if members not in (None, self.cohort_size) and self.sums is not None:
            noise = self.sums.noise_for(members, noise)
        if noise == self.privacy.noise and self.privacy.noise_by_user is None:
            return self.privacy
        if noise not in self._mechanisms:
            made = self.privacy.changed(noise=noise, noise_by_user=None)
            self._mechanisms[noise] = made
        return self._mechanisms[noise]

    @cached_property
    def _mechanisms(self) -> dict[float, Gaussian]:
        """Mechanisms of users by their noise: users with equal noise share one."""
        return {}

    @cached_property
    def weights(self) -> Tensor:
        """The users' weights in means up to a common factor, (M,) float64: public numbers.

        By noise they are τ²/(v_i + τ²), v_i = spread_i²/K being the variance of a coordinate of a
        user's mean gradient. In a secure sum all members add equal noise, so they are 1/spread_i.
        """
        if self.plan.weighting == "records":
            return self.sizes.double()
        ones = torch.ones(1, dtype=torch.float64).expand(self.users)
        if self.plan.weighting == "uniform" or self.privacy is None or self.privacy.noise == 0:
            return ones
        spread = self.spreads()[:, 0]
        if self.secure is not None:
            return torch.div(spread.min(), spread)
        steps = torch.tensor([self.plan.steps_of(user) for user in range(self.users)])
        weights: Tensor = noise_weight(spread.square() / steps, heterogeneity_of(self.privacy.clip))
        return weights

    def spreads(self, rows: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        """The standard deviation of the noise on a step's gradient of these users, or of all,
        (U, 1); C is a number."""
        privacy, rows = self.privacy, torch.arange(self.users) if rows is None else rows
        assert privacy is not None and not isinstance(privacy.clip, str)
        batches = self.batch_sizes[rows].to(dtype)[:, None]
        spread: Tensor = torch.ones_like(batches) * privacy.scale(privacy.clip, batches)
        if privacy.noise_by_user is None:
            return spread
        noises = torch.tensor(privacy.noise_by_user, dtype=dtype)[rows][:, None]
        return spread * (noises / privacy.noise)

    @cached_property
    def users(self) -> int:
        """M."""
        return len(self.sizes)

    @cached_property
    def cohort_size(self) -> int:
        """m = ⌊lM⌋."""
        return self.plan.cohort_size(self.users)

    @cached_property
    def batch_sizes(self) -> Tensor:
        """b_i = ⌊sR_i⌋, (M,)."""
        steps = self.plan.steps_by_user
        if steps is not None and len(steps) != self.users:
            raise BadInput(
                "count-differs",
                f"plan.steps_by_user has {len(steps)} numbers for {self.users} users; give one for "
                f"each user, in their order",
            )
        return self.plan.batch_sizes(self.sizes)

    @cached_property
    def label(self) -> str:
        """The algorithm's title in figures and tables, e.g. ``DP-SCAFFOLD-warm``."""
        return f"DP-{self.algorithm.shown}" if self.privacy else self.algorithm.shown

    @cached_property
    def sizes(self) -> Tensor:
        """R_i, (M,), of which rates, divisors and weights are made: declared ones where the roster
        has them. Half as many bytes for a user suffice where nobody has billions of records."""
        few = max(self.roster.sizes) < 1 << 31
        return torch.tensor(self.roster.sizes, dtype=torch.int32 if few else torch.int64)

    def declared(self, user: int) -> int | None:
        """The size that a user declared, or None where R_i was computed from its data."""
        return self.roster.sizes[user] if self.roster.declared else None

    @cached_property
    def warm_rounds(self) -> int:
        """How many rounds only set control variates: round(4/l) by default where the algorithm
        warms up."""
        if self.algorithm.warm_up is None:
            return 0
        planned = self.plan.warm_rounds
        return round(4 / self.plan.user_ratio) if planned is None else planned

    @cached_property
    def settled(self) -> Plan:
        """The plan with η₀: the number that was given, or else the one that is chosen from the
        numbers of this run, which are public."""
        if self.plan.learning_rate is not None:
            return self.plan
        return self.plan.changed(learning_rate=choose_rate(self))

    @cached_property
    def averaged_from(self) -> float:
        """The first round whose x is part of the averaged output; ∞ where none is."""
        return self.plan.averaged_from(self.warm_rounds)

    @cached_property
    def sampling(self) -> Sampling:
        """How batches are drawn; without privacy they have a fixed size."""
        return self.privacy.sampling if self.privacy else "fixed"

    @property
    def structure(self) -> dict[str, object]:
        """What runs must share to be stacked, besides the task itself and the algorithm's
        numbers."""
        privacy = self.privacy
        return {
            "task": (self.task.name, self.task.parameters),
            "algorithm": self.algorithm.name,
            "plan.local_steps": self.plan.local_steps,
            "plan.steps_by_user": self.plan.steps_by_user is None,
            "plan.rounds": self.plan.rounds,
            "warm rounds": self.warm_rounds,
            "privacy": privacy is None,
            "privacy.sampling": self.sampling,
            "privacy.unit": privacy.unit if privacy else None,
            "privacy.clip": isinstance(privacy.clip, str) if privacy else None,
            "secure": self.secure,
        }

    def known(self, users: Sequence[int], round: int = 1) -> Known:
        """The public numbers of these users' participation in a round; spread and weight are
        (U, 1), and so are the steps where users differ in them."""
        plan, privacy = self.plan, self.privacy
        rows, step_size = torch.as_tensor(users, dtype=torch.long), self.settled.step_size_in(round)
        weight = self.weights[rows].float()[:, None]
        spread: float | Tensor | None = 0.0
        if privacy is not None and privacy.noise > 0:
            spread = None if privacy.clip == "median" else self.spreads(rows, torch.float32)
        steps: int | Tensor = plan.local_steps
        if plan.steps_by_user is not None:
            steps = torch.tensor(plan.steps_by_user)[rows].float()[:, None]
        return Known(steps, step_size, spread, weight)

    @cached_property
    def secret(self) -> bool:
        """Whether batches and noise come from the operating system, and from no seed."""
        return self.privacy is not None and self.privacy.secret

    def seed(self) -> Seed:
        """The seed of a new run of this setting: another one at every call where it comes from the
        operating system."""
        return Seed.of(self.plan.seed, self.secret)

    @cached_property
    def draw_given(self) -> bool:
        """Whether somebody may choose the seed that draws the participants, or know it."""
        return SeedKnowledge(origin_of(self.plan.seed, self.secret)).given

    def randomness(self, seed: Seed | None = None) -> Randomness:
        """The streams of a run from this seed, by default of a new run."""
        return Randomness((seed or self.seed()).value, self.secret)

    @cached_property
    def mechanism(self) -> Mechanism | None:
        """What this run does under its budget, as :meth:`describe` says it."""
        return self.describe()

    def describe(self, delta: Delta | None = None) -> Mechanism | None:
        """What this run does under its budget, as data for the accountant; None without privacy.

        ``delta`` stands in for the budget's. The draw is not hidden: who took part is stored with
        the run.
        """
        if self.privacy is None:
            return None
        plan, privacy, budget = self.plan, self.privacy, self.budget
        return privacy.run(
            self.algorithm,
            rounds=plan.rounds,
            local_steps=plan.local_steps,
            sizes=self.roster.sizes,
            cohort_size=self.cohort_size,
            batch_sizes=self.batch_sizes.numpy(),
            weighting=plan.weighting,
            declared=self.roster.declared,
            delta=budget.delta if delta is None else delta,
            declines=budget.declines,
            secure=self.secure,
            weights=self.weights.tolist() if plan.weighting == "noise" else None,
        )

    def calibrated(self, epsilon: Epsilon, view: View | None = None) -> Run:
        """This setting with the smallest noise that keeps ε towards a view (the budget's), the cost
        of its data's preparation included. With a table of budgets every user has noise of its
        own."""
        run = self.describe()
        if run is None or self.privacy is None:
            raise BadInput(
                "no-privacy", "epsilon is asked of a run without privacy; give it a mechanism"
            )
        view = view or self.budget.view
        costs, _ = charged(self.roster.schema.preparation, run)
        if isinstance(epsilon, Mapping):
            return self.with_noises(self._solve_each(epsilon, costs))
        equal = alike(run)
        who = adversaries(equal, self.budget.colluders)[view.replace("-", "_")]
        return self.with_noises((solve_noise(equal, epsilon, who, costs),))

    def _solve_each(self, table: Mapping[str, float], costs: Sequence[Cost]) -> tuple[float, ...]:
        """σ_i for a table of budgets. Without secure sums a user is hidden by its own noise, which
        keeps ε_i towards everybody; other views may then have a smaller ε."""
        epsilons = budgets_of(checked(table), self.roster)  # type: ignore[arg-type]
        run = self.describe()
        assert run is not None
        if self.secure is None:
            return own_noises(run, epsilons, costs)
        return joint_noises(alike(run), epsilons, costs).noises

    def with_noises(self, noises: tuple[float, ...]) -> Run:
        """This setting with these σ_i, or one for all."""
        assert self.privacy is not None
        several = noises if len(set(noises)) > 1 else None
        given = {"noise": min(noises), "noise_by_user": several, "epsilon": None}
        privacy = self.privacy.changed(**given)
        return replace(self, privacy=privacy)

    def to_dict(self) -> dict[str, Any]:
        """What a run must share with this one to be the same, in plain values: data by title (their
        digest is kept next to it), task, algorithm with its numbers, plan, mechanism and limits. A
        seed of the operating system is not among them."""
        plan = {**_given(_fields(self.settled)), "warm_rounds": self.warm_rounds}
        if self.draw_given:
            plan["seed"] = self.plan.public_seed
        limits: dict[str, Any] = {}
        if self.privacy:
            stored = {n: v for n, v in _fields(self.privacy).items() if n in STORED}
            limits = {"privacy": stored, "budget": _given(_fields(self.budget))}
            if self.privacy.noise_by_user is None:
                del stored["noise_by_user"]
        if self.secure is not None:
            limits["secure"] = _given(_fields(self.secure))
        return {
            "data": {"source": "python", "title": self.roster.title},
            "task": task_identity(self.task).to_json(),
            "algorithm": algorithm_identity(self.algorithm).to_json(),
            "plan": plan,
            **limits,
        }


def _fields(value: Plan | Gaussian | Budget | Secure) -> dict[str, Any]:
    """The fields that were given, by name, in plain values."""
    if isinstance(value, RunTable):
        given = value.model_dump()
    else:
        given = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    return {name: list(one) if isinstance(one, tuple) else one for name, one in given.items()}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
