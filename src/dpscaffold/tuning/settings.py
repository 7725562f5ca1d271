"""``[tune]``: which values are tried, and how they are compared."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, model_validator

from dpscaffold.checks import choice
from dpscaffold.config.table import ConfigTable
from dpscaffold.data.config import DataSettings
from dpscaffold.errors import BadInput
from dpscaffold.privacy.selection import TrialCount

#: Ten values of η₀, evenly spaced on a logarithmic scale.
DEFAULT_RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class TuneSettings(ConfigTable):
    """``[tune]``: the grid (dotted keys with lists of values), the folds, and what is compared.

    ``trials`` or ``score_noise`` ask for a valid ε (:mod:`dpscaffold.tuning.private_tuning`).
    """

    grid: dict[str, tuple[Any, ...]] = Field(
        default_factory=lambda: {"plan.learning_rate": DEFAULT_RATES}
    )
    """The values to try, by dotted key; by default ten values of η₀. Example: ``{
    "plan.learning_rate" = [0.1, 0.5, 2.0] }``"""
    folds: int = Field(default=5, ge=2)
    """The number of folds into which each user's training records are split. Example: ``3``"""
    public: DataSettings | None = None
    """A [data] table of public records to tune on (with `trials`: to score on). Without it, tuning
    reads the private records. Example: ``{ source = "digits" }``"""
    metric: str | None = None
    """The metric to compare; by default the main metric of the target (accuracy for classes).
    Example: ``"log_loss"``"""
    trials: float | None = None
    """Tune with a valid ε: a random number of random candidates, each trained privately. This is
    the mean of that number, which is drawn from a geometric distribution; 10 where only
    `score_noise` is given. Example: ``5.0``"""
    score_noise: float | None = None
    """The standard deviation of the noise that every user adds to its number of correct answers (to
    its share of them with unit 'user'), or, in units of `score_bound`, to its sum of losses or
    errors. It asks for private trials too. Example: ``10.0``"""
    score_bound: float | None = None
    """The bound on one record's loss or error, if private records are scored by log_loss, rmse or
    mae. Choose it without looking at the records. Example: ``5.0``"""

    @model_validator(mode="after")
    def _consistent(self) -> TuneSettings:
        if self.metric is not None:
            from dpscaffold.tasks.metrics import METRICS

            choice("tune.metric", self.metric, tuple(METRICS))
        for key, values in self.grid.items():
            if "." not in key or key.startswith(("data.", "tune.")):
                raise BadInput(
                    "unknown-key",
                    f"tune.grid has the key {key!r}; name keys of the run, such as "
                    f"'plan.learning_rate'",
                )
            if not values:
                raise BadInput("empty-list", f"tune.grid.{key} is empty; list the values to try")
        if not self.grid:
            raise BadInput(
                "empty-list",
                "tune.grid is empty; list the values to try, or leave it out for ten values of η₀",
            )
        self._check_private()
        return self

    def _check_private(self) -> None:
        """Keys that do not go together are refused."""
        if not self.private:
            if self.score_bound is not None:
                raise BadInput(
                    "not-applicable",
                    f"tune.score_bound is {self.score_bound:g}, and neither tune.trials nor "
                    f"tune.score_noise asks for private trials; give one, or leave it out",
                )
            return
        self._check_score_noise()
        self._check_bound()
        _ = self.stopping_law

    def _check_score_noise(self) -> None:
        if self.score_noise is None:
            return
        if self.public is not None:
            raise BadInput(
                "not-applicable",
                f"tune.score_noise is {self.score_noise:g}, and candidates are scored on "
                f"[tune.public] records, which need none; leave one of them out",
            )
        if not 0 < self.score_noise < math.inf:
            raise BadInput(
                "out-of-range",
                f"tune.score_noise is {self.score_noise:g}; give a finite number above 0",
            )

    def _check_bound(self) -> None:
        if self.score_bound is None:
            return
        if not 0 < self.score_bound < math.inf:
            raise BadInput(
                "out-of-range",
                f"tune.score_bound is {self.score_bound:g}; give a finite number above 0",
            )
        if self.public is not None:
            raise BadInput(
                "not-applicable",
                f"tune.score_bound is {self.score_bound:g}, and candidates are scored on "
                f"[tune.public] records, which need none; leave one of them out",
            )

    @property
    def private(self) -> bool:
        """Whether to tune with a valid ε."""
        return self.trials is not None or self.score_noise is not None

    @property
    def stopping_law(self) -> TrialCount:
        """The law of the number of private trials."""
        try:
            return TrialCount(10.0 if self.trials is None else self.trials)
        except BadInput as error:
            raise BadInput(error.code, f"tune.trials: {error}") from error
