"""``site.toml``: who this site is, which data it has, and what it is willing to do with them.

:func:`check_terms` compares an offer's public numbers with the policy; :func:`grant` says how often
the site will take part in a run, and what that costs at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from dpscaffold.algorithms.registry import AGREED
from dpscaffold.config.gaussian import NoisedStep
from dpscaffold.config.secure import SumRules
from dpscaffold.data.meanings import Sizes
from dpscaffold.data.sentences import mistake_of
from dpscaffold.deployment.protocol.messages import Refused, checked_public
from dpscaffold.deployment.provision import host_and_port, read_toml, site_name
from dpscaffold.deployment.site.layout import (
    CERTIFICATE,
    NODE_KEY,
    SIGNING_KEY,
    STATE,
    refuse_other_state,
)
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Mechanism, no_guarantee, unproved
from dpscaffold.privacy.accounting import spent
from dpscaffold.privacy.ledger import participations_within
from dpscaffold.privacy.mechanism import Query, Unit, Weighting
from dpscaffold.privacy.numbers import round_up

#: Who says yes to a run: a person each time, or the policy alone.
Approval = Literal["each-run", "policy"]

#: Below this δ of one run the accountant's arithmetic has nothing to say.
SMALLEST_DELTA = 1e-12


class _SiteTable(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class SecurePolicy(SumRules, _SiteTable):
    """``[secure]``: the secure sums that this site takes part in. Without the table it takes part
    in none.

    In a run with secure sums the server sees the sum of the uploads of several sites and no single
    upload. The masks hide an upload only as long as enough members are honest, so the people of a
    site confirm who the members are: they compare fingerprints with each other by telephone, say.
    ``policy.epsilon`` then holds towards the server together with ``colluders`` sites; members that
    are not confirmed count among them.
    """

    required: bool = False
    """Whether runs without secure sums are refused. Example: ``true``"""
    least: int = Field(default=3, ge=2)
    voids: int = Field(default=10, ge=0)
    epsilon_alone: float = Field(gt=0, le=1e6)
    """ε towards the server together with all other sites, over all runs on these records. The masks
    do not count here, only this site's own noise. One run has epsilon_alone/max_runs. Example:
    ``20.0``"""
    members: dict[str, str] = Field(default_factory=dict)
    """The other sites by name, with the fingerprints of their signing keys. 'site check' prints
    them. Value: a table of fingerprints. Example: ``{ east = "2414-be14-…" }``"""


class Policy(_SiteTable):
    """``[policy]``: the most that any server gets of this site's records, whatever it sends."""

    epsilon: float = Field(gt=0, le=1e6)
    """ε towards the server, over all runs on these records together. In runs with secure sums:
    towards the server together with as many sites as may collude. Example: ``2.0``"""
    delta: float = Field(gt=0, lt=1)
    """δ towards the server, over all runs together; one run has delta/max_runs. Example:
    ``1e-06``"""
    max_runs: int = Field(default=10, ge=1)
    """The largest number of runs; one run has ε of at most epsilon/max_runs. Example: ``5``"""
    max_local_steps: int = Field(default=100, ge=1)
    """The largest K that is accepted. Example: ``50``"""
    units: tuple[Unit | Literal["none"], ...] = ("record",)
    """The accepted units of protection: single records, or all records of this site. With 'none'
    runs are accepted, too, that hide nothing: without privacy, or with noise from the plan's seed.
    That is for public records only. Example: ``["record", "user"]``"""
    algorithms: tuple[str, ...] = AGREED
    """The accepted algorithms, by name, from installed code. Example: ``["scaffold",
    "scaffold-balanced"]``"""
    tasks: tuple[str, ...] = ("logistic", "mlp")
    """The accepted tasks; your own module by its full name. Example: ``["logistic",
    "my_net:make"]``"""
    max_parameters: int = Field(default=2_000_000, ge=1)
    """The largest number of parameters of a model that is accepted. Example: ``100000``"""
    preparation: bool = False
    """Whether servers may fit preparation (centre, standardise, pca) by noised sums over all
    records. Each sum is a run of its own, within epsilon. Example: ``true``"""
    approval: Approval = "policy"
    """Who says yes to a run: the policy alone ('policy'), or in addition a person each time
    ('each-run', with 'dpscaffold site approve'). Example: ``"each-run"``"""
    _secure: SecurePolicy | None = PrivateAttr(default=None)

    @property
    def secure(self) -> SecurePolicy | None:
        """``[secure]`` of the same file; None where it has no such table."""
        return self._secure

    def with_secure(self, secure: SecurePolicy | None) -> Policy:
        """This policy together with ``[secure]``."""
        both = self.model_copy()
        both._secure = secure
        return both

    @property
    def most_of_one_run(self) -> float:
        """The largest ε that one run may be granted."""
        return self.epsilon / self.max_runs

    @property
    def run_delta(self) -> float:
        """δ of every run: δ/``max_runs``, so that all runs together keep δ."""
        return self.delta / self.max_runs


