"""Secret noise: the right law, a new key every time, and no float that names the dataset.

False alarms of the statistical tests have chance 10⁻⁶.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from deploy.world import World
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, chi2, kstest, norm
from small import EQUAL, federation, setting, uploads

from dpscaffold import Federation, Gaussian, Logistic, Plan, fedavg, train
from dpscaffold.deployment.protocol.messages import unpack
from dpscaffold.randomness.csprng import CipherStream, on_grid
from dpscaffold.randomness.streams import NoiseStreams, Randomness

ALARM = 1e-6
DRAWS = 400_000


def test_the_normals_are_normal_and_no_other_scale_would_do():
    drawn = CipherStream().standard_normal(DRAWS)
    assert drawn.dtype == np.float64
    assert kstest(drawn, "norm").pvalue > ALARM
    low, high = chi2.ppf([ALARM / 2, 1 - ALARM / 2], DRAWS) / DRAWS
    assert low < np.mean(drawn**2) < high
    for wrong in (0.98, 1.02):
        assert not low < np.mean((wrong * drawn) ** 2) < high
    # Both halves of Box and Muller's pairs, and their product, which would show a shared radius.
    first, second = drawn.reshape(2, -1)
    assert abs(np.corrcoef(first, second)[0, 1]) < norm.isf(ALARM) / np.sqrt(DRAWS / 2)
    assert abs(np.corrcoef(first**2, second**2)[0, 1]) < 2 * norm.isf(ALARM) / np.sqrt(DRAWS / 2)


def test_the_tail_is_as_heavy_as_it_should_be():
    drawn = np.abs(CipherStream().standard_normal(DRAWS))
    for level in (3.0, 4.0):
        low, high = binom.ppf([ALARM / 2, 1 - ALARM / 2], DRAWS, 2 * norm.sf(level))
        assert low <= np.sum(drawn > level) <= high


def test_uniform_numbers():
    drawn = CipherStream().random(np.empty((400, 1000))).ravel()
    assert drawn.min() >= 0 and drawn.max() < 1
    assert kstest(drawn, "uniform").pvalue > ALARM


def test_batches_of_fixed_size_are_uniform_subsets():
    secret, counts, total = Randomness(0, secret=True), Counter(), 20_000
    drawn = secret.batches(1, 0, 6, 3, total, "fixed").index
    counts.update(tuple(sorted(row)) for row in drawn.tolist())
    cells = list(combinations(range(6), 3))
    assert set(counts) == set(cells)
    expected = total / len(cells)
    statistic = sum((counts[cell] - expected) ** 2 / expected for cell in cells)
    assert statistic < chi2.isf(ALARM, len(cells) - 1)


@pytest.mark.parametrize(("records", "batch"), [(50, 3), (50, 20)])
def test_poisson_batches_take_every_record_with_the_same_chance(records, batch):
    steps = 20_000
    drawn = Randomness(0, secret=True).batches(1, 0, records, batch, steps, "poisson")
    taken = np.zeros(records)
    for k in range(steps):
        taken[drawn.of(k)] += 1
    low, high = binom.ppf([ALARM / records, 1 - ALARM / records], steps, batch / records)
    assert np.all((low <= taken) & (taken <= high))


def test_every_participation_has_its_own_key():
    """The same round of the same user, asked for again: nothing in common with the first time."""
    secret = Randomness(0, secret=True)
    one, two, other = (
        NoiseStreams([secret.normals(1, user)], 50_000).draw(1).ravel() for user in (3, 3, 4)
    )
    for left, right in ((one, two), (one, other)):
        assert abs(np.corrcoef(left, right)[0, 1]) < norm.isf(ALARM / 2) / np.sqrt(50_000)
    # Nearly equal questions: noise does not cancel.
    assert one.std() / np.abs(one - two).std() < 1.5
    again = [secret.batches(1, 3, 1000, 500, 1, "fixed").index for _ in range(2)]
    assert not np.array_equal(np.sort(again[0]), np.sort(again[1]))


@given(value=st.floats(-1e6, 1e6), spread=st.floats(1e-6, 1e6), shift=st.floats(-1.0, 1.0))
def test_the_grid_is_public_fine_and_the_same_for_all(value, spread, shift):
    """A rounded value lies on a power of two below 2⁻²⁰ of the spread, and nowhere far away."""
    width = torch.tensor([[spread]], dtype=torch.float64)
    values = torch.tensor([[value, value + shift * spread]], dtype=torch.float64)
    rounded = on_grid(values, width)
    step = 2.0 ** (np.floor(np.log2(spread)) - 20)
    assert torch.equal(rounded, torch.round(rounded / step) * step)
    assert float((rounded - values).abs().max()) <= step / 2 + 1e-15 * abs(value)


def test_no_noise_is_left_as_it_is():
    values = torch.tensor([[0.1, 0.2]], dtype=torch.float64)
    assert torch.equal(on_grid(values, torch.zeros(1, 1)), values)


# --- the grid, on every path -------------------------------------------------------------------

SECRET = Gaussian(clip=0.7, noise=3.0, secret=True)
#: One step from x = 0 without an ℓ2 term: a balanced control is then the noised query itself.
ONE_STEP = {"local_steps": 1, "data_ratio": 0.5, "regularisation": 0.0, "user_ratio": 1.0}


def assert_on_grid(query: np.ndarray, batch: int) -> None:
    """Every number is a multiple of a power of two that only C, σ_g and b decide."""
    spread = 2 * SECRET.clip * SECRET.noise / batch
    step = 2.0 ** (np.floor(np.log2(spread)) - 20)
    values = query.astype(np.float64) / step
    assert np.array_equal(values, np.round(values))
    assert np.unique(query).size == query.size  # it is noise, not a constant


@pytest.mark.parametrize("task", ["logistic", "mlp", "module"])
@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_every_engine_rounds_to_the_grid(engine, task):
    """Logistic models take the script's steps, the others those of ``local.steps``."""
    run = setting("scaffold-balanced", task, SECRET, federation(EQUAL), rounds=1, **ONE_STEP)
    for query in uploads(engine, run)[0]["memory control"]:
        assert_on_grid(query.numpy(), int(run.batch_sizes[0]))


