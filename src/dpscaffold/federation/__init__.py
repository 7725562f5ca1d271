"""Who holds which data, what a row looks like, and what a server may know of both.

Belongs here: records, the roster, the schema. Does not belong here: reading files (``data``).

Tables of records need PyTorch, schemas and rosters do not: the names are imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
