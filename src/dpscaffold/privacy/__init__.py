"""Privacy accounting: descriptions of what ran in, bounds with a name and a proof out.

This package reads :class:`Mechanism` descriptions and imports nothing from the rest of dpscaffold.

>>> run = describe(rounds=400, local_steps=50, users=100, cohort_size=20,
...                records=4000, batch_sizes=800, noise=60, delta=2.5e-6)
>>> round_up(RANDOM_PARTICIPATION.epsilon(run))
'0.861'
"""

from dpscaffold.privacy.bound import VIEWS, Bound, no_guarantee
from dpscaffold.privacy.bounds import (
    AGGREGATE,
    AGGREGATE_PARTICIPANT,
    BOUNDS,
    CAP,
    LEDGER,
    PAPER_THIRD_PARTY,
    RANDOM_PARTICIPATION,
    RANDOM_PARTICIPATION_RDP,
    USER_SAMPLING,
    aggregate_among,
    bound_for,
    bound_named,
)
from dpscaffold.privacy.calibrate import Combination, budget_table, calibrate_noise
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.describe import (
    Group,
    Mechanism,
    NoisedQuery,
    Participation,
    Round,
    describe,
)
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.goals import Goal, noise_for, rounds_for
from dpscaffold.privacy.human import GroupTerms, HumanTerms, TruePositives, human_terms
from dpscaffold.privacy.ledger import Ledger
from dpscaffold.privacy.live import Spending, largest_rounds
from dpscaffold.privacy.preparation import Preparation, Protection, Remark, charged
from dpscaffold.privacy.showing import round_up
from dpscaffold.privacy.statement import statement
from dpscaffold.privacy.tradeoff import TradeOff

__all__ = [
    "AGGREGATE",
    "AGGREGATE_PARTICIPANT",
    "BOUNDS",
    "CAP",
    "LEDGER",
    "PAPER_THIRD_PARTY",
    "RANDOM_PARTICIPATION",
    "RANDOM_PARTICIPATION_RDP",
    "USER_SAMPLING",
    "VIEWS",
    "Bound",
    "Combination",
    "Cost",
    "Goal",
    "Group",
    "GroupTerms",
    "HumanTerms",
    "Ledger",
    "Mechanism",
    "NoisedQuery",
    "Participation",
    "Preparation",
    "PrivacyError",
    "Protection",
    "Remark",
    "Round",
    "Spending",
    "TradeOff",
    "TruePositives",
    "aggregate_among",
    "bound_for",
    "bound_named",
    "budget_table",
    "calibrate_noise",
    "charged",
    "describe",
    "human_terms",
    "largest_rounds",
    "no_guarantee",
    "noise_for",
    "round_up",
    "rounds_for",
    "statement",
]
