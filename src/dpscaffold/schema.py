"""Moved to :mod:`dpscaffold.federation.schema`."""

from dpscaffold.federation.schema import *  # noqa: F403
