"""Server optimisers by name: they wrap the ``update`` of any algorithm and add slots at the server.

They see the mean upload alone, so they are post-processing: every privacy bound stands. Warm-start
rounds, in which x stays, are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from dpscaffold.algorithms.adam import with_adam
from dpscaffold.algorithms.base import Algorithm
from dpscaffold.algorithms.momentum import with_momentum

#: By the name of ``algorithm.server``; their further arguments are keys of ``[algorithm]``.
SERVERS: dict[str, Callable[..., Algorithm]] = {"momentum": with_momentum, "adam": with_adam}
