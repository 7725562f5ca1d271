"""The part of a draft that says how to train: scaling, task, algorithm, plan and privacy.

It is gradient descent on the records of all sites together (docs/drafts.md says why): every site
takes one step on all its records in every round, and the mean is weighted by records. Differences
between sites then disturb nothing, and no site's noise is louder than another's.
"""

from __future__ import annotations

from collections.abc import Mapping

from dpscaffold.data.tables.looking import LEAST_RECORDS
from dpscaffold.federation.roster import FEW_USERS
from dpscaffold.federation.schema import Kind
from dpscaffold.privacy.gaussian import gaussian_epsilon, gaussian_multiplier
from dpscaffold.privacy.showing import round_up

#: Rows are cut to this norm at most. A larger one leaves more of the noise to the bias and less to
#: the weights of features, and the bias is learnt more slowly.
MOST_NORM = 3.0
#: Where no column names a site, records are dealt out to so many.
DEALT = 10
#: A site is named where its noise would be more than this share of all sites' together.
DOMINATES = 0.5


def dealt(records: int) -> dict[str, int]:
    """Sites of equal sizes, for records that belong to none.

    >>> dealt(45)
    {'0': 11, '1': 11, '2': 11, '3': 11}
    """
    count = max(1, min(DEALT, records // LEAST_RECORDS))
    return {str(site): records // count for site in range(count)}


def standardised(norm: float) -> list[str]:
    """The preparation of a table whose numbers have no public range."""
    return [
        "# Mean and deviation are read off the training records, outside epsilon; the docs",
        '# say how to fit them inside ("Preprocessing and privacy"). Long rows are scaled down.',
        f'preprocess = ["standardise", "clip-norm:{norm:g}"]',
    ]


def run_lines(
    sizes: Mapping[str, int], target: Kind, norm: float, labels: int, epsilon: float
) -> list[str]:
    """How to train on sites of these ``sizes``, whose rows have at most this ``norm``; ``labels``
    is the number of label columns."""
    ratio = 1.0 if len(sizes) <= FEW_USERS else round(FEW_USERS / len(sizes), 3)
    quiet = loud_site(sizes) or "a small site counts less, and so does its noise"
    return [
        "",
        "[task]",
        f'kind = "{"linear" if target == "number" else "logistic"}"',
        "",
        "[algorithm]",
        "# With one step per round sites do not drift apart, so nothing needs to be corrected.",
        'name = "fedavg"',
        "",
        "[plan]",
        "rounds = 100",
        "local_steps = 1",
        f"user_ratio = {ratio:g}  # the share of sites that take part in a round",
        "data_ratio = 1.0  # a step uses all records of a site",
        f'weighting = "records"  # {quiet}',
        'learning_rate = "plan"  # from the sizes of the sites and the noise: it reads no record',
        "regularisation = 0.0",
        'averaging = "tail"  # average the last rounds: free, and better under noise',
        "",
        "[privacy]",
        "# Towards the server, over a draw of participants that nobody chose: without plan.seed",
        "# the operating system chooses it. The seed is kept in the run folder (seed.json).",
        *_epsilon(epsilon, sum(sizes.values())),
        'sampling = "poisson"',
        f"clip = {clip_bound(target, norm, labels)}",
        "secret = true  # noise from the operating system: a seed would let it be taken off again",
    ]


def row_norm(columns: int) -> float:
    """The norm that rows are cut to: √d, which a standardised row of d features has on average,
    and at most :data:`MOST_NORM`.

    >>> row_norm(2), row_norm(30)
    (1.41, 3.0)
    """
    return float(f"{min(MOST_NORM, columns**0.5):.3g}")


def clip_bound(target: Kind, norm: float, labels: int = 1) -> str:
    """C: what few gradients exceed. A record's gradient has the norm of its row, √(N² + 1) with
    the bias, times the error of its scores: below 1 where classes are told apart well, about 0.7
    for each of several labels, and rarely above a quarter for a number in [−1, 1].

    >>> clip_bound("class", 3.0), clip_bound("labels", 3.0, labels=2), clip_bound("number", 3.0)
    ('3.2', '3.2', '0.79')
    """
    error = {"class": 1.0, "labels": (labels / 2) ** 0.5, "number": 0.25}[target]
    return f"{error * (norm**2 + 1) ** 0.5:.2g}"


def loud_site(sizes: Mapping[str, int]) -> str | None:
    """The site whose noise would drown all others' if sites counted alike, in words; None where
    there is none. A site's noise is one over its records.

    >>> loud_site({"charite": 720, "oslo": 500, "lille": 10})
    "lille has 10 records: counted like charite, its noise would be 72 times charite's"
    """
    there = {name: size for name, size in sizes.items() if size >= LEAST_RECORDS}
    if len(there) < 3:
        return None
    least, most = min(there, key=lambda s: there[s]), max(there, key=lambda s: there[s])
    if there[least] ** -2 <= DOMINATES * sum(size**-2 for size in there.values()):
        return None
    times = there[most] / there[least]
    return (
        f"{_plain(least)} has {there[least]} records: counted like {_plain(most)}, its noise would "
        f"be {times:.0f} times {_plain(most)}'s"
    )


def _plain(name: str) -> str:
    """A site's name as a comment can hold it."""
    return "".join(sign if sign.isprintable() else " " for sign in name) or "a site without a name"


def _epsilon(epsilon: float, records: int) -> list[str]:
    """ε, and what it is for replacing a record: all steps on full batches are one Gaussian, of
    twice the shift there. δ is that of a run on four fifths of the records."""
    delta, replaced = 1 / max(20, 8 * records), "more than twice as much"
    if 1e-3 <= epsilon <= 100:
        noise = gaussian_multiplier(epsilon, delta)
        replaced = f"about {round_up(gaussian_epsilon(noise / 2, delta))}"
    return [
        f"# epsilon is for removing a record's content, and {replaced} for replacing one record",
        '# by another. (sampling = "fixed" keeps it for that, with twice the noise.)',
        f"epsilon = {epsilon:g}  # the noise is solved from it",
    ]