class SumsSite(_SiteTable):
    """``site.toml`` of a site that takes part by e-mail alone. Its key and its state lie next to
    it."""

    name: str
    """This site's name in the federation, from its invitation. Example: ``"north"``"""
    data: dict[str, Any]
    policy: Policy
    secure: SecurePolicy | None = None
    _folder: Path = PrivateAttr(default=Path())

    @property
    def signing_key(self) -> Path:
        """The key that signs this site's messages."""
        return self._folder / SIGNING_KEY

    @property
    def state(self) -> Path:
        """The folder of the ledger and of the memory."""
        return self._folder / STATE

    def placed(self, folder: Path) -> Self:
        """This file in its folder; its policy knows its ``[secure]``."""
        placed = self.model_copy(update={"policy": self.policy.with_secure(self.secure)})
        placed._folder = folder
        return placed


class SiteFile(Sizes, SumsSite):
    """``site.toml`` of a deployed site. It serves for sums by e-mail as well: the tables mean the
    same."""

    server: str
    """The address of the server, from the invitation. Value: 'host:port'. Example:
    ``"fl.example.org:8443"``"""
    coordinator: str
    """The public key that signs the server's messages, from the invitation. Example:
    ``"MCowBQYDK2VwAyEA…"``"""
    records: int | None = Field(default=None, ge=1)
    """The declared number of records, at least the true number. The server learns this number
    instead of the true one, whatever it offers. Example: ``400``"""

    @property
    def ca(self) -> Path:
        """The federation's certificate."""
        return self._folder / CERTIFICATE

    @property
    def node_key(self) -> Path:
        """The key of the connection."""
        return self._folder / NODE_KEY


def read_site_file(path: Path) -> SiteFile:
    """Read and check ``site.toml``; the first thing wrong is said in one sentence."""
    tables = read_toml(path, "the site's file")
    refuse_other_state(path, tables)
    try:
        site = SiteFile.model_validate(tables)
    except ValidationError as error:
        code, sentence = mistake_of(error, SiteFile)
        raise BadInput(code, f"{path}: {sentence}") from None
    site_name(site.name)
    host_and_port("server", site.server)
    checked_public("coordinator", site.coordinator)
    if site.policy.run_delta < SMALLEST_DELTA:
        raise BadInput(
            "delta-too-small",
            f"{path}: policy.delta/policy.max_runs is {site.policy.run_delta:g}, too small for the "
            f"accountant; it must be at least {SMALLEST_DELTA:g}",
        )
    return site.placed(path.resolve().parent)


@dataclass(frozen=True)
class SumTerms:
    """The public numbers of a run's secure sums, for one site.

    ``noise`` is the σ_g of the least noisy sum that the site takes part in, in units of this
    site's own sensitivity. It counts the noise of this site and of the quietest honest members.
    """

    colluders: int
    least: int
    voids: int
    participants: int
    noise: float


