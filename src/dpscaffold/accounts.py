"""Moved to :mod:`dpscaffold.books.accounts`."""

from dpscaffold.books.accounts import *  # noqa: F403
