"""One user's round: the Gaussian mechanism, the noised query, the K steps."""

from dpscaffold.local.gaussian import Gaussian

__all__ = ["Gaussian"]
