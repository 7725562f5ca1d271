"""Rounds, computed: the readable engine of Algorithm 1, and the fast one that agrees with it.

Belongs here: what happens between two states of a server. Does not belong here: who may take part
and what it costs (``runs/``), when to evaluate and to stop (``training/``).

The names of this package are listed in ``__init__.pyi`` and imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
