"""Who looks at a run, and how much noise hides a record from them.

Every guarantee is (the noise that hides a record from this adversary) × (how often): this module
answers the first, :mod:`dpscaffold.privacy.accounting` the second. Without a theorem that counts
the noise of others, a record is hidden by its own user's noise alone.

>>> from dpscaffold.privacy import describe
>>> run = describe(rounds=400, local_steps=1, users=100, cohort_size=16, records=4000,
...                batch_sizes=800, noise=60, memory=False, one_sum=True)
>>> for who in adversaries(run).values():
...     seen = noise_seen(run, who)
...     print(who.name, seen.multipliers, "Theorem", seen.theorem)
server [60.] Theorem 1
third_party [240.] Theorem 2
participant [232.37900077] Theorem 2
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dpscaffold.errors import BadInput
from dpscaffold.privacy.loss import Array
from dpscaffold.privacy.mechanism import Mechanism

#: Gradients are clipped to this much of C before they enter a secure sum, so that computed sums of
#: neighbours are no further apart than exact sums of gradients of norm C, for up to
#: :data:`MOST_SUMMED` records at a site (docs/privacy-proofs.md, How sums are rounded).
CLIPPED_SHARE = 1 - 2.0**-10
MOST_SUMMED = 1 << 20


@dataclass(frozen=True)
class Adversary:
    """Somebody who looks at what a run releases.

    Attributes:
        name: What options, files and tables call it.
        words: Who it is, for people.
        sees: Every user's uploads, or sums of them alone (a global model is made of such a sum).
        knows: The noise of how many users it knows besides, because they help it.
    """

    name: str
    words: str
    sees: Literal["uploads", "sums"]
    knows: int = 0


SERVER = Adversary("server", "the server, which sees every upload", "uploads")
#: The server of secure sums, if all other users collude with it.
ALONE = Adversary("alone", "that server together with all other sites", "uploads")
THIRD_PARTY = Adversary("third_party", "anybody who is given the model", "sums")


def participants(colluders: int = 1) -> Adversary:
    """Users who took part and pool what they know: every model, and their own uploads, noise
    included."""
    words = (
        "a site that took part" if colluders == 1 else f"{colluders} sites that pool what they know"
    )
    return Adversary("participant", words, "sums", colluders)


def adversaries(run: Mechanism, colluders: int = 1) -> dict[str, Adversary]:
    """The adversaries of a run by name; ``colluders`` is how many participants pool what they
    know."""
    if not 1 <= colluders < max(2, run.users):
        raise BadInput(
            "out-of-range",
            f"colluders={colluders} of {run.users} users; give at least 1 and leave one to protect",
        )
    found = [SERVER, THIRD_PARTY, participants(colluders)]
    if run.secure is not None:
        k, least = run.secure.colluders, run.secure.least
        helped = f" and is helped by at most {k} of them" if k else ""
        words = f"the server, which sees sums over at least {least} sites{helped}"
        found[:1] = [Adversary("server", words, "sums", k), ALONE]
    return {who.name: who for who in found}


@dataclass(frozen=True)
class Noise:
    """What hides a record of each group of users: σ over what one record can change, (groups,), the
    theorem that says so, and why the noise of others does not count."""

    multipliers: NDArray[np.float64]
    theorem: str
    not_more: str | None = None


def noise_seen(run: Mechanism, who: Adversary) -> Noise:
    """How much noise hides a record of each group from an adversary.

    Theorem 1 counts a user's own noise, Theorem 2 that of the other participants in a sum, Theorem
    4 that of the honest members of a secure sum (docs/privacy-proofs.md).
    """
    own = run.noise * np.array([group.louder for group in run.groups])
    reason = _not_hidden_by_others(run, who)
    if reason is not None:
        return Noise(own, "1", reason)
    if run.secure is None:
        return Noise(run.noise * _in_sum(run, run.cohort_size - who.knows), "2")
    # The worst of the lists that a site accepts: of a list A, |A| − k members are honest.
    k, m = run.secure.colluders, run.cohort_size
    lists = [
        math.sqrt((m - k) / (members - k)) * _in_sum(run, members - k)
        for members in range(run.secure.least, m + 1)
    ]
    return Noise(run.noise * np.min(lists, axis=0), "4")


def _first(reasons: Mapping[str, bool]) -> str | None:
    """The first of these that holds, or None."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def _not_hidden_by_others(run: Mechanism, who: Adversary) -> str | None:
    """Why no theorem counts the noise of other users, or None."""
    open_sums = run.secure is None
    helpers = 0 if run.secure is None else run.secure.colluders
    return _first(
        {
            "it sees single uploads": who.sees == "uploads",
            "users keep a memory between rounds, which carries earlier noise": run.memory,
            "a second local step is taken at a point that contains the first one's noise": (
                run.local_steps > 1
            ),
            "uploads are not known to be one vector, linear in the noised gradient": (
                not run.one_sum
            ),
            f"secure sums are made for at most {helpers} colluding sites": (
                not open_sums and who.knows > helpers
            ),
            f"a participant may decline ({run.declines}), and then adds no noise": (
                open_sums and run.declines is not None
            ),
            "a round was run again with fresh noise": open_sums and run.extra > 0,
            "all other participants may collude": (open_sums and who.knows >= run.cohort_size - 1),
        }
    )


