"""The plan: its derived numbers, and what it refuses."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

from dpscaffold.checks import floor_share
from dpscaffold.config.plan import Plan


@given(st.integers(1, 999), st.integers(1, 10**5))
def test_a_share_is_the_floor_of_the_decimal_that_was_written(thousandths, whole):
    """⌊ratio·whole⌋ in exact arithmetic, for every ratio of three decimals: 0.29 of 100 is 29."""
    exact = math.floor(Fraction(thousandths, 1000) * whole)
    assert floor_share(thousandths / 1000, whole) == exact
    if exact:
        plan = Plan(user_ratio=thousandths / 1000, data_ratio=thousandths / 1000)
        assert plan.cohort_size(whole) == exact
        assert plan.batch_sizes(torch.tensor([whole])).tolist() == [exact]


def test_products_that_round_down_are_forgiven():
    """Every ratio of two decimals of 100 users or records is exact, though 0.29·100 is 28.999… in
    floats."""
    assert any(int(hundredths / 100 * 100) != hundredths for hundredths in range(1, 101))
    for hundredths in range(1, 101):
        plan = Plan(user_ratio=hundredths / 100, data_ratio=hundredths / 100)
        assert plan.cohort_size(100) == hundredths
        assert plan.batch_sizes(torch.tensor([100, 1000])).tolist() == [hundredths, 10 * hundredths]


def test_the_step_size_is_the_rate_over_s_and_k():
    """η_l = η₀/(sK)."""
    assert Plan(learning_rate=0.5, data_ratio=0.2, local_steps=50).step_size == pytest.approx(0.05)


def test_batches_follow_each_users_size():
    """b_i = ⌊sR_i⌋."""
    assert Plan(data_ratio=0.3).batch_sizes(torch.tensor([10, 11, 4, 100])).tolist() == [
        3,
        3,
        1,
        30,
    ]


@pytest.mark.parametrize(("averaging", "tail"), [(0.1, 0.1), ("tail", 0.5), (1.0, 1.0)])
@pytest.mark.parametrize("warm", [0, 3])
def test_the_tail_is_the_last_fraction_of_the_real_rounds(averaging, tail, warm):
    """⌈tail·(T − warm)⌉ rounds, at least one, never a warm one."""
    plan = Plan(rounds=13, averaging=averaging)
    taken = [t for t in range(1, 14) if t >= plan.averaged_from(warm)]
    assert taken == list(range(14 - math.ceil(tail * (13 - warm)), 14))
    uniform = Plan(rounds=13, averaging="uniform")
    assert uniform.averaged_from(warm) == warm + 1
    assert Plan(rounds=13).averaged_from(warm) == math.inf


def test_a_plan_is_written_as_its_fields():
    """to_dict gives back the same plan."""
    plan = Plan(rounds=7, weighting="records", averaging=0.3)
    assert Plan(**plan.model_dump()) == plan


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            (n, v)
            for n in ("user_ratio", "data_ratio", "averaging")
            for v in (0, -0.1, 1.0001, NAN, INF, "x")
        ],
        *[
            (n, v)
            for n in ("learning_rate", "server_rate")
            for v in (0, -1.0, NAN, INF, True)
        ],
        ("server_rate", None),
        *[("regularisation", value) for value in (-1e-9, NAN, INF)],
        *[(n, v) for n in ("rounds", "local_steps") for v in (0, -3, 2.0, NAN, True)],
        *[(n, v) for n in ("evaluate_every", "checkpoint_every") for v in (0, -3, 2.0, NAN)],
        *[("seed", value) for value in (-1, 1.5, "7")],
        *[("warm_rounds", value) for value in (-1, 0.5)],
        ("weighting", "sizes"),
        ("averaging", "mean"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(name, value):
    """One sentence that names the argument and the value."""
    codes = "not-a-number|not-a-whole-number|out-of-range|unknown-choice"
    with refuses(f"{codes}: plan.{name} is ") as refused:
        Plan(**{name: value})
    message = str(refused.value)
    assert repr(value) in message or str(float(value)) in message
    assert "\n" not in message


def test_a_ratio_that_selects_no_one_is_refused_with_one_that_would():
    """⌊lM⌋ = 0 names the ratio, the users and the least ratio, which then works."""
    with refuses("no-participants: plan.user_ratio is 0.1 … at least 0.1429"):
        Plan(user_ratio=0.1).cohort_size(7)
    assert Plan(user_ratio=0.1429).cohort_size(7) == 1


def test_a_ratio_that_leaves_a_user_an_empty_batch_is_refused():
    """⌊sR_i⌋ = 0 names the user, its records and the least ratio."""
    with refuses("empty-batch: plan.data_ratio is 0.2 … user 1 … at least 0.25"):
        Plan(data_ratio=0.2).batch_sizes(torch.tensor([100, 4, 3]))
