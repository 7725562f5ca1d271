"""Moved to :mod:`dpscaffold.books.runledger`."""

from dpscaffold.books.runledger import *  # noqa: F403
