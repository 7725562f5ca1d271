"""The worst pair of datasets that a user may hold, for the task and the mechanism of a run.

DP speaks of every dataset, so the adversary chooses: all records but one are alike, and the one, a
*canary*, is clipped at full length against them. Whether it is there moves a step's sum by the
whole sensitivity; nothing else in the sum moves at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation, Records
from dpscaffold.federation.schema import Kind, Target
from dpscaffold.privacy import Mechanism
from dpscaffold.tasks import Batch, Mlp, Task
from dpscaffold.tasks.clipping import row_squares
from dpscaffold.tasks.linear import Linear

#: A batch of the game holds at least this many records, so that a wrong divisor shows.
LEAST_BATCH = 4
#: The most records that a user of the game holds, where the run's rate allows.
MOST_RECORDS = 4096
#: How long a canary's features are, in units of C: as long as it takes to be clipped, and hostile
#: ones, whose squares float32 cannot hold.
LENGTHS = (1.0, 4.0, 16.0, 64.0, 256.0, 1e10, 1.8e19, 1e25, 1e38)
#: Lengths of a moved sum that rounding may add to what the clip allows.
ROUNDING = 1e-4


@dataclass(frozen=True)
class Pair:
    """Two datasets of one user that differ in one record (with a user as unit, in all of them).

    Features are (R, d), labels (R,); ``moved`` (P,) is how far the sum of clipped gradients at x⁰
    moves when the canary is in the batch, ``length`` its norm in units of C (2 is all there is
    under replace-one, 1 under zero-out). ``batch`` of the R records are drawn. The other users hold
    ``outside`` too.
    """

    inside: tuple[Tensor, Tensor]
    outside: tuple[Tensor, Tensor]
    moved: Tensor
    length: float
    batch: int

    @property
    def unclipped(self) -> bool:
        """Whether one record moves the sum farther than the clip allows: then nothing holds."""
        replaced = bool(self.outside[0].isfinite().all())
        return self.length > (2 if replaced else 1) * (1 + ROUNDING)

    @property
    def records(self) -> int:
        """R."""
        return len(self.inside[1])

    @property
    def direction(self) -> Tensor:
        """Where the canary points, (P,), of norm 1."""
        unit: Tensor = self.moved / self.moved.norm()
        return unit


def small(task: Task) -> tuple[Task, Kind]:
    """The task at its smallest size, where its clipping is the same code, and its kind of target.

    A module of the user's own stays as it is.
    """
    if isinstance(task, Linear):
        outputs = task.loss.outputs(2)
        return Linear(1, outputs, task.loss), task.loss.kind
    if isinstance(task, Mlp):
        return replace(task, features=2, classes=task.loss.outputs(2), hidden=4), task.loss.kind
    return task, "class"


def sizes(run: Mechanism) -> tuple[int, int]:
    """(R, b) of the worst user's rate, with as few records as show a wrong divisor.

    ε depends on b/R alone, and games on few records are fast. Where the fraction cannot be reduced
    the worst user keeps its records.
    """
    worst = max(run.groups, key=lambda group: group.rate)
    factor = math.gcd(worst.batch, worst.records)
    batch, records = worst.batch // factor, worst.records // factor
    times = -(-LEAST_BATCH // batch)
    if times > factor:
        times = factor
    return records * times, batch * times


def _candidates(clip: float, dimension: int, seed: int) -> Tensor:
    """Features of the canaries to try, from short to long."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [torch.ones(dimension), *torch.randn(3, dimension, generator=generator)]
    rows = [length * clip * a for length in LENGTHS for a in shapes]
    # Records that are no numbers must add nothing: then they are not chosen.
    wild = [torch.full((dimension,), value) for value in (math.nan, math.inf)]
    return torch.stack([*(row.clamp(-3e38, 3e38) for row in rows), *wild])


def make_pair(task: Task, kind: Kind, run: Mechanism, dimension: int, seed: int) -> Pair:
    """The pair whose canary moves a clipped sum the farthest, of those tried."""
    if isinstance(run.clip, str):
        raise BadInput(
            "median-clip",
            "privacy.clip is 'median', which has no guarantee; give a number to audit",
        )
    candidates = _candidates(run.clip, dimension, seed)
    low, high = _labels(kind, run.clip)
    here, there = (
        clipped_at(task.initial(seed), task, candidates, _column(label, len(candidates), kind),
                   run.clip)
        for label in (low, high)
    )  # fmt: skip
    replaced = run.sampling == "fixed" or run.unit == "user"
    moved = here - there if replaced else here
    lengths = torch.linalg.vector_norm(moved, dim=1, dtype=torch.float64).nan_to_num(math.inf)
    # Of those that move the sum as far as any, the shortest features: the first.
    best = int((lengths >= (1 - ROUNDING) * lengths.max()).nonzero()[0])
    if not float(lengths[best]) > 0:
        raise BadInput(
            "no-gradient",
            f"the task {task.name!r} has no gradient on any record that was tried, so there is no "
            f"game to play; audit another task",
        )
    records, batch = sizes(run)
    canary, other = candidates[best], (candidates[best], high)
    if not replaced:  # an empty record: its gradient is not a number, so it adds exactly nothing
        other = (torch.full_like(canary, math.nan), low)
    outside = (other[0].repeat(records, 1), _column(other[1], records, kind))
    features, labels = outside[0].clone(), outside[1].clone()
    changed = slice(None) if run.unit == "user" else slice(0, 1)
    features[changed], labels[changed] = canary, low
    if run.declared_sizes and records > 1:
        # Add/remove: without the canary there is one record less.
        outside = outside[0][1:], outside[1][1:]
    length = float(lengths[best]) / run.clip
    return Pair((features, labels), outside, moved[best], length, batch)


def federation_of(tables: list[tuple[Tensor, Tensor]], kind: Kind, classes: int) -> Federation:
    """Users with these tables; no test data to speak of."""
    features, labels = [x for x, _ in tables], [y for _, y in tables]
    train = Records.from_users(features, labels, kind)
    test = Records.from_users([torch.zeros(1, features[0].shape[1])] * len(tables),
                              [torch.zeros(1)] * len(tables), kind)  # fmt: skip
    made = {"class": Target.numbered, "labels": Target.labelled}
    target = made[kind](classes) if kind in made else Target("number")
    return Federation(train, test, target, title="audit")


def _labels(kind: Kind, clip: float) -> tuple[float, float]:
    """Two labels whose gradients point away from one another."""
    if kind == "labels":  # none of the smallest task's two labels, and both
        return (0.0, 3.0)
    return (0.0, 1.0) if kind == "class" else (-1e3 * clip, 1e3 * clip)


def _column(label: float, records: int, kind: Kind) -> Tensor:
    return torch.full((records,), label, dtype=torch.float32 if kind == "number" else torch.int64)


def clipped_at(x: Tensor, task: Task, rows: Tensor, labels: Tensor, clip: float) -> Tensor:
    """The clipped gradient at x (P,) of each row alone, (N, P), by the task's own clipping."""
    features = task.prepare(rows)
    batch = Batch(features[:, None], labels[:, None], squares=row_squares(features)[:, None])
    with torch.no_grad():
        return task.clipped_sum(x.repeat(len(rows), 1), batch, torch.full((len(rows),), clip)).total
