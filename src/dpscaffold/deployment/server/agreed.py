"""What a server makes of an offer once its sites have answered: the roster, the setting, the model
and its score on public data. None of it needs a record."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from dpscaffold.config import Gaussian, Run, make_run
from dpscaffold.deployment.protocol.agreement import Offer, SchemaSettings
from dpscaffold.deployment.protocol.enrolment import EnrolledRun
from dpscaffold.engine import State
from dpscaffold.federation.roster import Roster
from dpscaffold.federation.schema import Schema
from dpscaffold.models.model import Model
from dpscaffold.models.trained import Origin
from dpscaffold.privacy.page import Statement
from dpscaffold.privacy.seeds import Seed
from dpscaffold.runs.ledger import MAY_STAY_AWAY
from dpscaffold.tasks import Task
from dpscaffold.tasks.metrics import METRICS
from dpscaffold.tasks.ridge import RidgeSums

#: What a model scores on public test data.
Scorer = Callable[[Tensor], dict[str, float]]


def roster_of(offer: Offer, enrolled: EnrolledRun) -> Roster:
    """What a server knows of its sites: names, sizes and the schema, and no record.

    Where sizes are hidden, everybody has the size of which a batch is one record: with a user as
    unit no number of the run depends on it.
    """
    rows, users = offer.rows, len(enrolled.names)
    sizes = enrolled.sizes or (math.ceil(1 / offer.plan.data_ratio),) * users
    columns = rows.columns or tuple(map(str, range(rows.width)))
    coded = tuple(rows.categories.items())
    described = Schema(columns, coded, rows.target, offer.steps(users), rows.dimension)
    title = f"{users} sites"
    return Roster(sizes, enrolled.names, described, title, enrolled.declared)


def model_of(rows: SchemaSettings, setting: Run, state: State, said: Statement | None) -> Model:
    """The model of a deployed run: raw rows are coded as the sites code theirs, and prepared by
    the public steps that were offered."""
    origin = Origin(setting.label, setting.roster.title, state.round, rows.label)
    task, params = trained(setting, state.output.cpu())
    return model_on(rows, setting.roster, task, params, origin, said)


def model_on(
    rows: SchemaSettings,
    roster: Roster,
    task: Task,
    params: Tensor,
    origin: Origin,
    said: Statement | None = None,
) -> Model:
    """Trained parameters with the schema and the public steps that were offered."""
    schema = roster.schema
    steps = (rows.coding, *schema.preparation)
    return Model(task, params, steps, schema.target, schema, said, origin)


def trained(setting: Run, params: Tensor) -> tuple[Task, Tensor]:
    """The task and the parameters that predict: of bounded sums, the linear model that they
    give."""
    task = setting.task
    return task.trained(params) if isinstance(task, RidgeSums) else (task, params)


def trial_of(offer: Offer, sizes: tuple[int, ...], limits: Gaussian | None = None) -> Run:
    """The run on sites of these sizes, to check an offer before the sites are known."""
    poisson = offer.privacy is not None and offer.privacy.sampling == "poisson"
    trial = EnrolledRun("", {}, ("any",) * len(sizes), "", sizes, declared=poisson)
    return setting_of(offer.model_copy(update={"noises": None}), trial, limits)


def setting_of(
    offer: Offer,
    enrolled: EnrolledRun,
    limits: Gaussian | None = None,
    absent: str | None = MAY_STAY_AWAY,
) -> Run:
    """The run on the roster that the sites' answers made, within the limits of whoever asks."""
    return make_run(
        roster_of(offer, enrolled),
        offer.build_task(),
        offer.build_algorithm(),
        offer.plan,
        offer.privacy_on(enrolled.names, limits),
        offer.secure,
        absent,
    )


def seed_of(setting: Run, enrolled: EnrolledRun) -> Seed:
    """What the participants are drawn from: the seed that all sites made, or a rehearsal's.

    Neither is a secret of the run folder, so the mark needs no key: it is made again on resume.
    """
    if setting.secret:
        return Seed("sites", enrolled.seed, key="")
    return replace(setting.seed(), key="")


def evaluation_on(offer: Offer, features: Tensor, labels: Tensor) -> Scorer:
    """Accuracy (of a number RMSE, in its own units) and loss of a model on public test data."""
    task = offer.build_task()
    prepared = task.prepare(features)

    def score(params: Tensor) -> dict[str, float]:
        scores = task.scores(params, prepared)
        found = {"test_loss": float(task.losses(params, prepared, labels).mean())}
        if offer.rows.classes and scores.shape[1] > 1:
            found["test_accuracy"] = float((scores.argmax(dim=1) == labels).float().mean())
        if not offer.rows.classes:
            target = offer.rows.target
            found["test_rmse"] = METRICS["rmse"].of(target.answers(scores), target.restored(labels))
        return found

    return score
