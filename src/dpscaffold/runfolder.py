"""Moved to :mod:`dpscaffold.books.runfolder`."""

from dpscaffold.books.runfolder import *  # noqa: F403
