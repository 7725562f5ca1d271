"""What a run gives back, and its summary."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dpscaffold.config import Run
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.models.model import Model, Raw
from dpscaffold.models.personal import (
    SitesCompared,
    Strength,
    compare_sites,
    noised_personal,
    personal_model,
    user_number,
)
from dpscaffold.models.trained import Origin
from dpscaffold.privacy import Statement, line
from dpscaffold.privacy.numbers import round_up
from dpscaffold.report.notebook import html_table
from dpscaffold.runs.history import HistoryRow, MetricValues
from dpscaffold.runs.summary import Summary
from dpscaffold.tasks.metrics import shown_metric
from dpscaffold.tasks.near import SiteRows
from dpscaffold.training.evaluator import baseline, constant_loss, late
from dpscaffold.training.optimum import Optimum
from dpscaffold.training.verdict import Verdict, cause, verdict


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Args:
        setting: The plan, the mechanism and the algorithm.
        federation: The data.
        history: One row of metrics per evaluated round (the rows of ``metrics.jsonl``).
        params: The parameters of the model, (P,): x^T or the average x̄.
        rounds: The number of rounds that were run.
        ended: ``"completed"``, ``"interrupted"`` or ``"budget"``.
        privacy: The privacy statement, as in ``privacy.json``.
        optimum: The central optimum, if it was asked for.
        folder: The run folder, if one was written.
        seconds: The time of training.
        message: Why the run ended early.
        origin: Where the model comes from, for its model card.
        joining: Local, global and personal metric of every user, where the configuration has
            ``[personal]``; ε does not cover it.
        own: The users' own parameters (M, P), where they were trained during the run.
    """

    setting: Run
    federation: Federation
    history: list[HistoryRow]
    params: Tensor
    rounds: int
    ended: str
    privacy: Statement
    optimum: Optimum | None = None
    folder: Path | None = None
    seconds: float = 0.0
    message: str = ""
    origin: Origin = field(default_factory=Origin)
    joining: SitesCompared | None = None
    own: Tensor | None = field(default=None, repr=False)

    @property
    def final(self) -> HistoryRow:
        """The last evaluated round; without metrics where none was evaluated."""
        return self.history[-1] if self.history else HistoryRow(0)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {value}" for name, value in self._told() if value is not None)
        return f"Result({shown})"

    def _told(self) -> list[tuple[str, Any]]:
        """The few values that represent a run."""
        metric = shown_metric(self.federation.target)
        value, epsilon = self.final.metrics.get(metric), self.privacy.epsilon
        whom = "ε given the draw" if self.privacy.quotes_given else "ε towards the server"
        return [
            ("algorithm", self.setting.label),
            ("data", self.federation.title),
            ("rounds", self.rounds),
            ("ended", self.ended),
            (metric.replace("_", " "), None if value is None else f"{value:.4f}"),
            (whom, None if epsilon is None else round_up(epsilon)),
        ]

    def _repr_html_(self) -> str:
        rows = self._told()
        rows.append(("privacy", line(self.privacy)))
        return html_table("Result", rows)

    @property
    def model(self) -> Model:
        """The trained model, with the preparation that raw rows need."""
        origin = replace(self.origin, rounds=self.rounds)
        return Model.of(self.federation, self.setting.task, self.params, self.privacy, origin)

    def personal(self, user: int | str, strength: Strength = "auto") -> Model:
        """The model of one user: the one that was trained during the run
        (``personal.kind = "mean-regularised"``), or the common model, fitted further to the user's
        own records.

        The former is covered by ε towards the server. The latter is fitted without noise, so
        neither it nor its answers are covered by ε.

        Args:
            user: The user's name or number.
            strength: How strongly it is kept near the common model; ``"auto"`` chooses it by
                records of the user that are held out.

        >>> from dpscaffold import fedavg, Logistic, Plan, synthetic, train
        >>> federation = synthetic(users=5, records=40, dimension=4, classes=3)
        >>> result = train(federation, Logistic(4, 3), fedavg(), Plan(rounds=2, local_steps=2))
        >>> result.personal(1).origin.personal
        '1'
        """
        number = user_number(self.federation, user)
        if self.own is not None:
            self._refuse_strength(strength)
            name = self.federation.names[number]
            return noised_personal(self.model, self.own[number], name)
        rows = SiteRows(*self.federation.train.of(number))
        return personal_model(self.model, rows, self.federation.names[number], strength)

    def compare_sites(self, strength: Strength = "auto") -> SitesCompared:
        """For every user the metric of a local model, of the common one and of a personal one:
        whether joining helps. ε does not cover these numbers."""
        if self.own is not None:
            self._refuse_strength(strength)
        return compare_sites(self.model, self.federation, strength, self.own)

    def _refuse_strength(self, strength: Strength) -> None:
        if strength != "auto":
            raise BadInput(
                "not-applicable",
                f"strength is {strength}, and the personal models of this run were trained with "
                f"its own; leave it out",
            )

    def predict(self, rows: Raw, prepared: bool = False) -> Tensor:
        """The class number, or the number, of each raw row, (N,).

        Raw rows are what the data were before preparation; rows of the federation itself
        (``federation.test.features``) are ``prepared`` already.
        """
        return self.model.predict(rows, prepared)


def baseline_verdict(
    result: Result, constant: MetricValues, named: bool = False
) -> tuple[Verdict | None, str]:
    """Whether the model is better than the ``constant`` baseline; if not, or if its training loss
    is worse, the largest cause and what helps. ``named``: see :func:`~.verdict.cause`."""
    setting, final = result.setting, result.final.metrics
    found = verdict(result.federation, final, constant)
    useless = constant_loss(result.federation, setting.task)
    ridge = 0.5 * setting.plan.regularisation * float(result.params.square().sum())
    loss = final.get("train_loss")
    worse = useless is not None and (loss is None or loss - ridge > useless)
    bad = worse or (found is not None and found.better != "yes")
    return found, cause(setting, result.privacy, worse, named) if bad else ""


def summarise(result: Result, model: str | None = None) -> Summary:
    """How a run ended; ``model`` is where the model is, or why there is none."""
    metrics: dict[str, float | str | None] = {}
    shown, found, warning = None, None, ""
    if result.history:
        shown = shown_metric(result.federation.target)
        constant = baseline(result.federation)
        found, warning = baseline_verdict(result, constant)
        for name in (shown, "train_loss"):
            metrics[f"late_{name}"] = late(result.history, name, result.rounds)
        metrics |= {f"baseline_{name}": value for name, value in constant.items()}
    if result.optimum:
        metrics |= {f"optimum_{name}": value for name, value in result.optimum.metrics.items()}
        metrics["optimum_loss"] = result.optimum.loss
        metrics["optimum_gradient_norm"] = result.optimum.gradient_norm
    return Summary(
        algorithm=result.setting.label,
        data=result.setting.roster.title,
        simulated=result.privacy.seeded,
        ended=result.ended,
        message=result.message,
        rounds=result.rounds,
        seconds=round(result.seconds, 3),
        final=dict(result.final) if result.history else {},
        metric=shown,
        verdict=found.sentence if found else None,
        warning=warning or None,
        model=model,
        metrics=metrics,
    )
