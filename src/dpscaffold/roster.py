"""Moved to :mod:`dpscaffold.federation.roster`."""

from dpscaffold.federation.roster import *  # noqa: F403
