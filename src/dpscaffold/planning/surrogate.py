"""Artificial federations with the public facts of a private one, small enough to try things on.

The best step size under noise is decided mostly by what everybody knows: users, records, features,
classes, the task, ε, K and T. A surrogate has these facts and invents the rest. Classes have equal
probability and means μ_c ~ h·N(0, diag(d_j²)), records are μ_c + N(0, diag(d_j²)) with d_j² ∝ 1/j
and Σd_j² = 1, centred, and every row scaled to the norm that preparation guarantees. h says how far
apart classes lie: 0.5 is hard, 1 is easy, and a choice is made on both. A number is y = xᵀw + noise
of deviation 1/(2h), standardised, w being the user's own as far as users differ.

Where it is not known how users differ, they may also have models of their own: on further
surrogates each user's records lie close together, and their labels are the largest of W_i·x, W_i
the user's. Drift is strong there, and what is learnt is who says what.

It may be smaller than what it represents: fewer users (the same share of them takes part), records,
records in a batch, and local steps, with noise of such a spread that the mean of a round's moves
has the noise that it would have in the real run. The distance that K steps cover, Kη_l = η₀/s,
stays. What of rounds, features and classes is beyond the most that is tried, and how that is made
up for, :mod:`dpscaffold.planning.shape` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpscaffold.config import Run
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.data.partition import similarity
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation, schema
from dpscaffold.planning.shape import Fidelity, Shape
from dpscaffold.tasks import Task

#: How far apart the classes of the surrogates lie.
SEPARATIONS = (0.5, 1.0)

#: Features in which classes lie apart, those of the largest spread. In all of many features even
#: close classes would be told apart without error, and every step size would look good.
TELLING = 40

#: Test records of a surrogate.
TESTED = 4000

#: Numbers that the rows of a surrogate may hold: 2 GB while they are made.
HELD = 1 << 28

#: How much further apart users lie there than the records of one.
APART = 10.0

#: In what the users of a surrogate differ.
Differing = Literal["classes", "models"]


@dataclass(frozen=True)
class SurrogateAssumptions:
    """What is supposed of the records: γ, the share in per cent of a user's records that are like
    everybody's, and the norm of a row (None: features are standardised and no norm is promised).
    ``own_models`` says that users may differ in their models too, not in their classes alone."""

    similarity: float = 0.0
    row_norm: float | None = 1.0
    own_models: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.similarity <= 100:
            raise BadInput(
                "out-of-range",
                f"facts.similarity is {self.similarity}; give a percentage, 0 (sorted by label) to "
                f"100 (all users alike), or 'unknown'",
            )
        if self.row_norm is not None and not (0 < self.row_norm < math.inf):
            raise BadInput(
                "out-of-range", f"facts.row_norm is {self.row_norm}; give a positive number"
            )


@dataclass(frozen=True)
class Kind:
    """One surrogate: in what its users differ, how far apart classes lie (h), and its seed."""

    differ: Differing
    separation: float
    seed: int


def kinds(guess: SurrogateAssumptions, classes: int, seeds: Sequence[int]) -> list[Kind]:
    """The surrogates that a choice is made on: hard and easy ones, and where nothing is known of
    how users differ, such whose users have models of their own.

    >>> len(kinds(SurrogateAssumptions(0.0), 10, (0, 1)))
    4
    >>> len(kinds(SurrogateAssumptions(0.0, own_models=True), 10, (0, 1)))
    6
    """
    found = [Kind("classes", h, seed) for h in SEPARATIONS for seed in seeds]
    if guess.own_models and classes:
        found += [Kind("models", 1.0, seed) for seed in seeds]
    return found


def surrogate(
    setting: Run,
    guess: SurrogateAssumptions,
    separation: float,
    seed: int = 0,
    differ: Differing = "classes",
) -> Federation:
    """An artificial federation with the facts of the setting's roster.

    >>> from dpscaffold import Logistic, Plan, scaffold, synthetic
    >>> roster = synthetic(users=40, records=50).roster
    >>> public = Run(roster, Logistic(40, 10), scaffold(), Plan())
    >>> surrogate(public, SurrogateAssumptions(), 0.5)
    Federation(surrogate: 40 users, 40 train records each, 40 features, 10 classes)
    """
    return invented(
        Shape.of(setting), setting.roster.schema.target.kind, guess, separation, seed, differ
    )


def invented(
    shape: Shape,
    target: schema.Kind,
    guess: SurrogateAssumptions,
    separation: float,
    seed: int = 0,
    differ: Differing = "classes",
) -> Federation:
    """An artificial federation of this shape."""
    stream = np.random.default_rng([seed, round(1000 * separation)])
    tested = -(-TESTED // shape.users)
    each = shape.records + tested
    if shape.users * each * shape.features > HELD:
        raise BadInput(
            "too-many-weights",
            f"a row has {shape.features} features, which cannot be made fewer on a surrogate of a "
            f"module; at most {HELD // (shape.users * each)} can be planned on, so choose "
            f"plan.learning_rate yourself",
        )
    classes = shape.classes
    spread = 1 / np.sqrt(np.arange(1, shape.features + 1))
    spread /= np.sqrt((spread**2).sum())
    if classes and differ == "models":
        parts = _models(stream, shape.users, each, classes, shape.features)
    elif classes:
        parts = _classes(stream, shape.users, each, classes, spread, separation, guess)
    else:
        parts = _numbers(stream, shape.users, each, spread, separation, guess)
    mean = np.concatenate([x for x, _ in parts]).mean(0)
    rows = [(_scaled(x - mean, spread, guess.row_norm), y) for x, y in parts]
    return Federation.from_arrays(
        [(x[tested:], y[tested:]) for x, y in rows],
        [(x[:tested], y[:tested]) for x, y in rows],
        classes=classes or None,
        title="surrogate",
        target=target,
    )


Parts = list[tuple[np.ndarray, np.ndarray]]


def _classes(
    stream: np.random.Generator,
    users: int,
    each: int,
    classes: int,
    spread: np.ndarray,
    separation: float,
    guess: SurrogateAssumptions,
) -> Parts:
    centres = separation * spread * stream.standard_normal((classes, len(spread)))
    centres[:, TELLING:] = 0
    labels = stream.integers(0, classes, users * each)
    rows = centres[labels] + spread * stream.standard_normal((users * each, len(spread)))
    shares = similarity(labels, [each] * users, guess.similarity)
    # Each user's records in random order: the first are its test records, like the others.
    mixed = [stream.permutation(share) for share in shares]
    return [(rows[share], labels[share]) for share in mixed]


def _models(
    stream: np.random.Generator, users: int, each: int, classes: int, dimension: int
) -> Parts:
    parts = []
    for _ in range(users):
        own = stream.standard_normal((classes, dimension))
        rows = APART * stream.standard_normal(dimension) + stream.standard_normal((each, dimension))
        parts.append((rows, (rows @ own.T).argmax(1)))
    return parts


def _numbers(
    stream: np.random.Generator,
    users: int,
    each: int,
    spread: np.ndarray,
    separation: float,
    guess: SurrogateAssumptions,
) -> Parts:
    alike = guess.similarity / 100
    common = stream.standard_normal(len(spread))
    parts = []
    for _ in range(users):
        own = math.sqrt(alike) * common + math.sqrt(1 - alike) * stream.standard_normal(len(spread))
        mean = math.sqrt(1 - alike) * spread * stream.standard_normal(len(spread))
        rows = mean + spread * stream.standard_normal((each, len(spread)))
        weights = 0.5 * (common + own)
        noise = stream.standard_normal(each) / (2 * separation)
        parts.append((rows, rows @ weights + noise))
    every = np.concatenate([y for _, y in parts])
    return [(x, ((y - every.mean()) / every.std()).astype(np.float32)) for x, y in parts]


def _scaled(rows: np.ndarray, spread: np.ndarray, norm: float | None) -> np.ndarray:
    if norm is None:
        return np.asarray(rows / spread, dtype=np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(norm * rows / np.maximum(lengths, 1e-12), dtype=np.float32)


@dataclass(frozen=True)
class SurrogateSetting:
    """A setting as its surrogates run it: their shape, the task with their columns, and noise that
    does to a run of theirs what the setting's does to the real one."""

    setting: Run
    shape: Shape
    task: Task
    privacy: Gaussian | None

    @classmethod
    def of(cls, setting: Run, fidelity: Fidelity | None = None) -> SurrogateSetting:
        """Worked out once for all step sizes and surrogates."""
        shape = Shape.of(setting, fidelity)
        privacy = None if setting.privacy is None else _noised(setting, shape, setting.privacy)
        return cls(setting, shape, shape.task(setting), privacy)

    def on(self, stand_in: Federation, rate: float, seed: int = 0) -> Run:
        """The run on one surrogate that represents the setting's with η₀ = ``rate``: C and the
        distance of all rounds stay, and so does the noise that they gather."""
        setting, shape = self.setting, self.shape
        ratio = shape.batch / shape.records
        plan = setting.plan.changed(
            rounds=shape.rounds,
            local_steps=shape.steps,
            user_ratio=shape.cohort_size / shape.users,
            data_ratio=ratio,
            learning_rate=rate * ratio / setting.plan.data_ratio * shape.pace(setting),
            regularisation=setting.plan.regularisation * shape.crowd(setting),
            warm_rounds=shape.warm_rounds if setting.algorithm.warm_up is not None else None,
            averaging="tail" if setting.plan.averaging == "none" else setting.plan.averaging,
            weighting="uniform",
            seed=seed,
        )
        return Run(stand_in.roster, self.task, setting.algorithm, plan, self.privacy)


def _noised(setting: Run, shape: Shape, privacy: Gaussian) -> Gaussian:
    """v/(mK) of a round's mean in every coordinate, v = (2Cσ_g/b)² on average over users (with a
    user as unit, (2Cσ_g)²), is that of the real run, divided by κ and multiplied by (c/c')². A mean
    with weights hears a user's noise w_i/w̄ times as loud."""
    if isinstance(privacy.clip, str):
        raise BadInput(
            "median-clip",
            "privacy.clip is 'median', and a surrogate needs noise that is known from public "
            "numbers; give a number, or choose plan.learning_rate yourself",
        )
    spreads = setting.spreads()[:, 0].numpy()
    if setting.plan.weighting != "uniform":
        weights = setting.weights.numpy()
        spreads = spreads * weights / weights.mean()
    steps = setting.plan.local_steps * setting.cohort_size
    variance = float((spreads**2).mean()) * shape.steps * shape.cohort_size / steps
    variance *= shape.crowd(setting) ** 2 / shape.stretch(setting)
    noise = math.sqrt(variance) * shape.batch / (2 * privacy.clip)
    return Gaussian(clip=privacy.clip, noise=noise)
