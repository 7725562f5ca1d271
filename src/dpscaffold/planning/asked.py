"""``plan.learning_rate = "plan"``: η₀ from a run's own public facts; and ``[facts]`` as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median_low

from dpscaffold.config import Configuration, FactsSettings, Run
from dpscaffold.config.budgets import DEFAULT
from dpscaffold.config.plan import Plan
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.federation.schema import Prepared
from dpscaffold.planning.descent import descent_rate
from dpscaffold.planning.facts import Facts
from dpscaffold.planning.surrogate import SurrogateAssumptions
from dpscaffold.planning.trial import choose_rate


def planned_setting(settings: Configuration, federation: Federation) -> Run:
    """The run that a configuration describes on a federation, with η₀ planned where that is asked,
    from the roster's public facts alone."""
    if settings.plan.learning_rate != "plan":
        return settings.setting(federation)
    # The noise is solved first: it depends on no step size, and the planning on it.
    setting = settings.setting(federation, Plan().rate)
    return replace(setting, plan=settings.plan.at_rate(planned_rate(setting, settings.facts)))


def planned_rate(setting: Run, facts: FactsSettings | None) -> float:
    """η₀ of this run: by the formula of noisy gradient descent where the run is that, else chosen
    on surrogates. The roster's sizes and schema are all that is used of the data, with γ and, where
    ``[facts]`` says it, the norm of a row."""
    if setting.privacy is not None and setting.privacy.unit == "user":
        raise BadInput(
            "learning-rate-not-planned",
            "plan.learning_rate is 'plan', and privacy.unit is 'user', which hides how many "
            "records a user has, while the step size would depend on them; set privacy.unit = "
            "'record', or take a number that 'dpscaffold plan --unit user' finds from [facts]",
        )
    said = None if facts is None else facts.row_norm
    norm = guaranteed_norm(setting.roster.schema.preparation) if said is None else _norm(said)
    rate = descent_rate(setting, norm)
    if rate is not None:
        return rate
    if setting.roster.schema.target.kind == "labels":
        raise BadInput(
            "learning-rate-not-planned",
            "plan.learning_rate is 'plan', which for several labels needs a linear model, "
            "algorithm.name = 'fedavg', plan.local_steps = 1 and rows of a known norm "
            "('clip-norm:3'); set these, or give a number",
        )
    similarity = None if facts is None or facts.similarity == "unknown" else facts.similarity
    return choose_rate(
        setting, SurrogateAssumptions(similarity or 0.0, norm, similarity is None)
    ).rate


def guaranteed_norm(preparation: tuple[Prepared, ...]) -> float | None:
    """The norm of a row that the last step of preparation guarantees; None where it gives none."""
    from dpscaffold.data.prepared import ClipNorm, UnitNorm

    last = preparation[-1] if preparation else None
    if isinstance(last, UnitNorm):
        return 1.0
    return float(last.norm) if isinstance(last, ClipNorm) else None


def _missing(given: FactsSettings) -> str:
    needed = ("users", "records", "features", "classes")
    missing = [f"facts.{name}" for name in needed if getattr(given, name) is None]
    return (
        f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given; say them in "
        f"[facts] or as options (classes = 0 where a number is predicted)"
    )


def facts_of(given: FactsSettings) -> Facts:
    """The facts of a ``[facts]`` table; those that are missing are named."""
    users, records, features, classes = given.users, given.records, given.features, given.classes
    if users is None and isinstance(records, tuple):
        users = len(records)
    if users is None or records is None or features is None or classes is None:
        raise BadInput("missing-argument", _missing(given))
    return Facts.of(
        users=users,
        records=records,
        features=features,
        classes=classes,
        similarity=None if given.similarity == "unknown" else given.similarity,
        row_norm=_norm(1.0 if given.row_norm is None else given.row_norm),
    )


def usual_budget(table: Mapping[str, float]) -> float:
    """The budget that a plan is made for: the default's, or else the median of the table.

    >>> usual_budget({"north": 0.5, "default": 2.0}), usual_budget({"a": 1.0, "b": 3.0, "c": 4.0})
    (2.0, 3.0)
    """
    if DEFAULT in table:
        return table[DEFAULT]
    return median_low(table.values())


def _norm(said: float | str) -> float | None:
    return None if isinstance(said, str) else said