@dataclass(frozen=True)
class Terms:
    """The public numbers of an offer that a policy looks at; without a mechanism, no privacy."""

    rounds: int
    local_steps: int
    user_ratio: float
    data_ratio: float
    weighting: Weighting
    algorithm: str
    task: str
    parameters: int
    mechanism: NoisedStep | None
    #: Parts of the algorithm with which no bound was proved.
    unproved: tuple[str, ...] = ()
    #: What is summed over the records.
    query: Query = "gradients"
    #: Whether the run fits preparation.
    preparation: bool = False
    #: The secure sums of the run, as they concern this site.
    sums: SumTerms | None = None

    @property
    def protected(self) -> bool:
        """Whether the site's records are hidden by noise that nobody else knows."""
        return self.mechanism is not None and self.mechanism.secret

    def run(self, records: int, batch: int, delta: float, declared: bool = False) -> Mechanism:
        """What the site does in such a run, for the accountant: this user alone, every round.
        ``declared`` says that R_i is a constant that the site declared. With secure sums, the noise
        is that of the sum."""
        alone = self.run_alone(records, batch, delta, declared)
        return alone if self.sums is None else replace(alone, noise=self.sums.noise)

    def run_alone(
        self, records: int, batch: int, delta: float, declared: bool = False
    ) -> Mechanism:
        """The same with the site's own noise, whatever others do."""
        if self.mechanism is None:
            raise BadInput("no-privacy", "a run without privacy has no account")
        run = self.mechanism.run(
            None,
            self,
            [records],
            1,
            [batch],
            declared=declared,
            delta=delta,
            weights=[1.0] if self.weighting == "noise" else None,  # alone in its account
        )
        return replace(run, unproved_hooks=tuple(self.unproved), query=self.query)

    def to_dict(self, records: int, batch: int, declared: bool) -> dict[str, Any]:
        """What a ledger keeps of these terms, so that its ε can be computed again."""
        apart = ("mechanism", "sums")
        kept: dict[str, Any] = {
            "records": records,
            "batch": batch,
            "declared": declared,
            "terms": {key: value for key, value in vars(self).items() if key not in apart},
            "mechanism": self.mechanism.step.stored() if self.mechanism else None,
        }
        return kept if self.sums is None else kept | {"sums": vars(self.sums)}


def check_terms(policy: Policy, terms: Terms) -> None:
    """Refuse, with its reason code, what the policy does not allow.

    >>> policy = Policy(epsilon=1.0, delta=1e-6)
    >>> try:
    ...     terms = Terms(10, 5, 1.0, 0.2, "uniform", "scaffold", "logistic", 410, None)
    ...     check_terms(policy, terms)
    ... except Refused as no:
    ...     no.code
    'policy-unprotected'
    """
    mechanism = terms.mechanism
    if not (terms.protected or "none" in policy.units):
        raise Refused("policy-unprotected")
    if mechanism is not None:
        _check_query(policy, terms, mechanism)
    _within("policy-steps", "local_steps", terms.local_steps, policy.max_local_steps)
    if terms.preparation and not policy.preparation:
        raise Refused("preparation", "policy.preparation is false")
    _among("policy-algorithm", "algorithm", terms.algorithm, policy.algorithms)
    _among("policy-model", "task", terms.task, policy.tasks)
    _within("policy-model", "parameters", terms.parameters, policy.max_parameters)
    _check_sums(policy.secure, terms)


def _check_sums(policy: SecurePolicy | None, terms: Terms) -> None:
    """Refuse secure sums that the policy does not allow, or a run without them."""
    sums = terms.sums
    if sums is None:
        if policy is not None and policy.required:
            raise Refused("policy-secure", "secure.required is true, and the plan has no [secure]")
        return
    if policy is None:
        raise Refused("policy-secure", "site.toml has no [secure]")
    if sums.colluders < policy.colluders:
        raise Refused("policy-secure", f"colluders {sums.colluders}, at least {policy.colluders}")
    if sums.participants < policy.least:
        raise Refused("policy-secure", f"{sums.participants} in a sum, at least {policy.least}")


def _check_query(policy: Policy, terms: Terms, mechanism: NoisedStep) -> None:
    if not mechanism.noise > 0:
        raise Refused("policy-noise", f"noise {mechanism.noise}")
    if isinstance(mechanism.clip, str):
        raise Refused("policy-clip", f"clip {mechanism.clip}, which is not a number")
    _among("policy-unit", "unit", mechanism.unit, policy.units)
    reason = _unproved(terms, policy.run_delta)
    if reason:
        raise Refused("policy-unit", reason)


