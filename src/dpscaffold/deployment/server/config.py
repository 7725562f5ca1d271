"""The server's configuration: the training one, with ``[schema]`` and ``[deploy]`` in place of
``[data]``, and an optional ``[evaluate]`` with public test data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, model_validator

from dpscaffold.config import (
    AlgorithmSettings,
    ConfigTable,
    FactsSettings,
    TaskSettings,
)
from dpscaffold.config.configuration import with_one_round
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.personal import PersonalSettings
from dpscaffold.config.plan import Plan
from dpscaffold.config.secure import Secure
from dpscaffold.data.meanings import Sizes
from dpscaffold.data.sentences import mistake_of
from dpscaffold.deployment.protocol.agreement import (
    Offer,
    SchemaSettings,
    offer_of,
    refuse_fine_tuning,
)
from dpscaffold.deployment.protocol.enrolment import EnrolledRun
from dpscaffold.deployment.protocol.steps import refuse_state
from dpscaffold.deployment.provision import host_and_port
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from dpscaffold.config import Run
    from dpscaffold.deployment.server.agreed import Scorer
    from dpscaffold.deployment.server.sites import Patience


#: A deployed run with secure sums permits one void attempt for this many rounds by default.
#: A site's grant has as many spare participations in any case.
ROUNDS_PER_VOID = 20

NEEDS_SIZES = (
    "[secure] is given, and the noise of a sum depends on the sizes of all members; give "
    "deploy.records with the public size of every site, e.g. { north = 400, east = 250 } (with "
    "unit 'user', which hides sizes, 1 for each)"
)


class DeploySettings(Sizes, ConfigTable):
    """``[deploy]``: where the SuperLink's loopback side is, and how long to wait for whom."""

    address: str = "127.0.0.1:8444"
    """The loopback address of the SuperLink, as given to 'dpscaffold server start --inner'. Value:
    'host:port'. Example: ``"127.0.0.1:18444"``"""
    deadline: float = Field(default=60.0, gt=0)
    """The number of seconds that a round waits for its sites. Example: ``300.0``"""
    quorum: int = Field(default=1, ge=1)
    """The smallest number of answers; with fewer, a round is void and is repeated, three times at
    most. Example: ``2``"""
    records: dict[str, Annotated[int, Field(ge=1)]] | None = None
    """The sites' public sizes by name, for privacy.epsilon. The noise is solved for them, and the
    run does not begin if the sites have other sizes. With unit 'user', which hides sizes, give 1
    for each. Value: a table of integers. Example: ``{ north = 400, east = 250 }``"""


