"""One run as a value: which data, which task, which algorithm, under which plan and privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Known
from dpscaffold.config.budgets import heterogeneity_of, noise_weight
from dpscaffold.config.consistency import check_costs, check_privacy, check_rounds, check_sums
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.identity import algorithm_identity, task_identity
from dpscaffold.config.plan import Plan
from dpscaffold.config.rate import PublicNumbers, choose_rate
from dpscaffold.config.secure import Secure, SumPlan, check_secure
from dpscaffold.errors import BadInput
from dpscaffold.federation.roster import Roster
from dpscaffold.privacy import Mechanism
from dpscaffold.privacy.ledger import USER_BUDGET
from dpscaffold.privacy.mechanism import Delta, Sampling
from dpscaffold.privacy.seeds import Seed, SeedKnowledge, origin_of
from dpscaffold.randomness.streams import Randomness
from dpscaffold.tasks import Task
from dpscaffold.tasks.fitting import check_task

#: Keys of ``[privacy]`` that say how noise was found or what a release overlooks: runs that differ
#: in nothing else are the same run.
NOT_IDENTITY = {"epsilon", "release"}


@dataclass(frozen=True)
class Run:
    """Everything that determines a run but the records, checked as a whole: what parties agree on.

    No record can be reached from here, so it can be sent, compared, accounted and calibrated by
    anyone; engines and evaluators take the federation next to it.
    :func:`~dpscaffold.config.make_run` makes one; its noise is known.

    The numbers that engines use (m, b_i, the warm rounds) and the numbers that are accounted come
    from the same properties, so what runs and what is stated cannot differ.

    ``absent`` says why users may stay away although they were drawn (at real sites they always
    may). Theorems that count everybody's noise then refuse.
    """

    roster: Roster
    task: Task
    algorithm: Algorithm
    plan: Plan
    privacy: Gaussian | None = None
    secure: Secure | None = None
    absent: str | None = None

    def __post_init__(self) -> None:
        self._check_parts()
        check_task(self.task, self.roster.schema, self.plan.public_seed)
        if self.secure is not None:
            check_secure(self.secure, self.mechanism, self.algorithm, self.roster.sizes)
            _ = self.sums  # refuses numbers that do not fit its integers

    def _check_parts(self) -> None:
        """Refuse parts that do not make a run."""
        plan, algorithm, schema = self.plan, self.algorithm, self.roster.schema
        if algorithm.sums is not None:
            check_sums(algorithm, plan, self.privacy, schema.target)
        _ = self.batch_sizes, self.cohort_size  # refuses what cannot be drawn
        check_costs(schema.preparation, self.secret)
        if self.sampling != "poisson" and self.roster.declared:
            raise BadInput(
                "not-applicable",
                "data.declared_sizes is given, but batches of fixed size need the true sizes; set "
                "privacy.sampling = 'poisson' or leave the sizes out",
            )
        check_rounds(plan, self.warm_rounds)
        if self.privacy is not None:
            check_privacy(self.privacy, algorithm, plan, self.secure, self.users)

    @cached_property
    def sums(self) -> SumPlan | None:
        """The secure sums of this run; None where the server sees every upload."""
        if self.secure is None or self.privacy is None:
            return None
        privacy, clip, batches = self.privacy, self.privacy.clip, self.batch_sizes.tolist()
        assert not isinstance(clip, str)
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
        return self.privacy.with_noise(noise)

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
        batches = self.batch_sizes[rows].double()[:, None]
        spread: Tensor = torch.ones_like(batches) * privacy.scale(privacy.clip, batches)
        if privacy.noise_by_user is not None:
            noises = torch.tensor(privacy.noise_by_user, dtype=torch.float64)[rows][:, None]
            spread = spread * (noises / privacy.noise)
        return spread.to(dtype)

    @cached_property
    def site_noise(self) -> Tensor:
        """The standard deviation of every user's noise as a round's mean counts it, (M,):
        2Cσ_i/b_i, times w_i/w̄ where the mean is weighted. Zeros where nothing is noised."""
        if self.privacy is None or self.privacy.noise == 0:
            return torch.zeros(self.users, dtype=torch.float64)
        noise: Tensor = self.spreads()[:, 0] * self.weights / self.weights.mean()
        return noise

    @property
    def round_noise(self) -> float:
        """The standard deviation of the noise on one coordinate of a round's mean gradient, taken
        over the m participants of a round and one local step.

        >>> from dpscaffold import Gaussian, Logistic, Plan, fedavg, synthetic
        >>> plan = Plan(local_steps=1, user_ratio=1.0, data_ratio=1.0, weighting="records")
        >>> roster = synthetic(users=4, records=50).roster
        >>> run = Run(roster, Logistic(40, 10), fedavg(), plan, Gaussian(1.0, 10.0, "poisson"))
        >>> round(run.round_noise, 9)  # 2Cσ_g/R_i = 0.5 for each of four sites
        0.25
        """
        return math.sqrt(float(self.site_noise.square().mean()) / self.cohort_size)

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
        given = (self.task, self.roster.schema, self.algorithm, self.plan)
        known = PublicNumbers(*given)
        if self.privacy is not None and self.privacy.noise > 0:
            clip = 1.0 if isinstance(self.privacy.clip, str) else self.privacy.clip
            noised = replace(self, privacy=self.privacy.changed(clip=clip))
            known = PublicNumbers(*given, clip, noised.round_noise)
        return self.plan.changed(learning_rate=choose_rate(known))

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
        """What runs must share to be stacked, besides their task and their algorithm's numbers."""
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
        spread: float | Tensor | None = 0.0
        if privacy is not None and privacy.noise > 0:
            spread = None if privacy.clip == "median" else self.spreads(rows, torch.float32)
        steps: int | Tensor = plan.local_steps
        if plan.steps_by_user is not None:
            steps = torch.tensor(plan.steps_by_user)[rows].float()[:, None]
        return Known(steps, step_size, spread, self.weights[rows].float()[:, None])

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

    @property
    def limits(self) -> Gaussian:
        """The limits of what is spent; a run without privacy has none to ask for."""
        assert self.privacy is not None
        return self.privacy

    @cached_property
    def declines(self) -> str | None:
        """Why a drawn user may stay away: its budget is spent, or what ``absent`` says."""
        capped = self.privacy is not None and self.privacy.user_epsilon is not None
        reasons = [USER_BUDGET] * capped + [self.absent] * (self.absent is not None)
        return ", ".join(filter(None, reasons)) or None

    @cached_property
    def mechanism(self) -> Mechanism | None:
        """What this run does under its limits, as :meth:`describe` says it."""
        return self.describe()

    def describe(self, delta: Delta | None = None) -> Mechanism | None:
        """What this run does under its limits, as data for the accountant; None without privacy.

        ``delta`` stands in for that of the run. The draw is not hidden: who took part is stored
        with the run.
        """
        if self.privacy is None:
            return None
        return self.privacy.run(
            self.algorithm,
            self.plan,
            self.roster.sizes,
            self.cohort_size,
            self.batch_sizes.tolist(),
            declared=self.roster.declared,
            delta=self.privacy.delta if delta is None else delta,
            declines=self.declines,
            secure=self.secure,
            weights=self.weights.tolist() if self.plan.weighting == "noise" else None,
            noises=self.privacy.noise_by_user,
        )

    def to_dict(self) -> dict[str, Any]:
        """What a run must share with this one to be the same, in plain values: data by title (their
        digest is kept next to it), task, algorithm with its numbers, plan, mechanism and limits. A
        seed of the operating system is not among them."""
        plan = {**self.settled.stored(), "warm_rounds": self.warm_rounds}
        if self.draw_given:
            plan["seed"] = self.plan.public_seed
        tables = {
            "data": {"source": "python", "title": self.roster.title},
            "task": task_identity(self.task),
            "algorithm": algorithm_identity(self.algorithm),
            "plan": plan,
        }
        if self.privacy is not None:
            tables["privacy"] = self.privacy.stored(NOT_IDENTITY)
            if self.absent is not None:
                tables["privacy"]["absent"] = self.absent
        if self.secure is not None:
            tables["secure"] = self.secure.stored()
        return tables
