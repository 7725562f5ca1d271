"""How far one record, or one user, can move a step: never further than the noise is scaled to.

The noise of a step has standard deviation σ_g times a *stated* sensitivity. These tests measure the
real one over neighbouring datasets of hypothesis' choosing, through the very query that is
released.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import ENGINES, TASKS, Scripted, setting
from torch import Tensor

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.engine.oracle import OneByOne
from dpscaffold.engine.query import Numbers, query_of_step
from dpscaffold.federation import Federation
from dpscaffold.tasks import Batch

DIMENSION, CLASSES = 3, 3
SLACK = 1 + 1e-3  # float32

clips = st.floats(0.01, 20.0)
stretches = st.sampled_from([0.0, 0.1, 1.0, 10.0, 1000.0])
seeds = st.integers(0, 10**6)


def table(seed: int, records: int, stretch: float) -> tuple[Tensor, Tensor]:
    """Some records; the first ones are stretched to be far out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, DIMENSION, generator=generator)
    x[: max(1, records // 2)] *= stretch
    return x, torch.randint(0, CLASSES, (records,), generator=generator)


def query(
    engine: str,
    task: str,
    privacy: Gaussian,
    params: Tensor,
    x: Tensor,
    y: Tensor,
    divisor: int,
    noise: float,
):
    """H̃ of one batch on either engine's path, every standard normal being ``noise``."""
    made = TASKS[task](DIMENSION, CLASSES)
    column = torch.ones(1, 1)
    spread = column * float(privacy.scale(privacy.clip, divisor))
    clip, sigma = column * privacy.clip, column * privacy.noise
    numbers = Numbers(column, column, column * divisor, column, clip, sigma, spread, 1)
    weight = None
    if engine == "simulator":
        weight = torch.ones(1, len(y))
        if len(y) == 0:  # an empty Poisson batch is padded with weight 0
            x, y, weight = torch.ones(1, DIMENSION), torch.zeros(1).long(), torch.zeros(1, 1)
    batch = Batch(made.prepare(x)[None], y[None], weight)
    draws = torch.full((1, made.parameters), noise)
    summing = OneByOne(made) if engine == "loop" else made
    return query_of_step(privacy.step)(summing, params[None], batch, numbers, draws)[0]


def check(engine, task, privacy, params, one, two, divisor, stated):
    """‖H(D) − H(D')‖ ≤ the sensitivity that the added noise is scaled to, which is ``stated``."""
    a, b = (query(engine, task, privacy, params, *batch, divisor, 0.0) for batch in (one, two))
    added = query(engine, task, privacy, params, *one, divisor, 1.0) - a
    scaled_to = float(added.double().mean()) / privacy.noise
    assert scaled_to == pytest.approx(stated, rel=1e-2)
    return float((a.double() - b.double()).norm()), scaled_to


def parameters(task: str, seed: int) -> Tensor:
    made = TASKS[task](DIMENSION, CLASSES)
    return torch.randn(made.parameters, generator=torch.Generator().manual_seed(seed + 1))


each_path = pytest.mark.parametrize("engine", ["loop", "simulator"])
each_task = pytest.mark.parametrize("task", TASKS)


@each_path
@each_task
@given(clip=clips, batch=st.integers(1, 9), stretch=stretches, seed=seeds, where=st.integers(0, 8))
def test_replacing_one_record_moves_a_fixed_batch_by_at_most_2c_over_b(
    engine, task, clip, batch, stretch, seed, where
):
    """Replace-one neighbours: the mean of b clipped gradients moves by at most 2C/b."""
    x, y = table(seed, batch, stretch)
    other, label = table(seed + 7, 1, -stretch)
    x2, y2 = x.clone(), y.clone()
    x2[where % batch], y2[where % batch] = other[0], label[0]
    privacy, params = Gaussian(clip, 50.0), parameters(task, seed)
    moved, stated = check(engine, task, privacy, params, (x, y), (x2, y2), batch, 2 * clip / batch)
    assert moved <= SLACK * stated + 1e-6


@each_path
@each_task
@given(
    clip=clips, drawn=st.integers(0, 6), divisor=st.integers(1, 6), stretch=stretches, seed=seeds
)
def test_adding_one_record_moves_a_poisson_batch_by_at_most_c_over_b(
    engine, task, clip, drawn, divisor, stretch, seed
):
    """Add/remove neighbours: the sum moves by at most C, half of what the noise is scaled to.

    Empty batches too.
    """
    x, y = table(seed, drawn + 1, stretch)
    privacy, params = Gaussian(clip, 50.0, "poisson"), parameters(task, seed)
    moved, stated = check(
        engine, task, privacy, params, (x, y), (x[1:], y[1:]), divisor, 2 * clip / divisor
    )
    assert moved <= SLACK * stated / 2 + 1e-6


@each_path
@each_task
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@given(
    clip=clips,
    counts=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    stretch=stretches,
    seed=seeds,
)
def test_replacing_a_whole_user_moves_a_step_by_at_most_2c(
    engine, task, sampling, clip, counts, stretch, seed
):
    """unit = "user": other records, other batch: at most 2C. A Poisson batch may far exceed its
    divisor."""
    divisor = 2 if sampling == "poisson" else 4
    sizes = counts if sampling == "poisson" else (divisor, divisor)
    one, two = table(seed, sizes[0], stretch), table(seed + 3, sizes[1], -stretch)
    privacy, params = Gaussian(clip, 50.0, sampling, "user"), parameters(task, seed)
    moved, stated = check(engine, task, privacy, params, one, two, divisor, 2 * clip)
    assert moved <= SLACK * stated + 1e-6


@each_path
def test_the_bounds_are_reached(engine):
    """Opposite records reach 2C/b and 2C (user, Poisson): the noise is scaled to no more than is
    needed."""
    x = torch.tensor([[100.0, 0.0, 0.0]]).expand(6, -1).clone()
    y = torch.zeros(6, dtype=torch.int64)
    params = torch.zeros(12)
    flipped = x.clone()
    flipped[0] *= -1
    moved, stated = check(
        engine, "logistic", Gaussian(1.0, 50.0), params, (x, y), (flipped, y), 6, 2 / 6
    )
    assert moved == pytest.approx(stated, rel=0.02)
    for sampling in ("fixed", "poisson"):
        privacy = Gaussian(1.0, 50.0, sampling, "user")
        divisor = 6 if sampling == "fixed" else 2
        moved, stated = check(engine, "logistic", privacy, params, (x, y), (-x, y), divisor, 2.0)
        assert moved == pytest.approx(stated, rel=0.02)


@each_path
@pytest.mark.parametrize("task", ["logistic", "mlp"])
@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    share=st.sampled_from([0.5, 0.75, 1.0]),
    clip=clips,
    stretch=stretches,
    seed=seeds,
    sampling=st.sampled_from(["fixed", "poisson"]),
)
def test_a_whole_round_moves_by_no_more_than_stated(
    engine, task, sizes, share, clip, stretch, seed, sampling
):
    """One record of one user replaced (fixed) or blanked out of a round of unequal users, one step
    each.

    x moves by at most η_l·(2C/b_i)/m. For Poisson batches a replaced record is one removed and one
    added.
    """
    users = [table(seed + 11 * i, n, stretch) for i, n in enumerate(sizes)]
    user = seed % len(sizes)
    replaced = [(x.clone(), y.clone()) for x, y in users]
    other, label = table(seed + 999, 1, -stretch)
    replaced[user][0][0], replaced[user][1][0] = other[0], label[0]
    reached = []
    for tables in (users, replaced):
        data = Federation.from_arrays(tables, tables, classes=CLASSES)
        privacy = Gaussian(clip, 1.0, sampling)
        run = setting(
            "scaffold", task, privacy, data, local_steps=1, data_ratio=share, user_ratio=1.0
        )
        still = Scripted(seed, lambda *key: 0.0)
        made = ENGINES[engine](run, still)
        made.round_of(range(len(sizes)))
        reached.append(made.reached)
    eta, batch = run.plan.step_size, int(run.batch_sizes[user])
    moved = float((reached[0].params - reached[1].params).norm())
    assert moved <= SLACK * eta * 2 * clip / batch / len(sizes) + 1e-5
    controls = (reached[0].memory - reached[1].memory).norm(dim=1)
    assert float(controls[user]) <= SLACK * 2 * clip / batch + 1e-4
    assert float(controls.sum() - controls[user]) <= 1e-6
