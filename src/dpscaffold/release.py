"""The recipe for a model that is handed out: ``train --release``, ``[privacy] release = true``,
``train(…, release=True)``.

A simulation may be looked at in any way; a release must keep its promise. So noise and batches are
secret, nobody chooses the draw, and what would stand outside the promise is refused unless it is
overruled by name, which the statement repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpscaffold.config import Configuration
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.plan import Plan
from dpscaffold.privacy import charged
from dpscaffold.privacy.preparation import left_open
from dpscaffold.setting import Setting

PREPROCESSING, MEDIAN = "unprotected-preprocessing", "median-clip"


def for_release(settings: Configuration, federation: Federation) -> Configuration:
    """The configuration as it is released; refuses what could not keep its promise."""
    privacy = settings.privacy
    if privacy is None or not privacy.release:
        return settings
    setting = settings.setting(federation, Plan.learning_rate)  # no step size costs privacy
    _refuse_open_doors(setting, federation, privacy.allow or ())
    return settings.model_copy(update={"privacy": privacy.changed(secret=True)})


def released(setting: Setting, federation: Federation, allow: Sequence[str]) -> Setting:
    """The same for a setting made in Python.

    >>> from dpscaffold import Gaussian, Logistic, Plan, fedavg, synthetic
    >>> data = synthetic(users=4, records=30)
    >>> asked = Setting(data.roster, Logistic(40, 10), fedavg(), Plan(rounds=2, user_ratio=0.5),
    ...                 Gaussian(noise=4.0))
    >>> made = released(asked, data, ["unprotected-preprocessing"])
    >>> made.secret, made.draw_given
    (True, False)
    """
    for name in allow:
        if name not in (PREPROCESSING, MEDIAN):
            raise BadInput(f"allow names {name!r}; it overrules {PREPROCESSING} or {MEDIAN}")
    if setting.privacy is None:
        raise BadInput("release is asked for without privacy; give a mechanism, such as Gaussian()")
    _refuse_open_doors(setting, federation, allow)
    return replace(setting, privacy=replace(setting.privacy, secret=True))


def _refuse_open_doors(setting: Setting, federation: Federation, allowed: Sequence[str]) -> None:
    """Say what stands outside the promise, and how to overrule it."""
    privacy, run = setting.privacy, setting.describe()
    assert privacy is not None and run is not None
    if setting.plan.seed is not None:
        raise BadInput(
            f"plan.seed is {setting.plan.seed} with privacy.release, whose draw nobody may choose; "
            f"leave plan.seed out, and it comes from the operating system"
        )
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
