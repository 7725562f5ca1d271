"""Bounded sums: how far one record moves them, which bounds cover them, and what ε they have."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from scipy.optimize import minimize

from dpscaffold.errors import BadInput
from dpscaffold.privacy import (
    SERVER,
    THIRD_PARTY,
    capped,
    describe,
    epsilon,
    gaussian_epsilon,
    no_guarantee,
)
from dpscaffold.privacy.sums import MOST_RECORDS, ROUNDING_ROOM, joint, joint_scales
from dpscaffold.tasks.base import Batch
from dpscaffold.tasks.exact import check_records, unit_rows
from dpscaffold.tasks.moments import MomentSums
from dpscaffold.tasks.ridge import RidgeSums

SHARES = (0.05, 0.3, 0.7)


def squared_distance(a, b, first, second):
    """‖√a(xxᵀ − x′x′ᵀ)‖² + ‖√b(xyᵀ − x′y′ᵀ)‖², from the matrices themselves."""
    (x, y), (u, v) = first, second
    grams, products = np.outer(x, x) - np.outer(u, u), np.outer(x, y) - np.outer(u, v)
    return a * np.sum(grams**2) + b * np.sum(products**2)


def in_ball(vector):
    return vector / max(1.0, np.linalg.norm(vector))


@pytest.mark.parametrize("share", SHARES)
def test_no_pair_moves_both_sums_further_and_one_moves_them_as_far(share):
    """A search over pairs of records finds the stated maximum, and nothing above it."""
    a, b = share / 2, (1 - share) / 4
    rng = np.random.default_rng(3)

    def lost(flat):
        x, u, y, v = (in_ball(part) for part in flat.reshape(4, 3))
        return -squared_distance(a, b, (x, y), (u, v))

    found = [-minimize(lost, rng.normal(size=12), method="Nelder-Mead").fun for _ in range(12)]
    assert max(found) <= joint(a, b) ** 2 + 1e-9
    assert max(found) >= joint(a, b) ** 2 * (1 - 1e-3)


def test_accounting_both_sums_together_saves_an_eighth_of_the_noise():
    """At share 0.3 the noise is 13 % below that of two separate sums."""
    assert joint(0.15, 0.175) == pytest.approx(0.867, abs=5e-4)


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
@pytest.mark.parametrize("classes", [0, 3])
@given(data=st.data())
def test_a_record_moves_the_sums_of_ridge_by_at_most_its_bound(relation, classes, data):
    """Any floats at all, NaN and infinity included: 2C apart, or of norm C for zero-out."""
    task = RidgeSums(2, classes, relation=relation, bound=0.7)
    floats = st.floats(width=32, allow_nan=True, allow_infinity=True)
    rows = torch.tensor(data.draw(st.lists(floats, min_size=4, max_size=4))).view(2, 2)
    labels = torch.tensor(data.draw(st.lists(floats, min_size=2, max_size=2)))
    if classes:
        labels = torch.tensor([0, data.draw(st.integers(0, classes - 1))])
    first, second = task.contributions(rows, labels, clipped=True)
    if relation == "replace-one":
        assert float((first - second).norm()) <= 2 * 0.7 * (1 + 1e-12)
    else:
        assert float(first.norm()) <= 0.7 * (1 + 1e-12)


def test_noise_on_the_packed_sums_is_symmetric_noise_on_the_matrix():
    """Packing keeps the Frobenius norm, so equal noise on every entry is (Z + Zᵀ)/2 on G."""
    task = RidgeSums(4, 2)
    params = torch.randn(task.parameters, dtype=torch.float64)
    gram, products = task.matrices(params)
    size = len(params) - products.numel()
    assert torch.equal(gram, gram.T)
    scaled = ROUNDING_ROOM * task.scales.gram * gram
    assert float(scaled.norm()) == pytest.approx(float(params[:size].norm()))
    assert float((ROUNDING_ROOM * task.scales.products * products).norm()) == pytest.approx(
        float(params[size:].norm())
    )


def run(sampling="fixed", **changes):
    """One sum over all records of four users."""
    made = describe(
        rounds=1, local_steps=1, users=4, cohort_size=4, records=50, batch_sizes=50, noise=2.0,
        memory=False, one_sum=True, sampling=sampling, delta=1e-5, query="sums",
    )  # fmt: skip
    return replace(made, **changes)


@pytest.mark.parametrize(("sampling", "multiplier"), [("fixed", 2.0), ("poisson", 4.0)])
def test_one_sum_is_one_gaussian_release(sampling, multiplier):
    """The closed form of the Gaussian mechanism, with √m times the noise for a third party."""
    one = run(sampling)
    exact, hidden = (gaussian_epsilon(multiplier * root, 1e-5) for root in (1, 2))
    for found, truth in (
        (epsilon(one, SERVER), exact),
        (capped(one, SERVER), exact),
        (epsilon(one, THIRD_PARTY), hidden),
    ):
        assert truth * (1 - 1e-9) <= found <= truth * 1.005


def test_sums_hide_single_records_alone():
    assert "single records" in (no_guarantee(run(unit="user")) or "")
    assert no_guarantee(run()) is None
    with pytest.raises(BadInput, match="medians"):
        run(query="medians")


@pytest.mark.parametrize("relation", ["replace-one", "zero-out", "add-remove"])
@pytest.mark.parametrize("share", SHARES)
def test_scales_use_the_whole_bound(share, relation):
    scales = joint_scales(share, relation)
    whole = 2.0 if relation == "replace-one" else 1.0
    assert joint(scales.gram**2, scales.products**2, relation) == pytest.approx(whole)


@given(st.lists(st.floats(width=32), min_size=6, max_size=6), st.sampled_from([1e-3, 1.0, 7.0]))
def test_rounded_rows_are_whole_and_never_longer_than_1(values, bound):
    """In whole numbers, without any rounding of the test's own."""
    rows = unit_rows(torch.tensor(values).view(2, 3), bound, columns=1)
    for row in rows.tolist():
        assert all(number == int(number) for number in row)
        assert sum(int(number) ** 2 for number in row[:3]) <= 2**40
        assert row[3] in (0.0, 2.0**20)


