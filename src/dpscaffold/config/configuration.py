"""All tables together: the run that they describe, and what is written next to a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from dpscaffold.algorithms import ALGORITHMS, ITERATIVE, Algorithm
from dpscaffold.checks import shares
from dpscaffold.config.algorithm import AlgorithmSettings
from dpscaffold.config.extras import FactsSettings, StoppingSettings
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.personal import PersonalSettings, trained_by
from dpscaffold.config.plan import ONE_ROUND, Plan
from dpscaffold.config.secure import Secure
from dpscaffold.config.table import ConfigTable
from dpscaffold.config.task import TaskSettings
from dpscaffold.data.config import DataSettings, Synthetic
from dpscaffold.privacy import Mechanism
from dpscaffold.privacy.ledger import USER_BUDGET

if TYPE_CHECKING:
    from dpscaffold.config.run import Run
    from dpscaffold.federation import Federation
    from dpscaffold.federation.roster import Roster


def with_one_round(tables: Any) -> Any:
    """The tables of a configuration, with the plan of one round where the algorithm takes a single
    sum; a key of ``[plan]`` that is given stays.

    >>> with_one_round({"algorithm": {"name": "fedavg"}})
    {'algorithm': {'name': 'fedavg'}}
    >>> with_one_round({"algorithm": {"name": ["no name"]}})  # refused later, with its key
    {'algorithm': {'name': ['no name']}}
    """
    algorithm = tables.get("algorithm") if isinstance(tables, Mapping) else None
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
    plan = tables.get("plan", {}) if isinstance(tables, Mapping) else None
    once = isinstance(name, str) and name in ALGORITHMS and name not in ITERATIVE
    if not once or not isinstance(plan, Mapping):
        return tables
    return {**tables, "plan": {**ONE_ROUND, **plan}}


class Configuration(ConfigTable):
    """A whole configuration.

    >>> from dpscaffold.config import load
    >>> settings = load(None, ["plan.rounds=5", "algorithm.name=fedavg"])
    >>> settings.plan.rounds, settings.algorithm.name
    (5, 'fedavg')
    """

    data: DataSettings = Field(default_factory=Synthetic)
    task: TaskSettings = TaskSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    plan: Plan = Plan()
    privacy: Gaussian | None = None
    secure: Secure | None = None
    facts: FactsSettings | None = None
    stopping: StoppingSettings | None = None
    personal: PersonalSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_round(cls, tables: Any) -> Any:
        return with_one_round(tables)

    def setting(self, data: Federation | Roster) -> Run:
        """The run this configuration describes on those data, of which the roster is all that
        matters; solves for the noise where ε is given."""
        from dpscaffold.config.making import make_run  # its numbers are tensors
        from dpscaffold.federation.roster import Roster

        roster, plan = data if isinstance(data, Roster) else data.roster, self.plan
        task = self.task.build(roster.schema)
        return make_run(roster, task, self.trains, plan, self.privacy, self.secure)

    @property
    def trains(self) -> Algorithm:
        """The algorithm that runs: that of ``[algorithm]``, with a model for each user where
        ``[personal]`` asks for one during training."""
        return trained_by(self.algorithm.build(), self.personal)

    @property
    def home(self) -> str | None:
        """The folder of the configuration, where it names a file of a user's own."""
        own = self.task.module is not None or ":" in self.algorithm.name
        folder = self.task.folder or self.algorithm.folder  # a table that is left out knows none
        return str(folder.absolute()) if own and folder is not None else None

    def describe(self, sizes: Sequence[int]) -> Mechanism | None:
        """What the run would do with users of these sizes, for the accountant; None without
        privacy. Noise that is to be solved for counts as 1; weights by noise are
        refused, as they need a whole setting."""
        given = self.privacy
        if given is None:
            return None
        plan = self.plan
        return given.run(
            self.trains,
            plan,
            sizes,
            **shares(sizes, plan.user_ratio, plan.data_ratio),
            declared=self.data.declared_sizes is not None,
            delta=given.delta,
            declines=None if given.user_epsilon is None else USER_BUDGET,
            secure=self.secure,
        )

    def resolved(self, setting: Run) -> dict[str, Any]:
        """As written to ``config.toml``: every key spelled out, the noise solved, nothing left to
        defaults."""
        tables = self.model_dump(mode="json", exclude_none=True)
        if self.privacy is not None and setting.privacy is not None:
            tables["privacy"].pop("epsilon", None)
            tables["privacy"]["noise"] = setting.privacy.stored()["noise"]
        tables["plan"]["learning_rate"] = setting.settled.learning_rate
        tables["plan"]["warm_rounds"] = setting.warm_rounds
        if setting.draw_given:  # a seed of the operating system is kept elsewhere
            tables["plan"]["seed"] = setting.plan.public_seed
        return tables
