"""``[personal]``: a model for each site."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dpscaffold.algorithms import Algorithm
from dpscaffold.algorithms.mean_regularised import mean_regularised
from dpscaffold.config.table import ConfigTable
from dpscaffold.errors import BadValue

#: Designs that keep a part of the model at the site, by the names under which people know them.
PRIVATE_HEADS = ("private-head", "fedper", "fedrep")


class PersonalSettings(ConfigTable):
    """``[personal]``: a model for each site, next to the common one."""

    kind: Literal["fine-tune", "mean-regularised"] = "fine-tune"
    """How a site's own model is made: 'fine-tune' fits the common model further to the site's
    records, after the run and at the site; 'mean-regularised' trains it during the run from the
    same noised gradients, covered by ε towards the server. Example: ``"mean-regularised"``"""
    strength: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """λ, how strongly a personal model is kept near the common one. With 'auto' each site chooses
    it by records that it holds out ('fine-tune'), or it is estimated from the known noise and the
    uploads of the first round ('mean-regularised'). Value: a number, 0 or more, or 'auto'.
    Example: ``0.1``"""

    @field_validator("kind", mode="before")
    @classmethod
    def _no_private_head(cls, kind: object) -> object:
        if kind in PRIVATE_HEADS:
            raise BadValue(
                "private-head",
                f"kind is '{kind}': a head that is fitted at the site without noise depends on "
                f"every record, so one record moves the gradients of all others, and clipping each "
                f"bounds nothing; use 'mean-regularised', which clips and noises all parameters "
                f"together, or 'fine-tune'",
            )
        return kind


def trained_by(base: Algorithm, personal: PersonalSettings | None) -> Algorithm:
    """The algorithm that runs: the base, with a model for each user where ``[personal]`` asks for
    one during training."""
    if personal is None or personal.kind != "mean-regularised":
        return base
    return mean_regularised(base, personal.strength)
