"""A privacy budget that several runs over the same records share, in a file.

The file is a ledger in the format of a site's (:mod:`~dpscaffold.deployment.site.ledger`), a
chained :class:`~dpscaffold.runs.journal.Journal`, and can be read as one. Its lines are these
events:

=============== ==================================================================================
event           what it says
=============== ==================================================================================
``site``        the first line: whose ledger this is, and the ε and δ that it ``allows`` in all
``grant``       what a ``run`` may spend: ε, δ and for how many rounds, and on what ``account``
``participate`` one ``round`` of a run, before its uploads are used; ``again`` with fresh noise
=============== ==================================================================================

A grant is reserved before a run begins and never given back: whether a run was stopped may depend
on what it showed. Rounds that a crash makes a run release again need a further grant, named after
the run. All grants add, ε and δ: this holds for mechanisms chosen after seeing what the earlier
ones showed, each with parameters fixed before it runs (Rogers, Roth, Ullman, Vadhan 2016).

Every reservation takes a lock, reads the file, checks it and is on the disk when it returns, so
runs in several processes can share one file.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpscaffold.errors import BadInput
from dpscaffold.privacy.numbers import round_up
from dpscaffold.runs.journal import Anchor, Journal

#: The name of a budget file where a site's ledger has the site's.
NAME = "budget file"
#: How the first line of one begins.
FIRST = b'{"allows": {'


@dataclass(frozen=True)
class BudgetGrant:
    """What one run may spend: ε and δ of this many rounds, for these neighbours.

    ``plan`` is the digest of the run's description; ``noise_seed`` is None where the noise is
    secret. Nothing tells the records: all grants of a file count as over the same ones.
    """

    run: str
    epsilon: float
    delta: float
    rounds: int
    unit: str
    neighbours: str
    plan: str = ""
    noise_seed: int | None = None

    def to_line(self) -> dict[str, Any]:
        """As a line of the ledger."""
        account = {name: getattr(self, name) for name in ACCOUNT}
        granted = {"participations": self.rounds, "epsilon": self.epsilon, "delta": self.delta}
        return {
            "event": "grant",
            "run": self.run,
            "plan": self.plan,
            "account": account,
            "grant": granted,
        }

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> BudgetGrant:
        """The inverse of :meth:`to_line`."""
        granted = line["grant"]
        return cls(
            run=line["run"],
            epsilon=float(granted["epsilon"]),
            delta=float(granted["delta"]),
            rounds=int(granted["participations"]),
            plan=line["plan"],
            **{name: line["account"][name] for name in ACCOUNT},
        )


ACCOUNT = ("unit", "neighbours", "noise_seed")


@dataclass(frozen=True)
class BudgetRound:
    """One round of a run, recorded before its uploads are used."""

    run: str
    round: int
    again: bool = False


@dataclass(frozen=True)
class BudgetFileContents:
    """What a budget file says: ε and δ in all, the grants in order, each run's rounds."""

    epsilon: float
    delta: float
    grants: Mapping[str, BudgetGrant]
    participations: Mapping[str, int]
    anchor: Anchor

    @property
    def spent(self) -> tuple[float, float]:
        """(Σε, Σδ) over all grants."""
        grants = self.grants.values()
        return math.fsum(g.epsilon for g in grants), math.fsum(g.delta for g in grants)

    @property
    def left(self) -> tuple[float, float]:
        """What may still be granted, never below 0."""
        epsilon, delta = self.spent
        return max(0.0, self.epsilon - epsilon), max(0.0, self.delta - delta)

    def fits(self, grant: BudgetGrant) -> bool:
        """Whether this grant stays within the total."""
        grants = [*self.grants.values(), grant]
        return (
            math.fsum(g.epsilon for g in grants) <= self.epsilon
            and math.fsum(g.delta for g in grants) <= self.delta
        )

    def of(self, run: str) -> list[BudgetGrant]:
        """The grants of one run: its plan's, and one for each further need."""
        return [g for name, g in self.grants.items() if name == run or name.startswith(f"{run}+")]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with what is spent and left."""
        (epsilon, delta), (epsilon_left, delta_left) = self.spent, self.left
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "spent": {"epsilon": epsilon, "delta": delta},
            "left": {"epsilon": epsilon_left, "delta": delta_left},
            "runs": [
                {**asdict(grant), "participations": self.participations.get(run, 0)}
                for run, grant in self.grants.items()
            ],
            "journal": asdict(self.anchor),
        }


class BudgetFile:
    """A budget file in use.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "budget.jsonl"
    >>> allowance = BudgetFile.open(path, epsilon=1.0, delta=1e-5)
    >>> allowance.reserve(BudgetGrant("a", 0.6, 2e-6, 100, "record", "replace-one"))
    >>> allowance.participate(BudgetRound("a", 1), after=0)
    >>> contents = BudgetFile(path).read()
    >>> [round(left, 9) for left in contents.left], contents.participations
    ([0.4, 8e-06], {'a': 1})
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._journal: Journal | None = None

    @classmethod
    def open(cls, path: Path | str, epsilon: float, delta: float) -> BudgetFile:
        """A new budget file, with so much in all."""
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise BadInput("out-of-range", f"epsilon is {epsilon}; give a finite number above 0")
        if not 0.0 < delta < 1.0:
            raise BadInput(
                "out-of-range", f"delta is {delta}; it must lie strictly between 0 and 1"
            )
        allowance = cls(path)
        if not allowance.path.parent.is_dir():
            raise BadInput(
                "folder-not-found",
                f"{path} cannot be made: its folder does not exist; make it first",
            )
        exists = f"{path} exists; what may be spent in all is never changed, name another file"
        if allowance._is_open():
            raise BadInput("file-exists", exists)
        with allowance._locked(new=True):
            if allowance._is_open():  # made by another process since
                raise BadInput("file-exists", exists)
            allows = {"epsilon": epsilon, "delta": delta}
            allowance._append({"event": "site", "site": NAME, "allows": allows})
        return allowance

    def _is_open(self) -> bool:
        """Whether there is more than the beginning of a first line, which a crash may leave."""
        if not self.path.exists():
            return False
        found = self.path.read_bytes() if self.path.is_file() else b"a folder\n"
        return b"\n" in found or found[: len(FIRST)] != FIRST[: len(found)]

    def read(self) -> BudgetFileContents:
        """The file as it stands, verified."""
        with self._locked():
            return self._contents()

    def reserve(self, grant: BudgetGrant) -> None:
        """Grant a run what it may spend, or refuse; on the disk when this returns."""
        with self._locked():
            contents = self._contents()
            self._check(contents, grant)
            self._append(grant.to_line())

    def participate(self, participation: BudgetRound, after: int) -> None:
        """Enter one round of a granted run, before its uploads are used.

        ``after`` is how many of its rounds the caller knows to be recorded: more mean that a copy
        of the run is at work too, and the round is refused.
        """
        with self._locked():
            if self._journal is None or not self._journal.untouched:
                recorded = self._contents().participations.get(participation.run, 0)
                if recorded != after:
                    raise BadInput(
                        "run-copied",
                        f"{self.path} records {recorded} rounds of this run where {after} are "
                        f"known here: a copy of the run has gone on; let only that one run",
                    )
            self._append({"event": "participate", **asdict(participation)})

    def follows(self, anchor: Anchor) -> bool:
        """Whether the file begins with the lines that the anchor was taken of."""
        with self._locked():
            return self._current().follows(anchor)

    def check(self, grant: BudgetGrant) -> None:
        """Refuse what :meth:`reserve` would refuse, and reserve nothing."""
        with self._locked():
            self._check(self._contents(), grant)

    def _check(self, contents: BudgetFileContents, grant: BudgetGrant) -> None:
        if grant.run in contents.grants:
            raise BadInput(
                "grant-exists", f"{self.path} holds a grant of the run {grant.run} already"
            )
        for other in contents.grants.values():
            if (other.unit, other.neighbours) != (grant.unit, grant.neighbours):
                raise BadInput(
                    "units-differ",
                    f"{self.path} is spent on {other.neighbours}, and this run protects "
                    f"{grant.neighbours}; give it a budget file of its own",
                )
            own = other.run.partition("+")[0] == grant.run.partition("+")[0]  # of other rounds
            if not own and None is not other.noise_seed == grant.noise_seed:
                raise BadInput(
                    "seed-repeated",
                    f"{self.path} holds a run with the seed {grant.noise_seed}, whose noise this "
                    f"one would repeat: nothing is guaranteed about both; give another "
                    f"plan.seed, or secret noise",
                )
        if not contents.fits(grant):
            epsilon, delta = contents.left
            raise BadInput(
                "budget-too-small",
                f"{self.path} has epsilon = {epsilon:.6g} of {contents.epsilon:g} and delta = "
                f"{delta:.3g} of {contents.delta:g} left, and {grant.rounds} rounds would take "
                f"epsilon = {round_up(grant.epsilon, 6)} and delta = {grant.delta:.3g}; take fewer "
                f"rounds, more noise or a smaller privacy.delta",
            )

    @contextmanager
    def _locked(self, new: bool = False) -> Iterator[None]:
        """One reservation at a time, over all processes; each is short, so others wait."""
        if not new and not self.path.is_file():
            raise BadInput(
                "not-a-budget-file",
                f"{self.path} is no budget file; open one with: dpscaffold privacy {self.path} "
                f"--epsilon E --delta D",
            )
        lock = self.path.with_name(f".{self.path.name}.lock")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _current(self) -> Journal:
        """The journal, read again if another process has written to it since."""
        if self._journal is None or not self._journal.untouched:
            self._journal = Journal(self.path)
        return self._journal

    def _append(self, line: Mapping[str, Any]) -> None:
        self._journal = self._journal or Journal(self.path)
        self._journal.append({**line, "time": datetime.now(UTC).isoformat(timespec="seconds")})

    def _contents(self) -> BudgetFileContents:
        journal = self._current()
        grants: dict[str, BudgetGrant] = {}
        participations: dict[str, int] = {}
        total: tuple[float, float] | None = None
        for place, line in enumerate(journal.lines(), start=1):
            try:
                event = line["event"]
                if (event == "site") != (place == 1):
                    raise ValueError(f"{event!r} is out of place")
                if event == "site":
                    total = float(line["allows"]["epsilon"]), float(line["allows"]["delta"])
                elif event == "grant":
                    grants[line["run"]] = BudgetGrant.from_line(line)
                elif event == "participate":
                    run = str(line["run"])
                    participations[run] = participations.get(run, 0) + 1
                else:
                    raise ValueError(f"{event!r} is unknown")
            except (KeyError, TypeError, ValueError) as error:
                raise BadInput(
                    "budget-file-damaged",
                    f"{self.path} is no budget file: line {place} is not what it should be "
                    f"({error}); restore it",
                ) from error
        if total is None:
            raise BadInput(
                "budget-file-damaged", f"{self.path} does not say how much may be spent; restore it"
            )
        return BudgetFileContents(*total, grants, participations, journal.anchor)
