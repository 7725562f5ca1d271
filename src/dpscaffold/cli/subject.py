"""What ``dpscaffold privacy`` is asked about: numbers, a configuration or a run folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from dpscaffold.algorithms import DEFAULT, Algorithm
from dpscaffold.algorithms.naming import build, factory_of
from dpscaffold.checks import at_least, choice, floor_share, shares
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Ledger, Mechanism, Preparation, PrivacyError, charged, statement
from dpscaffold.privacy.describe import choose_relation
from dpscaffold.privacy.drawn import FROM_SYSTEM, SeedKnowledge
from dpscaffold.privacy.human import GROUPS
from dpscaffold.privacy.mechanism import LEAST_NOISE, MOST_NOISE, Sampling, Unit, unusable_noise
from dpscaffold.privacy.statement_types import Statement
from dpscaffold.runs.ledger import Account, read_account
from dpscaffold.setting.gaussian import Gaussian


@dataclass(frozen=True)
class StatementSubject:
    """What a statement is about: a run and what its data add, or the account of a run folder."""

    run: Mechanism | None
    preparation: tuple[Preparation, ...] = ()
    extra_costs: tuple[Any, ...] = ()
    account: Account | None = None
    colluders: int = 1
    simulated: bool = False
    drawn: SeedKnowledge = FROM_SYSTEM
    allowed: tuple[str, ...] | None = None
    planned: tuple[str, ...] = ()

    @property
    def ledger(self) -> Ledger | None:
        """Who took part, where there is a run folder."""
        return self.account.ledger if self.account else None

    @property
    def parts(self) -> tuple[Ledger, ...]:
        """The parts of a run that was given more rounds after it was planned, or that continues
        another one."""
        return self.account.parts if self.account else ()

    def whole(self, what: str) -> Mechanism:
        """The run as one mechanism, which several parts are not."""
        if self.run is None:
            raise PrivacyError(
                "no-privacy", f"{what} is asked of a run without privacy; name a private one"
            )
        if self.parts:
            raise PrivacyError(
                "rounds-extended",
                f"{what} is asked of a run that was given more rounds after it was planned, or "
                f"that continues another one; its parts only add up, and have no curve of their "
                f"own together",
            )
        return self.run

    def statement(
        self, groups: tuple[int, ...] = GROUPS, colluders: int | None = None
    ) -> Statement:
        """What may be said; of a run folder, the very statement that its run writes."""
        if self.account:
            return self.account.statement(groups, colluders)
        return statement(
            self.run,
            preparation=self.preparation,
            seed_public=self.simulated,
            draw_given=self.drawn.given,
            allowed=self.allowed,
            extra_costs=self.extra_costs,
            groups=groups,
            colluders=self.colluders if colluders is None else colluders,
            planned=self.planned,
        )


@dataclass(frozen=True)
class Numbers:
    """A run by its numbers, as the options give them; None is what was not given."""

    users: int | None = None
    records: int | None = None
    rounds: int | None = None
    local_steps: int | None = None
    user_ratio: float | None = None
    data_ratio: float | None = None
    noise: float | None = None
    sampling: str | None = None
    algorithm: str | None = None
    unit: str | None = None
    neighbours: str | None = None
    max_participations: int | None = None


#: The numbers without which there is no run.
NEEDED = ("users", "records", "rounds", "local_steps", "user_ratio", "data_ratio", "noise")


def _needed(numbers: Numbers) -> list[Any]:
    values = [getattr(numbers, name) for name in NEEDED]
    missing = [_option(name) for name, value in zip(NEEDED, values, strict=True) if value is None]
    if missing:
        raise PrivacyError(
            "missing-argument",
            f"missing {', '.join(missing)}; give them all, or a configuration or a run folder",
        )
    return values


def _algorithm(name: str) -> Algorithm:
    try:
        factory_of(name, argument="--algorithm")
        return build(name)
    except BadInput as error:
        raise PrivacyError(error.code, str(error)) from error


def from_numbers(numbers: Numbers, delta: float | None) -> Mechanism:
    """The run that the options describe; every missing or impossible one is named.

    >>> run = from_numbers(Numbers(100, 4000, 400, 50, 0.2, 0.2, 60.0), delta=None)
    >>> run.cohort_size, run.worst.batch
    (20, 800)
    """
    users, records, rounds, local_steps, user_ratio, data_ratio, noise = _needed(numbers)
    for name, ratio in (("user_ratio", user_ratio), ("data_ratio", data_ratio)):
        if not 0.0 < ratio <= 1.0:
            raise PrivacyError(
                "out-of-range", f"{_option(name)} is {ratio}; give a fraction above 0 and at most 1"
            )
    algorithm = _algorithm(numbers.algorithm or DEFAULT)
    if at_least("--noise", noise, 0) and not LEAST_NOISE <= noise <= MOST_NOISE:
        raise PrivacyError("noise-out-of-range", unusable_noise("--noise", noise))
    if floor_share(user_ratio, users) < 1:
        raise PrivacyError(
            "no-participants", f"--user-ratio is {user_ratio}, which selects none of {users} users"
        )
    sampling: Any = choice("--sampling", numbers.sampling or "fixed", get_args(Sampling))
    unit: Any = choice("--unit", numbers.unit or "record", get_args(Unit))
    # Numbers on a command line are declared: nothing is computed from data.
    chosen = choose_relation(numbers.neighbours, sampling, unit, declared=True)
    sizes = [records] * users
    return Gaussian(noise=noise, sampling=sampling, unit=unit, neighbours=chosen).run(
        algorithm,
        rounds=rounds,
        local_steps=local_steps,
        sizes=sizes,
        **shares(sizes, user_ratio, data_ratio),
        weighting="uniform",
        aggregation="mean",
        declared=chosen == "add-remove",
        delta=delta,
        max_participations=numbers.max_participations,
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def refuse_numbers(numbers: Numbers, source: Path) -> None:
    """Refuse options that a run folder or a configuration already answers."""
    given = [_option(name) for name, value in vars(numbers).items() if value is not None]
    if given:
        raise PrivacyError(
            "conflicting-arguments",
            f"{given[0]} is given, and {source} already says it; give one or the other",
        )


def from_source(source: Path, numbers: Numbers, delta: float | None) -> StatementSubject:
    """What a run folder or a configuration describes."""
    refuse_numbers(numbers, source)
    about = from_folder(source) if source.is_dir() else from_config(source)
    if delta is None or about.run is None:
        return about
    run = Mechanism.from_dict({**about.run.to_dict(), "delta": delta})
    return replace(about, run=run, account=about.account and about.account.at_delta(delta))


def from_folder(folder: Path) -> StatementSubject:
    """A run folder: its ledger holds the description of the run, so nothing else is needed."""
    account = read_account(folder)
    return StatementSubject(
        account.ledger.run,
        account.preparation,
        account.costs,
        account,
        account.colluders,
        account.seeded,
        account.drawn,
    )


def from_config(path: Path) -> StatementSubject:
    """A configuration: the run it would make on its data."""
    from dpscaffold.config import load
    from dpscaffold.data.loading import load_federation
    from dpscaffold.setting.plan import Plan

    if not path.exists():
        raise PrivacyError(
            "file-not-found",
            f"{path} does not exist; give a configuration (TOML), a run folder, or numbers",
        )
    settings = load(path)
    federation = load_federation(settings.data)
    limits = settings.privacy
    setting = settings.setting(federation, Plan.learning_rate)  # no step size costs privacy
    run = setting.describe()
    if run is None or limits is None:
        return StatementSubject(None, federation.preparation)
    costs, unprotected = charged(federation.preparation, run)
    steps = (*federation.preparation, *unprotected)
    return StatementSubject(
        run,
        steps,
        costs,
        colluders=limits.budget.colluders,
        simulated=not setting.secret,
        drawn=setting.seed().drawn,
        allowed=tuple(limits.allow or ()) if limits.release else None,
        planned=settings.planned,
    )
