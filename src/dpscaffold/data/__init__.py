"""Where federations come from: synthetic data, images, tables, arrays, prepared folders.

Belongs here: reading, partitioning among users, preprocessing, storage. Does not belong here: the
federation itself (``federation``), and models (``models``).

The names of this package are listed in ``__init__.pyi`` and imported when first used: no reader is
loaded before somebody reads.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
