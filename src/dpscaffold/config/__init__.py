"""Configuration: a TOML file, overridden key by key, resolved into one frozen value.

The tables are ``[data] [task] [algorithm] [plan] [privacy]``. Unknown keys are refused with the
nearest known one; what was resolved is written beside every result and can be read back. The names
of this package are listed in ``__init__.pyi`` and imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
