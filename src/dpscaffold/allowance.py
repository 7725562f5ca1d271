"""Moved to :mod:`dpscaffold.books.allowance`."""

from dpscaffold.books.allowance import *  # noqa: F403
