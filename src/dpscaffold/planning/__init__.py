"""Hyperparameters chosen without private data, on public surrogates.

Belongs here: artificial federations with the public facts of a private one, and the choice of a
plan on them. Does not belong here: anything that reads a record, and tuning on records
(``tuning``).

The names of this package are listed in ``__init__.pyi`` and imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
