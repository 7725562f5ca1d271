"""A privacy budget that several runs over the same records share, in a file.

The file is a chained :class:`~dpscaffold.runs.journal.Journal`. Its lines are these events:

=============== ==================================================================================
event           what it says
=============== ==================================================================================
``open``        the first line: the ε and δ in all, and what was ``already`` spent on the records
``grant``       what a ``run`` may spend: ε, δ and for how many rounds
``participate`` one ``round`` of a run, before its uploads are used; ``again`` with fresh noise
=============== ==================================================================================

A grant is reserved before a run begins and never given back: whether a run was stopped may depend
on what it showed. More rounds, and rounds that a crash makes a run release again, need a further
grant, named after the run. All grants add, ε and δ: this holds for mechanisms chosen after seeing
what the earlier ones showed, each with parameters fixed before it runs (Rogers, Roth, Ullman,
Vadhan 2016).

Every reservation takes a lock, reads the file, checks it and is on the disk when it returns, so
runs in several processes can share one file.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpscaffold.atomic import new_file
from dpscaffold.checks import above
from dpscaffold.errors import BadInput
from dpscaffold.privacy.mechanism import check_delta
from dpscaffold.privacy.numbers import round_up
from dpscaffold.runs.journal import Journal


@dataclass(frozen=True)
class BudgetGrant:
    """What one run may spend: ε and δ of this many rounds, for these neighbours.

    ``noise_seed`` is None where the noise is secret. Nothing tells the records: all grants of a
    file count as over the same ones.
    """

    run: str
    epsilon: float
    delta: float
    rounds: int
    unit: str
    neighbours: str
    noise_seed: int | None = None


@dataclass
class BudgetFileContents:
    """What a budget file says: ε and δ in all, what was spent before it was opened, the grants in
    order, each run's rounds, and the file's journal."""

    epsilon: float
    delta: float
    already: tuple[float, float]
    grants: dict[str, BudgetGrant]
    participations: dict[str, int]
    journal: Journal

    @property
    def spent(self) -> tuple[float, float]:
        """(Σε, Σδ) over all grants, and what was spent before."""
        return self._with()

    def _with(self, *more: BudgetGrant) -> tuple[float, float]:
        grants, (epsilon, delta) = [*self.grants.values(), *more], self.already
        return (
            math.fsum([epsilon, *(grant.epsilon for grant in grants)]),
            math.fsum([delta, *(grant.delta for grant in grants)]),
        )

    @property
    def left(self) -> tuple[float, float]:
        """What may still be granted, never below 0."""
        epsilon, delta = self.spent
        return max(0.0, self.epsilon - epsilon), max(0.0, self.delta - delta)

    def fits(self, grant: BudgetGrant) -> bool:
        """Whether this grant stays within the total."""
        epsilon, delta = self._with(grant)
        return epsilon <= self.epsilon and delta <= self.delta

    def check(self, grant: BudgetGrant) -> None:
        """Refuse a grant that this file must not give."""
        path = self.journal.path
        if grant.run in self.grants:
            raise BadInput("grant-exists", f"{path} holds a grant of the run {grant.run} already")
        for other in self.grants.values():
            if (other.unit, other.neighbours) != (grant.unit, grant.neighbours):
                raise BadInput(
                    "units-differ",
                    f"{path} is spent on {other.neighbours}, and this run protects "
                    f"{grant.neighbours}; give it a budget file of its own",
                )
            own = other.run.partition("+")[0] == grant.run.partition("+")[0]  # of other rounds
            if not own and None is not other.noise_seed == grant.noise_seed:
                raise BadInput(
                    "seed-repeated",
                    f"{path} holds a run with the seed {grant.noise_seed}, whose noise this "
                    f"one would repeat: nothing is guaranteed about both; give another "
                    f"plan.seed, or secret noise",
                )
        if not self.fits(grant):
            epsilon, delta = self.left
            raise BadInput(
                "budget-too-small",
                f"{path} has epsilon = {epsilon:.6g} of {self.epsilon:g} and delta = "
                f"{delta:.3g} of {self.delta:g} left, and {grant.rounds} rounds would take "
                f"epsilon = {round_up(grant.epsilon, 6)} and delta = {grant.delta:.3g}; take fewer "
                f"rounds, more noise or a smaller privacy.delta",
            )

    def of(self, run: str) -> list[BudgetGrant]:
        """The grants of one run: its plan's, and one for each further need."""
        return [g for name, g in self.grants.items() if name.partition("+")[0] == run]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with what is spent and left."""
        spent, left = (
            dict(zip(("epsilon", "delta"), v, strict=True)) for v in (self.spent, self.left)
        )
        runs = [
            {**asdict(grant), "participations": self.participations.get(run, 0)}
            for run, grant in self.grants.items()
        ]
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "already": self.already,
            "spent": spent,
            "left": left,
            "runs": runs,
            "journal": asdict(self.journal.anchor),
        }


class BudgetFile:
    """A budget file in use.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "budget.jsonl"
    >>> allowance = BudgetFile.open(path, epsilon=1.0, delta=1e-5)
    >>> allowance.reserve(BudgetGrant("a", 0.6, 2e-6, 100, "record", "replace-one"))
    >>> allowance.participate("a", 1, after=0)
    >>> contents = BudgetFile(path).read()
    >>> [round(left, 9) for left in contents.left], contents.participations
    ([0.4, 8e-06], {'a': 1})
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._journal: Journal | None = None

    @classmethod
    def open(
        cls,
        path: Path | str,
        epsilon: float,
        delta: float,
        already: tuple[float, float] = (0.0, 0.0),
    ) -> BudgetFile:
        """A new budget file, with so much in all, of which ``already`` (ε, δ) was spent: by other
        software, or as another budget file tells."""
        above("epsilon", epsilon, 0)
        above("already spent epsilon", already[0] or epsilon, 0)
        check_delta("delta", delta)
        check_delta("already spent delta", already[1] or delta)
        allowance = cls(path)
        if not allowance.path.parent.is_dir():
            raise BadInput(
                "folder-not-found",
                f"{path} cannot be made: its folder does not exist; make it first",
            )
        first = {"event": "open", "epsilon": epsilon, "delta": delta, "already": already}
        try:
            with new_file(allowance.path) as draft:
                Journal(draft).append({**first, "time": _now()})
        except FileExistsError:
            raise BadInput(
                "file-exists",
                f"{path} exists; what may be spent in all is never changed, name another file",
            ) from None
        return allowance

    def read(self) -> BudgetFileContents:
        """The file as it stands, verified."""
        with self._locked():
            return self._contents()

    def reserve(self, grant: BudgetGrant) -> None:
        """Grant a run what it may spend, or refuse; on the disk when this returns."""
        with self._locked():
            contents = self._contents()
            contents.check(grant)
            contents.journal.append({"event": "grant", **asdict(grant), "time": _now()})

    def participate(self, run: str, round: int, after: int, again: bool = False) -> None:
        """Enter one round of a granted run, before its uploads are used.

        ``again`` says that its noise is fresh. ``after`` is how many of its rounds the caller knows
        to be recorded: more mean that a copy of the run is at work too, and the round is refused.
        """
        with self._locked():
            journal = self._journal
            if journal is None or not journal.untouched:
                contents = self._contents()
                journal, recorded = contents.journal, contents.participations.get(run, 0)
                if recorded != after:
                    raise BadInput(
                        "run-copied",
                        f"{self.path} records {recorded} rounds of this run where {after} are "
                        f"known here: a copy of the run has gone on; let only that one run",
                    )
            line = {"event": "participate", "run": run, "round": round, "again": again}
            journal.append({**line, "time": _now()})

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One reservation at a time, over all processes; each is short, so others wait."""
        if not self.path.is_file():
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

    def _contents(self) -> BudgetFileContents:
        journal = self._journal = Journal(self.path)
        lines = journal.lines()
        first = next(lines, {})
        if first.get("site") == "budget file":
            raise BadInput(
                "wrong-version",
                f"{self.path} was written by dpscaffold 0.2, and this version does not read it; "
                f"open a new one with what it shows as spent: dpscaffold privacy NEW.jsonl "
                f"--epsilon E --delta D --already-spent EPSILON DELTA",
            )
        try:
            total, already = (first["epsilon"], first["delta"]), tuple(first["already"])
            found = BudgetFileContents(*total, already, {}, {}, journal)
            for line in lines:
                _take(found, line)
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                "budget-file-damaged",
                f"{self.path} is no budget file: a line of it is not what it should be ({error}); "
                f"restore it",
            ) from error
        return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _take(found: BudgetFileContents, line: dict[str, Any]) -> None:
    """Count what a line says."""
    del line["time"]
    event, run = line.pop("event"), str(line["run"])
    if event == "grant":
        found.grants[run] = BudgetGrant(**line)
    elif event == "participate":
        found.participations[run] = found.participations.get(run, 0) + 1
    else:
        raise ValueError(f"{event!r} is unknown")
