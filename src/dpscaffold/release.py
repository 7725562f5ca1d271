"""The recipe for a model that is handed out: ``train --release``, ``[privacy] release = true``,
``train(…, release=True)``.

A simulation may be looked at in any way; a release must keep its promise. So noise and batches are
secret, nobody chooses the draw, and what would stand outside the promise is refused unless it is
overruled by name, which the statement repeats.
"""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dpscaffold.config import Configuration
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.plan import Plan
from dpscaffold.privacy import charged
from dpscaffold.privacy.preparation import left_open
from dpscaffold.setting import Setting

PREPROCESSING, MEDIAN = "unprotected-preprocessing", "median-clip"


def for_release(
    settings: Configuration, federation: Federation, begun: Path | None
) -> Configuration:
    """The configuration as it is released; refuses what could not keep its promise.

    ``begun`` is the folder of a run that is resumed: its draw goes on from its own seed.
    """
    privacy = settings.privacy
    if privacy is None or not privacy.release:
        return settings
    setting = settings.setting(federation, Plan.learning_rate)  # no step size costs privacy
    _refuse_open_doors(setting, federation, privacy.allow or ())
    given = settings.plan.seed if "seed" in settings.plan.model_fields_set else None
    plan = settings.plan.changed(seed=_drawn(given, begun))
    return settings.model_copy(update={"plan": plan, "privacy": privacy.changed(secret=True)})


def released(
    setting: Setting, federation: Federation, allow: Sequence[str], begun: Path | None
) -> Setting:
    """The same for a setting made in Python, whose plan leaves its seed at the default.

    >>> from dpscaffold import Gaussian, Logistic, Plan, fedavg, synthetic
    >>> data = synthetic(users=4, records=30)
    >>> asked = Setting(data.roster, Logistic(40, 10), fedavg(), Plan(rounds=2, user_ratio=0.5),
    ...                 Gaussian(noise=4.0))
    >>> made = released(asked, data, ["unprotected-preprocessing"], None)
    >>> made.privacy.secret, made.plan.seed == asked.plan.seed
    (True, False)
    """
    for name in allow:
        if name not in (PREPROCESSING, MEDIAN):
            raise BadInput(f"allow names {name!r}; it overrules {PREPROCESSING} or {MEDIAN}")
    if setting.privacy is None:
        raise BadInput("release is asked for without privacy; give a mechanism, such as Gaussian()")
    _refuse_open_doors(setting, federation, allow)
    given = None if setting.plan.seed == Plan.seed else setting.plan.seed
    return replace(
        setting,
        plan=replace(setting.plan, seed=_drawn(given, begun)),
        privacy=replace(setting.privacy, secret=True),
    )


def _drawn(given: int | None, begun: Path | None) -> int:
    """The seed of the draw: the system's, or that of the run which goes on."""
    seed = _seed_of(begun) if begun else None
    if given is not None and given != seed:
        raise BadInput(
            f"plan.seed is {given} with privacy.release, whose draw nobody may choose; leave "
            f"plan.seed out, and it comes from the system"
        )
    return secrets.randbits(62) if seed is None else seed


def _refuse_open_doors(setting: Setting, federation: Federation, allowed: Sequence[str]) -> None:
    """Say what stands outside the promise, and how to overrule it."""
    privacy, run = setting.privacy, setting.describe()
    assert privacy is not None and run is not None
    if privacy.clip == "median" and MEDIAN not in allowed:
        raise BadInput(
            f"privacy.clip is 'median' with privacy.release: the bound is read off private "
            f"records, so nothing is promised; give a number, or overrule with --allow {MEDIAN}"
        )
    if privacy.noise == 0:
        raise BadInput(
            "privacy.noise is 0 with privacy.release, which protects nobody; give a noise above 0"
        )
    steps = [*federation.preparation, *charged(federation.preparation, run)[1]]
    open_ = left_open(steps)
    if open_ and PREPROCESSING not in allowed:
        raise BadInput(
            f"privacy.release is set, and the data were prepared without protection: "
            f"{open_[0].rstrip('.')}; prepare them privately or from public statistics, or "
            f"overrule with --allow {PREPROCESSING}"
        )


def _seed_of(folder: Path) -> int | None:
    """The seed of the draw of a run that has begun."""
    path = folder / "config.toml"
    if not path.exists():
        return None
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        if not tables["privacy"].get("release", False):
            return None
        return int(tables["plan"]["seed"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise BadInput(f"{path} cannot be read ({error}); restore it") from error