def unproved(run: Mechanism) -> str | None:
    """Why no theorem covers a run of this kind, whatever its noise, or None."""
    return _first(
        {
            f"no theorem covers a {type(run).__name__}": type(run) is not Mechanism,
            f"no theorem covers {', '.join(run.unproved_hooks)} of the algorithm": (
                run.unproved_hooks != ()
            ),
            "the clip is computed from private data (clip='median'); give a fixed clip": (
                run.clip == "median"
            ),
            "bounded sums are proved for single records; give unit='record'": (
                run.unit == "user" and run.query == "sums"
            ),
            "weights by records tell how many records a user has; give weighting='uniform'": (
                run.unit == "user" and run.weighting == "records"
            ),
        }
    )


def no_guarantee(run: Mechanism) -> str | None:
    """Why nothing at all is guaranteed, or None."""
    little = f"noise of {run.noise:g} hides nothing; give at least {run.least_stated:.3g}"
    return unproved(run) or _first(
        {
            "no noise is added (noise=0), so epsilon is infinite": run.noise == 0.0,
            little: run.noise < run.least_stated,
        }
    )


def _in_sum(run: Mechanism, members: int) -> Array:
    """How much louder than σ_g the noise of a sum is, relative to what one record can move it, for
    each group's users: √(Σ_{j∈C}(σ_j·w_j/b_j)²)/(w_i/b_i).

    A user's upload enters with weight w_j and carries noise of deviation 2C·σ_j·w_j/b_j, and one
    record of user i moves the sum by at most 2C·w_i/b_i. C is the quietest set of ``members`` users
    that contains i: whoever helps the adversary, at least so many others are left, and these hide
    least when they are the quietest of all. For equal users it is √members.
    """
    by_records = run.weighting == "records" and run.unit == "record"
    weights = np.array([float(g.records) if by_records else g.weight for g in run.groups])
    ratio = weights / np.array([1 if run.unit == "user" else g.batch for g in run.groups])
    loud = ratio * np.array([group.louder for group in run.groups])
    ascending = np.sort(np.repeat(loud, [group.users for group in run.groups]))
    quietest = np.concatenate([[0.0], np.cumsum(ascending**2)])
    # A user among the quietest has the rest of them as companions, any other all but the last.
    among = np.searchsorted(ascending, loud, side="left") < members
    others = np.where(among, quietest[members] - loud**2, quietest[members - 1])
    found: Array = np.sqrt(loud**2 + np.maximum(others, 0.0)) / ratio
    return found
