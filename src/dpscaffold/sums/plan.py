"""The plan of a federation by e-mail: the public file that all sites share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dpscaffold.config import Run, solve_noise
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import Plan
from dpscaffold.config.secure import Secure, SumGrid
from dpscaffold.data.sentences import mistake_of
from dpscaffold.deployment.protocol.agreement import Offer, offer_of
from dpscaffold.deployment.protocol.enrolment import EnrolledRun
from dpscaffold.deployment.protocol.masks import Session
from dpscaffold.deployment.protocol.messages import digest
from dpscaffold.deployment.provision import read_toml, site_name
from dpscaffold.deployment.server.agreed import setting_of
from dpscaffold.errors import BadInput
from dpscaffold.runs.ledger import MAY_STAY_AWAY
from dpscaffold.sums.tables import SUMMED, SumsConfiguration, SumsSettings
from dpscaffold.tasks.ridge import RidgeSums

#: The layout of key files and sum files.
FORMAT = "dpscaffold sums 1"


@dataclass(frozen=True)
class SumsPlan:
    """What the sites agree on.

    ``setting`` counts one record per site: a sum needs no sizes, and none is sent. So with Poisson
    batches it is hidden whether a record is there at all (add-remove).
    """

    offer: Offer
    sums: SumsSettings
    setting: Run

    @property
    def members(self) -> tuple[str, ...]:
        """The sites, in order."""
        return self.sums.members

    @property
    def masked(self) -> bool:
        """Whether single files tell nothing."""
        return self.sums.colluders is not None

    @cached_property
    def digest(self) -> str:
        """The identity of the plan: every public number."""
        return digest(FORMAT, self.offer.to_dict(), self.sums.model_dump(mode="json"))

    def to_dict(self) -> dict[str, Any]:
        """The plan with its noise solved and all defaults, as TOML can hold it."""
        given = self.sums.model_dump(mode="json")
        tables: dict[str, Any] = without_none({**self.offer.to_dict(), "sums": given})
        return tables

    @property
    def session(self) -> Session:
        """What mask keys are signed for."""
        names = digest(*self.members)
        return Session(FORMAT.encode(), self.digest, digest(self.offer.to_dict()), names)

    @property
    def task(self) -> RidgeSums:
        """The sums."""
        assert isinstance(self.setting.task, RidgeSums)
        return self.setting.task

    @property
    def deviation(self) -> float:
        """The standard deviation of each site's noise, in every coordinate."""
        privacy = self.setting.privacy
        assert privacy is not None
        return float(privacy.scale(float(privacy.clip), 1))

    @property
    def grid(self) -> SumGrid:
        """Integers of 64 bits: room for 2⁴⁰ times the noise."""
        return SumGrid.of(self.deviation, self.deviation * 2.0**40)


def without_none(value: Any) -> Any:
    """JSON values without nulls, which TOML does not have."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def load_plan(path: Path) -> SumsPlan:
    """Read and check a plan; the first mistake is one sentence."""
    tables: Mapping[str, Any] = read_toml(path, "the plan")
    try:
        given = SumsConfiguration.model_validate(dict(tables))
    except ValidationError as error:
        code, sentence = mistake_of(error, SumsConfiguration)
        raise BadInput(code, f"{path}: {sentence}") from None
    return plan_of(given)


def plan_of(given: SumsConfiguration) -> SumsPlan:
    """The plan with its noise solved."""
    names, privacy, k = given.sums.members, given.privacy, given.sums.colluders
    for name in names:
        site_name(name)
    if len(set(names)) != len(names) or not names:
        raise BadInput("bad-members", f"sums.members is {list(names)}; name every site once")
    if given.algorithm.name not in SUMMED:
        raise BadInput(
            "not-a-sum",
            f"algorithm.name is {given.algorithm.name!r}, which takes more than one sum; give "
            f"{' or '.join(SUMMED)}",
        )
    if not isinstance(privacy.delta, float):
        raise BadInput(
            "missing-key", "privacy.delta is missing, and sites do not send sizes; give a number"
        )
    if k is not None and len(names) - k < 2:
        raise BadInput(
            "bad-members",
            f"sums.colluders is {k} with {len(names)} members; at least two honest sites must hide "
            f"each other, so give at most {max(0, len(names) - 2)} or name more sites",
        )
    noised = {"epsilon": None, "noise": 1.0} if privacy.epsilon is not None else {}
    mechanism = privacy.changed(secret=True, **noised)
    secure = None if k is None else Secure(colluders=k)

    def offered(noised: Gaussian | None) -> Offer:
        once = Plan.one_round(0)
        return offer_of(given.rows, given.task, given.algorithm, once, noised, secure)

    offer = offered(mechanism)
    declared = mechanism.sampling == "poisson"
    enrolled = EnrolledRun("", {}, names, "", (1,) * len(names), declared=declared)
    setting = setting_of(offer, enrolled, mechanism, None if k is None else MAY_STAY_AWAY)
    if isinstance(privacy.epsilon, Mapping) or privacy.noise_by_user is not None:
        raise BadInput(
            "not-applicable",
            "privacy.epsilon is a table, and a sum by e-mail has one noise for all sites; give the "
            "smallest of the budgets as a number",
        )
    if privacy.epsilon is not None:
        setting = solve_noise(setting, privacy.epsilon)
        offer = offered(setting.privacy)
    return SumsPlan(offer, given.sums, setting)
