"""``[facts]`` and ``[stopping]``: public knowledge next to a plan."""

from __future__ import annotations

from typing import Literal

from dpscaffold.config.table import ConfigTable
from dpscaffold.data.meanings import Alike, Located, Shape, Sizes


class FactsSettings(Shape, Alike, Sizes, ConfigTable):
    """``[facts]``: what is public about the data, for ``dpscaffold plan``."""

    users: int | None = None
    """M, the publicly known number of users. Example: ``100``"""
    records: int | tuple[int, ...] | None = None
    """The number of training records of a user: one number, or one per user. Example: ``4000``"""
    features: int | None = None
    """The number of features after preprocessing. Example: ``40``"""
    classes: int | None = None
    """The number of classes; 0 if a number is predicted. Example: ``10``"""
    similarity: float | Literal["unknown"] = "unknown"
    """γ, the similarity of the users in per cent; 'unknown' assumes 0. Example: ``10.0``"""
    row_norm: float | Literal["none"] | None = None
    """The row norm that preprocessing guarantees, or 'none'. By default 1. Example: ``1.0``"""


class StoppingSettings(Located, ConfigTable):
    """``[stopping]``: end a run early by public rows
    (:class:`~dpscaffold.training.stopping.Stopping`)."""

    path: str
    """A CSV or Parquet file of public raw rows, with the label column of the data ('label' where
    the data have no columns). The run stops when their metric has not improved for five
    evaluations; ε is still that of all planned rounds. Example: ``"public.csv"``"""
