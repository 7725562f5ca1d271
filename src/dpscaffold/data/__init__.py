"""Where federations come from: synthetic data, images, tables, arrays, and what was prepared
before.

The names of this package are listed in ``__init__.pyi`` and imported when first used: no reader is
loaded before somebody reads.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
