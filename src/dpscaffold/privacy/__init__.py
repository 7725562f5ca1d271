"""Privacy accounting: descriptions of what ran in, bounds with a name and a proof out.

Belongs here: mechanisms, bounds, loss distributions, composition, the statement. Does not belong
here: anything that reads a record or a file. The package imports nothing from the rest of
dpscaffold. Its names are listed in ``__init__.pyi`` and imported when first used.

>>> from dpscaffold.privacy import RANDOM_PARTICIPATION, describe, round_up
>>> run = describe(rounds=400, local_steps=50, users=100, cohort_size=20,
...                records=4000, batch_sizes=800, noise=60, delta=2.5e-6)
>>> round_up(RANDOM_PARTICIPATION.epsilon(run))
'0.861'
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