class ServerConfiguration(ConfigTable):
    """A whole configuration of a deployed run."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=True, populate_by_name=True
    )

    rows: SchemaSettings = Field(alias="schema")
    task: TaskSettings = TaskSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    plan: Plan = Plan()
    privacy: Gaussian | None = None
    secure: Secure | None = None
    facts: FactsSettings | None = None
    personal: PersonalSettings | None = None
    deploy: DeploySettings = DeploySettings()
    evaluate: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_round(cls, tables: Any) -> Any:
        return with_one_round(tables)

    @model_validator(mode="after")
    def _personal_together(self) -> ServerConfiguration:
        refuse_fine_tuning(self.personal)
        refuse_state(self.rows.prepare)
        return self

    @property
    def patience(self) -> Patience:
        """When a round is void, and when to give up."""
        from dpscaffold.deployment.server.sites import Patience

        return Patience(self.deploy.quorum)

    def public_facts(self) -> FactsSettings:
        """What ``[schema]`` and ``[deploy]`` say for a plan; ``[facts]`` adds what they do not."""
        found: dict[str, Any] = {"features": self.rows.width, "classes": self.rows.class_count}
        sizes = list((self.deploy.records or {}).values())
        if sizes:
            found["users"] = len(sizes)
        if sizes and (self.privacy is None or self.privacy.unit == "record"):
            found["records"] = sizes
        last = self.rows.prepare[-1] if self.rows.prepare else None
        norm = getattr(last, "norm", 1.0 if getattr(last, "step", "") == "unit-norm" else "none")
        given = self.facts.model_dump(exclude_none=True) if self.facts is not None else {}
        return FactsSettings.model_validate({"row_norm": norm, **given, **found})

    def offer(self) -> Offer:
        """What is offered to the sites; noise is secret unless the plan says that it is not."""
        from dpscaffold.deployment.server.agreed import trial_of

        # Sizes are not known yet; everything else can be refused here, before anybody is asked.
        users = max(1, math.ceil(1 / self.plan.user_ratio))
        sizes = (1_000_000,) * users
        if self.secure is not None:  # what it needs depends on the sizes
            sizes = tuple((self.deploy.records or {}).values())
            if not sizes:
                raise BadInput("epsilon-without-sizes", NEEDS_SIZES)
        offer = self._offer(self._mechanism, self._settled)
        for part in offer.parts:
            trial_of(part, sizes, self.privacy)
        trial_of(offer, sizes, self.privacy)
        return offer

    def _offer(self, mechanism: Gaussian | None, plan: Plan) -> Offer:
        given = (self.rows, self.task, self.algorithm, plan, mechanism, self._sums)
        return offer_of(*given, tuple(self.deploy.records or ()), self.personal)

    def _on_sizes(self, mechanism: Gaussian | None, records: Mapping[str, int]) -> Run:
        """The run on the sites' public sizes, its step size not chosen yet."""
        from dpscaffold.deployment.server.agreed import setting_of

        sizes, declared = tuple(records.values()), False
        if mechanism is not None:
            declared = mechanism.sampling == "poisson"
            sizes = () if mechanism.unit == "user" else sizes
        offer = self._offer(mechanism, self.plan.changed(learning_rate=1.0))
        roster = EnrolledRun("", {}, tuple(records), "", sizes, declared=declared)
        return replace(setting_of(offer, roster, self.privacy), plan=self.plan)

    @property
    def _settled(self) -> Plan:
        """The plan, with the step size for the sites' public sizes where there is none."""
        if self.plan.learning_rate is not None or not self.deploy.records:
            return self.plan
        return self._on_sizes(self._mechanism, self.deploy.records).settled

    @property
    def _sums(self) -> Secure | None:
        """The secure sums. A process that restarts makes an attempt void, so unless the plan says
        otherwise some voids are part of it, and of its ε."""
        if self.secure is None:
            return None
        rounds = self.plan.rounds
        if "voids" in self.secure.model_fields_set or rounds == 1:
            return self.secure
        return self.secure.changed(voids=math.ceil(rounds / ROUNDS_PER_VOID))

    @cached_property
    def _mechanism(self) -> Gaussian | None:
        """The noised query; where ε is given, with the noise that keeps it on the sites' public
        sizes, anybody being free to stay away."""
        from dpscaffold.config import solve_noise  # its numbers are tensors

        if self.privacy is None:
            return None
        asked = self.privacy.secret or "secret" not in self.privacy.model_fields_set
        kept = {"secret": asked, "release": None}
        if self.privacy.epsilon is None:
            return self.privacy.changed(**kept)
        given = self.privacy.changed(epsilon=None, noise=1.0, **kept)
        if not self.deploy.records:
            raise BadInput(
                "epsilon-without-sizes",
                "privacy.epsilon is given, and noise is solved for sizes, which a server does not "
                "know before its sites answer; give deploy.records (every site's public size, e.g. "
                "{ north = 400, east = 250 }) or privacy.noise",
            )
        if given.unit == "user" and set(self.deploy.records.values()) != {1}:
            raise BadInput(
                "records-hidden",
                f"deploy.records is {self.deploy.records}, and privacy.unit = 'user' hides how "
                f"many records a site has; name the sites and write 1 for each",
            )
        unsolved = self._on_sizes(given, self.deploy.records)
        return solve_noise(unsolved, self.privacy.epsilon).privacy

    def scorer(self, folder: Path, rows: SchemaSettings | None = None) -> Scorer | None:
        """What scores a model on the public test data, if there are any; None while steps of the
        preparation are still to be fitted."""
        if self.evaluate is None:
            return None
        rows = rows or self.rows
        from dpscaffold.deployment.protocol.messages import Refused
        from dpscaffold.deployment.server.agreed import evaluation_on
        from dpscaffold.deployment.site.reading import read_records

        try:
            records = read_records(self.evaluate, folder, rows.before(rows.unfitted))
        except Refused as no:
            raise BadInput(no.code, f"[evaluate] does not fit the schema: {no.detail}") from no
        wrong = [sentence for sentence, fine in records.notes if not fine]
        if wrong or not len(records):
            said = wrong[0] if wrong else f"{self.evaluate.get('path')} has no records"
            raise BadInput("bad-evaluation-file", f"[evaluate]: {said}; fix the file")
        if rows.unfitted is not None:
            return None
        offer = self.offer().model_copy(update={"rows": rows})
        return evaluation_on(offer, records.features, records.labels)

    def resolved(self) -> dict[str, Any]:
        """As written to ``config.toml``."""
        tables = self.model_dump(mode="json", exclude_none=True)
        tables["schema"] = tables.pop("rows")
        tables["plan"]["learning_rate"] = self._settled.learning_rate
        if self._sums is not None:
            tables["secure"]["voids"] = self._sums.voids
        if self._mechanism is not None:
            tables["privacy"] |= {
                "secret": self._mechanism.secret,
                "noise": self._mechanism.stored()["noise"],
            }
            tables["privacy"].pop("epsilon", None)  # solved, as in a training run's file
        return tables


def load_served(path: Path, overrides: Sequence[str] = ()) -> ServerConfiguration:
    """Read a server's configuration; the first thing wrong is said in one sentence."""
    from dpscaffold.config import override, read_tables

    tables: Mapping[str, Any] = read_tables(path)
    for item in overrides:
        tables = override(tables, item)
    if "data" in tables:
        raise BadInput(
            "server-with-data",
            f"{path} has [data], but a server reaches no record; write [schema] (what a row looks "
            f"like) and [deploy] instead",
        )
    if "schema" not in tables:
        raise BadInput(
            "missing-key", f"{path} has no [schema]; it says what a row looks like at every site"
        )
    try:
        settings = ServerConfiguration.model_validate(dict(tables))
    except ValidationError as error:
        code, sentence = mistake_of(error, ServerConfiguration)
        raise BadInput(code, f"{path}: {sentence}") from None
    host_and_port("deploy.address", settings.deploy.address)
    return settings
