"""Engines: the loop over rounds, and what runs a round on this machine.

Belongs here: the readable loop, the stacked simulator, aggregation, memory between rounds. Does not
belong here: evaluation and checkpoints (``training``), sites on other machines (``deployment``).

The names of this package are listed in ``__init__.pyi`` and imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
