"""Moved to :mod:`dpscaffold.books.booking`."""

from dpscaffold.books.booking import *  # noqa: F403
