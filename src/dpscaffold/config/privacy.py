"""``[privacy]``: the mechanism and the limits."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PrivateAttr, model_validator

from dpscaffold.config.budget import Budget, View
from dpscaffold.config.budgets import checked
from dpscaffold.config.gaussian import STORED, Gaussian
from dpscaffold.config.table import ConfigTable
from dpscaffold.data.config import PathText
from dpscaffold.errors import BadInput
from dpscaffold.privacy.mechanism import Clip, Delta, Relation, Sampling, Unit


class PrivacySettings(ConfigTable):
    """``[privacy]``: the mechanism (:class:`~dpscaffold.Gaussian`) and the limits
    (:class:`~dpscaffold.Budget`).

    Give ``noise``, or ``epsilon`` with the ``view`` it is promised to, from which the noise is
    solved. ``release`` is the recipe for a model to publish
    (:mod:`dpscaffold.config.release`), ``allow`` the exceptions from its rules.
    """

    clip: Clip = 1.0
    """C, the largest gradient norm of a record. 'median' is the paper's heuristic, without a
    guarantee. Value: a number from 1e-20 to 1e30, or 'median'. Example: ``1.5``"""
    noise: float | None = None
    """σ_g, the noise in units of the sensitivity 2C/b. It is half of what Opacus calls the noise
    multiplier. Value: a number, 0 or more. Example: ``30.0``"""
    noise_by_user: tuple[float, ...] | None = None
    """σ_i of each user, in the users' order, if they differ; 'train' writes what it solved for from
    a table of budgets. Value: a list of numbers above 0, the smallest of which is privacy.noise.
    Example: ``[30.0, 60.0]``"""
    epsilon: float | dict[str, float] | None = None
    """The ε to spend, instead of noise: the noise is solved from it. A table gives users budgets of
    their own, by name; the key 'default' is for all that it does not name. Value: a number above 0,
    or a table of them. Example: ``1.0``"""
    view: View = "server"
    """The adversary that epsilon and target_epsilon refer to. Example: ``"third-party"``"""
    colluders: int | None = None
    """The number of participants that pool what they know (view 'participant'). Value: an
    integer, 1 or more. Example: ``2``"""
    sampling: Sampling = "fixed"
    """Batches of a fixed size (ε is for replacing one record), or Poisson batches (ε is for
    removing the content of one record). Example: ``"poisson"``"""
    unit: Unit = "record"
    """What is protected: one record, or all records of one user. Example: ``"user"``"""
    secret: bool = False
    """Whether batches and noise are drawn from the operating system instead of plan.seed. Only this
    gives a real guarantee. Example: ``true``"""
    neighbours: Relation | None = None
    """The neighbouring relation; by default replace-one, and zero-out with Poisson batches.
    Example: ``"zero-out"``"""
    delta: Delta | None = None
    """δ; by default 0.1 divided by the number of training records, or by the number of users with
    unit 'user'. Value: a number above 0 and below 1, or '1/records'. Example: ``1e-05``"""
    user_epsilon: float | None = None
    """A user declines before its own ε, given who took part, would exceed this value. It holds over
    all rounds, later extensions included. Value: a number above 0. Example: ``2.0``"""
    target_epsilon: float | None = None
    """Training stops before ε in the given view would exceed this value. Value: a number above 0.
    Example: ``3.0``"""
    budget_file: PathText | None = None
    """A budget that several runs over the same records share (dpscaffold privacy FILE).
    Example: ``"budget.jsonl"``"""
    release: bool | None = None
    """Whether the model is meant for release: secret noise, participants that nobody chose, and
    nothing left unprotected. Example: ``true``"""
    allow: list[Literal["unprotected-preprocessing", "median-clip"]] | None = None
    """Exceptions from the rules of a release. Example: ``["median-clip"]``"""
    _gaussian: Gaussian = PrivateAttr()
    _budget: Budget = PrivateAttr()

    @model_validator(mode="after")
    def _consistent(self) -> PrivacySettings:
        if self.allow is not None and not self.release:
            raise BadInput(
                "not-applicable",
                "privacy.allow is given, which overrules what a release refuses, and nothing is "
                "released; add privacy.release = true or leave it out",
            )
        if (self.noise is None) == (self.epsilon is None):
            both = self.noise is not None
            given = "both are given" if both else "neither is given"
            remedy = "set privacy.noise or privacy.epsilon"
            if both:
                remedy = "leave one out (--set privacy.noise=, or --set privacy.epsilon=)"
            raise BadInput(
                "noise-or-epsilon", f"privacy needs either noise or epsilon, and {given}; {remedy}"
            )
        noise = 1.0 if self.noise is None else self.noise
        fields: dict[str, Any] = {name: getattr(self, name) for name in STORED}
        fields |= {"noise": noise, "secret": self.hidden}
        if self.epsilon is not None:
            checked(self.epsilon)
        if self.noise_by_user is not None and self.noise is None:
            raise BadInput(
                "missing-key",
                f"privacy.noise_by_user is given without privacy.noise; set privacy.noise to the "
                f"smallest of it, {min(self.noise_by_user, default=1.0)!r}",
            )
        self._gaussian = Gaussian(**fields)
        self._budget = Budget(
            self.delta,
            self.user_epsilon,
            self.target_epsilon,
            self.view,
            self.budget_file,
            1 if self.colluders is None else self.colluders,
        )
        return self

    @property
    def mechanism(self) -> Gaussian:
        """The mechanism; at noise 1 where the noise is to be solved for."""
        return self._gaussian

    @property
    def hidden(self) -> bool:
        """Whether noise and batches are secret; those of a release always are."""
        return self.secret or bool(self.release)

    @property
    def budget(self) -> Budget:
        """The limits."""
        return self._budget
