"""Federated algorithms, one small file each, and the table of their names.

Belongs here: what an algorithm computes, as pure functions on flat vectors. Does not belong here:
noise (``engine/query.py``), clipping (``tasks``), and how users are stacked (``engine``).

The names of this package are listed in ``__init__.pyi`` and imported when first used. A name that
a file has too, such as ``scaffold``, is the function, whichever of the two is imported first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