@pytest.mark.parametrize("kind", ["ridge", "mean", "moments", "gram"])
def test_one_record_more_changes_a_large_sum_by_what_it_adds(kind):
    """30,000 records at their longest: a float64 sum would depend on the order of the records, and
    its neighbour would be further away than Δ. Exact sums do not, in a single bit."""
    made = torch.Generator().manual_seed(3)
    rows = torch.randn(1, 30_000, 3, generator=made)
    labels = torch.randint(2, (1, 30_000), generator=made)
    task = RidgeSums(3, 2) if kind == "ridge" else MomentSums(3, kind, 0.5)
    params, clip = torch.zeros(1, task.parameters), torch.ones(1)

    def total(order):
        return task.clipped_sum(params, Batch(rows[:, order], labels[:, order]), clip).total[0]

    everyone = torch.arange(30_000)
    first = total(everyone)
    assert torch.equal(first, total(everyone.flip(0)))
    without, alone = total(everyone[:-1]), total(everyone[-1:])
    room = 16 * 2.0**-53 * 30_000
    assert float((first - without - alone).norm()) <= 2 * room
    assert float(alone.norm()) <= 1 * (2 if kind != "mean" else 1)
    assert room < 1 - ROUNDING_ROOM  # what the scales leave for it


def test_the_room_covers_the_most_records():
    """The inequality of the proof, by its numbers."""
    assert 2 * (512 + 16) * 2.0**-53 * MOST_RECORDS < 1 - ROUNDING_ROOM
    check_records(MOST_RECORDS)
    with refuses("too-many-records"):
        check_records(MOST_RECORDS + 1)
