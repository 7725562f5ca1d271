"""``[privacy]``: the mechanism and the limits."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import PrivateAttr, model_validator

from dpscaffold.config.table import ConfigTable
from dpscaffold.data.config import PathText
from dpscaffold.errors import BadInput
from dpscaffold.setting.budget import Budget
from dpscaffold.setting.gaussian import Gaussian


class PrivacySettings(ConfigTable):
    """``[privacy]``: the mechanism (:class:`~dpscaffold.Gaussian`) and the limits
    (:class:`~dpscaffold.Budget`).

    Give ``noise``, or ``epsilon`` with the ``view`` it is promised to, from which the noise is
    solved. ``release`` is the recipe for a model that is handed out
    (:mod:`dpscaffold.config.release`), ``allow`` what it is told to overlook.
    """

    clip: float | Literal["median"] = 1.0
    noise: float | None = None
    epsilon: float | None = None
    view: Literal["server", "third-party", "participant", "paper-third-party"] = "server"
    colluders: int | None = None
    sampling: Literal["fixed", "poisson"] = "fixed"
    unit: Literal["record", "user"] = "record"
    secret: bool = False
    neighbours: Literal["replace-one", "zero-out", "add-remove"] | None = None
    delta: float | Literal["1/records"] | None = None
    max_participations: int | None = None
    user_epsilon: float | None = None
    target_epsilon: float | None = None
    budget_file: PathText | None = None
    release: bool | None = None
    allow: list[Literal["unprotected-preprocessing", "median-clip"]] | None = None
    _gaussian: Gaussian = PrivateAttr()
    _budget: Budget = PrivateAttr()

    @model_validator(mode="after")
    def _consistent(self) -> PrivacySettings:
        if self.allow is not None and not self.release:
            raise BadInput(
                "privacy.allow is given, which overrules what a release refuses, and nothing is "
                "released; add privacy.release = true (--release) or leave it out"
            )
        if (self.noise is None) == (self.epsilon is None):
            both = self.noise is not None
            given = "both are given" if both else "neither is given"
            remedy = "set privacy.noise or privacy.epsilon"
            if both:
                remedy = "leave one out (--unset privacy.noise, or --unset privacy.epsilon)"
            raise BadInput(f"privacy needs either noise or epsilon, and {given}; {remedy}")
        if self.epsilon is not None and not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise BadInput(
                f"privacy.epsilon is {self.epsilon:g}; give a number above 0, such as 2 (smaller "
                f"is stronger)"
            )
        self._gaussian = Gaussian(
            self.clip,
            1.0 if self.noise is None else self.noise,
            self.sampling,
            self.unit,
            self.hidden,
            self.neighbours,
        )
        self._budget = Budget(
            self.delta,
            self.max_participations,
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
