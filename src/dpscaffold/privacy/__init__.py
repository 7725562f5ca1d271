"""Privacy accounting: what a run releases in, ε towards each adversary with its theorem out.

Belongs here: mechanisms, adversaries, losses, composition, the statement. Does not belong here:
anything that reads a record or a file. The package imports nothing from the rest of dpscaffold but
its errors. Its names are listed in ``__init__.pyi`` and imported when first used.

>>> from dpscaffold.privacy import SERVER, describe, epsilon, round_up
>>> run = describe(rounds=400, local_steps=50, users=100, cohort_size=20,
...                records=4000, batch_sizes=800, noise=60, delta=2.5e-6)
>>> round_up(epsilon(run, SERVER))
'0.861'
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
