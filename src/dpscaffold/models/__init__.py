"""Trained models: keep them, use them on new rows, measure them, hand them to other software.

Belongs here: the model, its folder, prediction, evaluation, export. Does not belong here: training
(``training``), and metrics of scores against targets (``tasks/metrics.py``).

The names of this package are listed in ``__init__.pyi`` and imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
