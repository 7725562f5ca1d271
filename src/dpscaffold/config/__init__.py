"""Configuration: a TOML file, overridden key by key, resolved into one frozen value.

Belongs here: the tables ``[task] [algorithm] [plan] [privacy] [secure]``, how a file is read and
checked, and what the parties of a run agree on: the public numbers of a run and the run as a value.
Unknown keys are refused with the nearest known one; the resolved values are written next to every
result and can be read back. Does not belong here: ``[data]`` (``data/config.py``), and anything
that reads a record.

The names of this package are listed in ``__init__.pyi`` and imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
