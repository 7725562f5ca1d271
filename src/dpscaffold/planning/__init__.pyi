from .facts import Facts as Facts
from .facts import Limits as Limits
from .recommendation import Goal as Goal
from .recommendation import plan as plan
