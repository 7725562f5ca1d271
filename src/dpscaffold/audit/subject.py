"""From a configuration or a run folder to what is audited, and what is claimed for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpscaffold.audit.canary import make_pair, small
from dpscaffold.audit.game import Subject
from dpscaffold.books.runledger import read_account
from dpscaffold.config import load
from dpscaffold.data.loading import load_federation
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.planner.asked import planned_setting
from dpscaffold.privacy import LEDGER, VIEWS, Mechanism, TradeOff, bound_for, no_guarantee
from dpscaffold.privacy.bounds import USER_SAMPLING
from dpscaffold.privacy.human import losses
from dpscaffold.privacy.laws import participations_laws
from dpscaffold.setting import Setting


@dataclass(frozen=True)
class Claim:
    """What is claimed towards a view: ε at δ by a bound, and the trade-off curve behind it."""

    view: str
    bound: str
    epsilon: float
    delta: float
    curve: TradeOff
    colluders: int = 0


@dataclass(frozen=True)
class Case:
    """An audit's subject, its claims by view, and the real run where one is asked for."""

    name: str
    subject: Subject
    claims: Mapping[str, Claim]
    setting: Setting
    federation: Federation
    simulated: bool
    not_played: str = ""


def read_case(source: Path, overrides: list[str] | None = None) -> Case:
    """A configuration as it would run, or a run folder as it ran (given who took part)."""
    folder = source if source.is_dir() else None
    config = source / "config.toml" if folder else source
    if not config.exists():
        what = "holds no run (config.toml)" if folder else "does not exist"
        raise BadInput(f"{source} {what}; give a configuration (TOML) or a run folder")
    settings = load(config, overrides or [])
    federation = load_federation(settings.data)
    setting = planned_setting(settings, federation)
    run, participations = _described(setting), None
    if folder:
        if overrides:
            raise BadInput(f"--set is given for {folder}, which has run; give a configuration")
        ledger = read_account(folder).ledger
        run, participations = ledger.run, int(ledger.participations.max())
        if participations == 0:
            raise BadInput(f"nobody has taken part in {folder} yet, so it promises nothing so far")
    subject = subject_of(setting, run, federation, participations)
    claims = claims_of(run, participations, setting.budget.colluders)
    return Case(
        str(source),
        subject,
        claims,
        setting,
        federation,
        not subject.privacy.secret,
        _hidden(run),
    )


def _described(setting: Setting) -> Mechanism:
    run = setting.describe()
    if run is None:
        raise BadInput("the run is not private (no [privacy]), so it claims nothing to audit")
    return run


def subject_of(
    setting: Setting, run: Mechanism, federation: Federation, participations: int | None = None
) -> Subject:
    """What plays the game: the run's task (at its smallest size), algorithm and mechanism."""
    reason = no_guarantee(run) or ("no noise is added (noise=0)" if run.noise == 0 else None)
    if setting.privacy is None or reason:
        raise BadInput(f"there is no claim to audit: {reason or 'the run is not private'}")
    task, kind = small(setting.task)
    if task is setting.task:
        kind, classes, dimension = federation.target.kind, federation.classes, federation.dimension
    else:
        classes, dimension = 2, getattr(task, "features", 1)
    seed = setting.plan.seed
    pair = make_pair(task, kind, run, dimension, seed)
    return Subject(
        task, kind, classes, setting.algorithm, setting.privacy, run, pair, seed, participations
    )


def claims_of(run: Mechanism, participations: int | None, colluders: int = 1) -> dict[str, Claim]:
    """ε of training alone by view: over the draw, or given that a user took part so often."""
    claims = {}
    colluders = min(colluders, max(1, run.users - 1))
    for view in VIEWS:
        if participations is not None:
            laws, name = participations_laws(run, participations), LEDGER.name
        else:
            bound = bound_for(run, view, colluders=colluders)
            if bound is USER_SAMPLING:  # it rests on a hidden draw, which these games reveal
                continue
            laws, name = losses(bound, run), bound.name
        epsilon = max(law.epsilon(run.delta) for law in laws)
        if not np.isfinite(epsilon):
            raise BadInput(f"the claim at delta={run.delta} is infinite; give a larger delta")
        k = colluders if view == "participant" else 0
        claims[view] = Claim(view, name, float(epsilon), run.delta, TradeOff.of(laws), k)
    return claims


def _hidden(run: Mechanism) -> str:
    if bound_for(run, "third_party") is USER_SAMPLING:
        return "the third party's claim rests on a hidden draw, which these games reveal"
    return ""
