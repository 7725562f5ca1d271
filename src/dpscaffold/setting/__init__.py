"""What the parties of a run agree on: plan, Gaussian mechanism, budget, and the run as a value.

Belongs here: public numbers and their checks, and the rule for seeds. Does not belong here:
anything that reads a record.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
