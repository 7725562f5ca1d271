"""A personal model that may leave its site: fine-tuned by noised steps, with an ε of its own.

K steps over all records of the site, from the common model x: w ← w − η·H̃(w), where H̃ is the mean
of clipped gradients with Gaussian noise. They are the steps of one participation, and accounted as
such. What is given out is x + a(w − x), where a is estimated from w, x and the known noise (James
and Stein), which is post-processing. The composed ε is that of the run and of these steps: ε and δ
add (:mod:`dpscaffold.privacy.further`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from dpscaffold.algorithms import Broadcast, fedavg
from dpscaffold.algorithms.mean_regularised import given_out, mean_regularised
from dpscaffold.engines.participation.drawing import Row
from dpscaffold.engines.participation.participate import participate
from dpscaffold.engines.participation.records import LocalRecords
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.models.loading import find_model
from dpscaffold.models.model import Model
from dpscaffold.models.personal import COMPOSED_EPSILON, Strength
from dpscaffold.models.storage import WITHIN
from dpscaffold.privacy import Mechanism, PrivacyError
from dpscaffold.privacy.bounds import CAP
from dpscaffold.privacy.calibrate import calibrate_noise
from dpscaffold.privacy.further import FurtherRelease, with_further
from dpscaffold.privacy.ledger import spent
from dpscaffold.privacy.mechanism import Relation, Sampling
from dpscaffold.privacy.preparation import Remark
from dpscaffold.privacy.statement_types import Statement
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.journal import Journal
from dpscaffold.setting.gaussian import Gaussian
from dpscaffold.setting.plan import Plan
from dpscaffold.tasks import Task
from dpscaffold.tasks.clipping import prepared
from dpscaffold.tasks.near import SiteRows

#: The journal, in a run folder, of the noised personal models that were made of its model.
RELEASES = "noised.jsonl"
#: The name of the mechanism in statements.
NAME = "noised fine-tuning"


@dataclass(frozen=True)
class NoisedSteps:
    """The noised steps of one site: their number K and size η, and what the accountant needs.

    Args:
        epsilon: ε of these steps alone.
        delta: δ of these steps alone.
        clip: C.
        sampling: The run's kind of batches, which decides on the neighbours.
        neighbours: The run's neighbouring relation.
        records: R, the public number of records, over which a mean is taken.
        declared: Whether R was declared without looking at the records.
        steps: K.
        step_size: η.

    >>> steps = NoisedSteps(1.0, 1e-5, 1.0, "fixed", "replace-one", 200, steps=20)
    >>> 0.98 < steps.spent <= 1.0
    True
    """

    epsilon: float
    delta: float
    clip: float
    sampling: Sampling
    neighbours: Relation
    records: int
    declared: bool = False
    steps: int = 50
    step_size: float = 0.5

    @cached_property
    def mechanism(self) -> Gaussian:
        """The noised query, with the smallest noise that keeps ε; drawn by the operating system."""
        shape = Gaussian(self.clip, 1.0, self.sampling, secret=True, neighbours=self.neighbours)
        try:
            noise = calibrate_noise(self._described(shape), self.epsilon, CAP)
        except PrivacyError as error:
            raise BadInput(error.code, f"--epsilon of the personal model: {error}") from error
        return replace(shape, noise=noise)

    @property
    def run(self) -> Mechanism:
        """The steps as the accountant sees them: one participation of one user."""
        return self._described(self.mechanism)

    @cached_property
    def spent(self) -> float:
        """ε of these steps alone."""
        return spent(self.run, 1, self.run.groups[0])

    @property
    def release(self) -> FurtherRelease:
        """What they add to the run's ε and δ."""
        return FurtherRelease(NAME, self.spent, self.delta)

    @property
    def plan(self) -> Plan:
        """K steps over all records."""
        return Plan(
            rounds=1,
            local_steps=self.steps,
            user_ratio=1.0,
            data_ratio=1.0,
            learning_rate=self.step_size * self.steps,
            regularisation=0.0,
        )

    def _described(self, mechanism: Gaussian) -> Mechanism:
        return mechanism.run(
            None,
            rounds=1,
            local_steps=self.steps,
            sizes=[self.records],
            cohort_size=1,
            batch_sizes=[self.records],
            weighting="uniform",
            aggregation="mean",
            declared=self.declared,
            delta=self.delta,
        )


