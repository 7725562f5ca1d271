"""What is learnt: models, losses, metrics, and clipped gradient sums.

Belongs here: linear models, a network with one hidden layer, any ``torch.nn.Module``, and how their
per-example gradients are clipped. Does not belong here: noise, and how a model is trained.

The names of this package are listed in ``__init__.pyi`` and imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
