"""Training: the front door, the run in progress, evaluation, events, and the result.

Belongs here: what happens around rounds. Does not belong here: a round itself (``engines``), and
the use of a trained model (``models``).

The names of this package are listed in ``__init__.pyi`` and imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
