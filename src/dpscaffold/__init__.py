"""dpscaffold: private federated learning on heterogeneous data.

>>> from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic, train
>>> federation = synthetic(alpha=5, beta=5, users=20, records=200)
>>> plan = Plan(rounds=3, local_steps=5)
>>> result = train(federation, Logistic(40, 10), scaffold(), plan, Gaussian(clip=1.5, noise=10))
>>> result.ended
'completed'

The public names are listed in ``__init__.pyi`` and imported when first used, so that commands which
need no training (accounting, help) start without loading PyTorch.
"""

import lazy_loader

__version__ = "0.3.0.dev1"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