def steps_after(
    run: Mechanism,
    records: int,
    epsilon: float,
    declared: bool = False,
    steps: int = 50,
    step_size: float = 0.5,
    delta: float | None = None,
) -> NoisedSteps:
    """The noised steps of a site after a run, for the run's own neighbours, clip and δ.

    Args:
        run: The run's mechanism.
        records: The site's public number of records.
        epsilon: ε of the steps.
        declared: Whether that number was declared without looking at the records.
        steps: K.
        step_size: η.
        delta: δ of the steps; by default the run's.
    """
    for name, value in (("--epsilon", epsilon), ("--step-size", step_size), ("--steps", steps)):
        if not (math.isfinite(value) and value > 0):
            raise BadInput("out-of-range", f"{name} is {value:g}; give a number above 0")
    if run.unit == "user":
        raise BadInput(
            "not-applicable",
            "the run protects all records of a site together (privacy.unit = 'user'), and a "
            "personal model is made of those alone; make it without --noised and keep it at the "
            "site",
        )
    if isinstance(run.clip, str):
        raise BadInput(
            "median-clip",
            "the run's clip bound was computed from records, so it has no guarantee; leave "
            "--noised out and keep the model at the site",
        )
    if run.relation == "add-remove" and not declared:
        raise BadInput(
            "not-applicable",
            "the run hides whether a record is there at all, and the number of rows of a table "
            "shows it; leave --noised out and keep the model at the site",
        )
    given = (epsilon, run.delta if delta is None else delta, float(run.clip), run.sampling)
    return NoisedSteps(*given, run.relation, records, declared, int(steps), step_size)


def noised_fit(
    task: Task,
    rows: SiteRows,
    common: Tensor,
    given: NoisedSteps,
    strength: Strength = "auto",
    used: Tensor | None = None,
) -> Tensor:
    """The parameters (P,) after the noised steps. Every call draws new noise from the operating
    system, in simulations too: it is a release.

    Args:
        task: The model and its loss.
        rows: All records of the site, those that contribute nothing included.
        common: x, (P,).
        given: The steps.
        strength: λ of the pull towards x, which is added after the noise; ``"auto"`` pulls nothing
            and shrinks the result towards x by the known noise.
        used: Which records contribute, (N,); None means all.
    """
    features, squares = prepared(task, rows.features, common.device)
    weight = None if used is None or bool(used.all()) else used.float()
    records = LocalRecords(features, squares, rows.labels, [0], weight=weight)
    algorithm = mean_regularised(fedavg(), strength)
    declared = given.records if given.declared else None
    sized = (0, len(rows), given.records, given.plan, given.mechanism)
    randomness, step_size = Randomness(0, secret=True), given.plan.step_size_in(1)
    row = Row(*sized, randomness, step_size, declared=declared)
    told = ("pull", "pull_noise") if strength == "auto" else ()
    shared = {name: torch.zeros(1, 1) for name in told}
    memory = {
        name: torch.zeros(1, task.parameters if kind == "vector" else 1)
        for name, kind in algorithm.remembers.items()
    }
    broadcast = Broadcast(2, common[None], shared)  # no first round, in which x begins
    _, kept = participate(task, algorithm, [row], records, broadcast, memory)
    return given_out(kept, common)[0]


def composed_personal(model: Model, params: Tensor, site: str, said: Statement) -> Model:
    """Noised personal parameters as a model with the composed statement."""
    return replace(
        model,
        params=params,
        preparation=(*model.preparation, Remark(COMPOSED_EPSILON, "none needed")),
        privacy=said,
        origin=replace(model.origin, personal=site),
    )


def noised_models(model: Model, federation: Federation, given: Sequence[NoisedSteps]) -> Tensor:
    """The noised personal parameters of all users, (M, P)."""
    found = []
    for user, steps in enumerate(given):
        rows = SiteRows(*federation.train.of(user))
        found.append(noised_fit(model.task, rows, model.params, steps))
    return torch.stack(found)


def composed(model: Model, given: NoisedSteps, folder: Path, site: str) -> Statement:
    """The statement of a model that these steps will give, written to the journal of the common
    model's folder **before** a step is taken. Earlier noised models of that folder count too,
    whatever site they name, because nobody checks whose rows a table holds."""
    assert model.privacy is not None
    journal = Journal(_journal_of(folder))
    said = with_further(model.privacy, [*released(folder), given.release])
    line = {"event": "noised", "site": site, "epsilon": given.spent, "delta": given.delta}
    mechanism = {"steps": given.steps, "records": given.records, **given.mechanism.to_json()}
    journal.append({**line, "mechanism": mechanism})
    return said


def released(folder: Path) -> list[FurtherRelease]:
    """All noised models that were made of the model of a folder."""
    lines = Journal(_journal_of(folder)).lines()
    return [FurtherRelease(NAME, line["epsilon"], line["delta"]) for line in lines]


def _journal_of(folder: Path) -> Path:
    """The journal of a run folder, or of a model's own folder. The model of a run is written again
    on resume, so its journal is next to it."""
    place = find_model(folder)
    within_run = place.name == WITHIN and (place.parent / "config.toml").exists()
    return (place.parent if within_run else place) / RELEASES