@pytest.mark.parametrize("task", ["logistic", "mlp"])
def test_a_site_rounds_to_the_grid(tmp_path, task):
    """The very vector that leaves a site."""
    data = federation((9, 9, 9))
    world = World(tmp_path, "scaffold-balanced", task, SECRET, data, rounds=1, **ONE_STEP)
    world.enrol()
    world.round()
    sent = dict(world.exchange.answered)
    for raw in sent.values():
        assert_on_grid(unpack(raw).vectors["kept.control"], 4)


# --- the float attack -------------------------------------------------------------------------

CLIP, NOISE, RECORDS, FEATURES = 1.0, 4.0, 16, 30


def one_user(label: int) -> Federation:
    """A user whose first record has one label or another; all else is equal."""
    stream = np.random.default_rng(5)
    features = torch.tensor(stream.normal(size=(RECORDS, FEATURES)), dtype=torch.float32)
    features[1:, : FEATURES // 2] = 0.0  # the first record is alone in half of the features
    labels = torch.tensor(stream.integers(0, 3, RECORDS))
    labels[0] = label
    return Federation.from_arrays([(features, labels)], [(features, labels)], classes=3)


def first_query(federation: Federation, noise: float, secret: bool, seed: int) -> np.ndarray:
    """H̃ of one step at x = 0, as anyone reads it off the first model: x¹ = −H̃."""
    plan = Plan(
        rounds=1,
        local_steps=1,
        user_ratio=1.0,
        data_ratio=1.0,
        learning_rate=1.0,
        regularisation=0.0,
        seed=seed,
    )
    privacy = Gaussian(clip=CLIP, noise=noise, secret=secret)
    result = train(federation, Logistic(FEATURES, 3), fedavg(), plan, privacy)
    return -result.params.numpy()


def reachable(released: np.ndarray, query: np.ndarray) -> float:
    """The share of coordinates that this query plus a single-precision normal can give."""
    scale = np.float32(2 * CLIP * NOISE / RECORDS)
    nearest = ((released.astype(np.float64) - query) / np.float64(scale)).astype(np.float32)
    found = np.zeros(released.shape, dtype=bool)
    for step in range(-2, 3):
        normal = nearest
        for _ in range(abs(step)):
            normal = np.nextafter(normal, np.float32(np.inf if step > 0 else -np.inf))
        exact = query.astype(np.float64) + np.float64(scale) * normal.astype(np.float64)
        found |= exact.astype(np.float32) == released
    return float(found.mean())


def rightly_named(secret: bool, trials: int = 60) -> int:
    """How often the reachable values of one upload name the dataset it came from."""
    worlds = [one_user(0), one_user(1)]
    queries = [first_query(world, 0.0, False, 0) for world in worlds]
    truth = np.random.default_rng(11).integers(0, 2, trials)
    right = 0
    for trial, world in enumerate(truth):
        released = first_query(worlds[world], NOISE, secret, trial)
        score = [reachable(released, query) for query in queries]
        right += int(np.argmax(score) == world and score[0] != score[1])
    return right


def test_single_precision_names_the_dataset_and_secret_noise_does_not():
    """The attack works on seeded noise, which is why it can fail here; on secret noise it is a
    coin: at most what 60 fair coins reach with chance 10⁻⁶."""
    assert rightly_named(secret=False) >= 55
    assert rightly_named(secret=True) <= binom.isf(ALARM, 60, 0.5)
