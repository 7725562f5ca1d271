"""The recipe for a model to publish: ``[privacy] release = true``, ``Gaussian(…, release=True)``.

A simulation may be looked at in any way; a release must keep its promise. So noise and batches are
secret, nobody chooses the draw, and what would stand outside the promise is refused unless it is
overruled by name, which the statement repeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpscaffold.config import Gaussian, Run
from dpscaffold.data.prepared import Shift, Standardised
from dpscaffold.data.tables.cells import toml_key, toml_text
from dpscaffold.data.tables.codec import Coding
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.privacy import charged
from dpscaffold.privacy.preparation import WITHIN, Preparation

PREPROCESSING, MEDIAN = "unprotected-preprocessing", "median-clip"


def check_release(setting: Run, federation: Federation) -> None:
    """Refuse a run that is meant for release and could not keep its promise: say all that stands
    outside, what to write instead, and how to overrule it.

    >>> from dpscaffold import Gaussian, Logistic, Plan, fedavg, synthetic
    >>> data = synthetic(users=4, records=30)
    >>> asked = Gaussian(noise=4.0, release=["unprotected-preprocessing"])
    >>> plan = Plan(rounds=2, user_ratio=0.5)
    >>> made = Run(data.roster, Logistic(40, 10), fedavg(), plan, asked)
    >>> check_release(made, data)
    >>> made.secret, made.draw_given
    (True, False)
    """
    privacy = setting.privacy
    if privacy is None or privacy.allowed is None:
        return
    allowed = privacy.allowed
    reasons = [*_of_the_run(setting, privacy)]
    steps = _left_open(setting, federation)
    if PREPROCESSING not in allowed:
        reasons += [f"{step.sentence} {_remedy(step, federation)}" for step in steps]
    if not reasons:
        return
    overrule = f" (or overrule what was prepared with privacy.release = ['{PREPROCESSING}'])"
    more = overrule if steps and PREPROCESSING not in allowed else ""
    if len(reasons) == 1:
        raise BadInput(
            "release-refused", f"privacy.release is set, and it is refused: {reasons[0]}{more}"
        )
    listed = "\n".join(f"  {k}. {reason}" for k, reason in enumerate(reasons, 1))
    raise BadInput(
        "release-refused",
        f"privacy.release is set, and {len(reasons)} things are refused{more}:\n{listed}",
    )


def _of_the_run(setting: Run, privacy: Gaussian) -> Iterator[str]:
    """What a release refuses of the plan and the mechanism."""
    if setting.plan.seed is not None:
        yield (
            f"plan.seed is {setting.plan.seed}, and nobody may choose the draw; leave plan.seed "
            f"out, and it comes from the operating system"
        )
    if privacy.clip == "median" and MEDIAN not in (privacy.allowed or ()):
        yield (
            f"privacy.clip is 'median', which is computed from private records, so there is no "
            f"guarantee; give a number, or overrule with privacy.release = ['{MEDIAN}']"
        )
    if setting.secure is not None:
        yield (
            "secure sums in one process hide no upload from it; leave [secure] out and give "
            "privacy.view = 'third-party', or deploy the run at its sites"
        )
    if privacy.noise == 0:
        yield "privacy.noise is 0, which protects nobody; give a noise above 0"


def _left_open(setting: Run, federation: Federation) -> list[Preparation]:
    """The steps of a preparation that no guarantee covers. That ``init`` drafted a configuration
    is named in the statement; it cannot be undone, so it is not refused."""
    assert setting.mechanism is not None
    steps = [*federation.preparation, *charged(federation.preparation, setting.mechanism)[1]]
    return [step for step in steps if step.protection not in (*WITHIN, "drafted")]


def _remedy(step: Preparation, federation: Federation) -> str:
    """The line of a configuration that needs no private record, in place of a step."""
    if isinstance(step, Coding):
        known = {n: [] if n in step.read_off else values for n, values in step.categories}
        lists = (f"{toml_key(n)} = {_listed(values)}" for n, values in known.items())
        return f"Write categories = {{ {', '.join(lists)} }}."
    if isinstance(step, Shift | Standardised):
        coding = next((s for s in federation.preparation if isinstance(s, Coding)), None)
        if coding is None:
            return "Give the step fit = 'public' with mean and deviation, or fit = 'private'."
        pairs = (f"{toml_key(name)} = [low, high]" for name in coding.numbers)
        return (
            f"Write ranges = {{ {', '.join(pairs)} }}, and take the step out of preprocess (or "
            f"give it fit = 'private')."
        )
    remedy = getattr(step, "remedy", "")
    return f"Write {remedy}." if remedy else "Prepare it privately or from public statistics."


def _listed(values: Sequence[str]) -> str:
    shown = ", ".join(map(toml_text, values)) or "…"
    return f"[{shown}]"
