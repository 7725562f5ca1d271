"""Moved to :mod:`dpscaffold.books.journal`."""

from dpscaffold.books.journal import *  # noqa: F403