@lru_cache(maxsize=64)
def _unproved(terms: Terms, delta: float) -> str | None:
    """Why these terms have no guarantee; found once, as every message of a run is checked."""
    return unproved(terms.run(1, 1, delta))


def _within(reason: str, name: str, value: float, most: float) -> None:
    if not value <= most:
        raise Refused(reason, f"{name} {value}, at most {most}")


def _among(reason: str, name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise Refused(reason, f"{name} {value!r:.80}, allowed: {', '.join(allowed)}")


@dataclass(frozen=True)
class RemainingBudget:
    """What all runs together may still spend, and how many more runs there may be. ``alone`` is ε
    towards the server and all other sites."""

    epsilon: float
    delta: float
    runs: int
    alone: float = 0.0

    def without(self, grant: SiteGrant) -> RemainingBudget:
        """What is left after one more grant."""
        alone = grant.epsilon_alone or grant.epsilon or 0.0
        return RemainingBudget(
            max(0.0, self.epsilon - (grant.epsilon or 0.0)),
            max(0.0, self.delta - grant.delta),
            self.runs - 1,
            max(0.0, self.alone - alone),
        )


@dataclass(frozen=True)
class SiteGrant:
    """How often the site takes part in a run at most, and the ε and δ reserved for that; ε None
    means no guarantee (no privacy, or a rehearsal). ``epsilon_alone`` is that of a run with secure
    sums if all others collude."""

    participations: int
    epsilon: float | None
    delta: float
    epsilon_alone: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For the ledger."""
        return {k: v for k, v in vars(self).items() if k != "epsilon_alone" or v is not None}


def spare(terms: Terms) -> int:
    """How many participations a site grants beyond the rounds, for those that are interrupted."""
    voids = 0 if terms.sums is None else terms.sums.voids
    return max(2, math.ceil(terms.rounds / 20), voids)


def grant(
    policy: Policy,
    terms: Terms,
    records: int,
    batch: int,
    left: RemainingBudget,
    declared: bool = False,
    most: int | None = None,
) -> SiteGrant:
    """The largest grant that fits, or a refusal.

    n ≤ T + max(2, ⌈T/20⌉), the few beyond T being for participations that are interrupted, or n ≤
    ``most`` where it is given. ε(n) of n·K steps (the bound ``cap``) at δ/``max_runs`` must fit
    into what is left and into one run's share. Below ⌈lT⌉ + 2 the site would drop out of the run
    early, so it refuses at once; a run of one round is over after one participation, so one is
    enough for it.
    """
    if left.runs < 1:
        raise Refused("policy-runs")
    rounds = terms.rounds
    most = rounds + spare(terms) if most is None else most
    least = math.ceil(terms.user_ratio * rounds - 1e-9) + (2 if rounds > 1 else 0)
    if not terms.protected:
        return SiteGrant(most, None, 0.0)
    budget = min(left.epsilon, policy.most_of_one_run)
    if policy.run_delta > left.delta * (1 + 1e-9):
        raise Refused("policy-epsilon", f"a delta of {left.delta:g} is left")
    run = terms.run(records, batch, policy.run_delta, declared)
    if reason := no_guarantee(run):
        raise Refused("policy-epsilon", reason)
    count = participations_within(run, budget, most)
    alone = None
    if policy.secure is not None and terms.sums is not None:
        alone = terms.run_alone(records, batch, policy.run_delta, declared)
        share = min(left.alone, policy.secure.epsilon_alone / policy.max_runs)
        most, count = count, participations_within(alone, share, count)
        if count < least <= most:
            cost = round_up(spent(alone, least))
            raise Refused(
                "policy-epsilon",
                f"ε {cost} is asked if all other sites collude, and {share:.4g} is left of "
                f"epsilon_alone",
            )
    if count < least:
        cost = round_up(spent(run, least))
        raise Refused(
            "policy-epsilon",
            f"ε {cost} is asked for {least} participations, and {budget:.4g} is left for this run",
        )
    return SiteGrant(
        count,
        spent(run, count),
        policy.run_delta,
        None if alone is None else spent(alone, count),
    )
