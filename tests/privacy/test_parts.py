"""Several parts over the same records: sums, convolutions, and what is not promised."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as drawn_from
from hypothesis import settings
from hypothesis import strategies as st
from privacy.explicit_pairs import gaussian_epsilon
from privacy.settings import SMALL, run_of
from refusals import refuses

from dpscaffold.privacy import (
    SERVER,
    Cost,
    Facts,
    Ledger,
    Part,
    SecureSums,
    adversaries,
    epsilon,
    losses,
    state,
)
from dpscaffold.privacy.parts import (
    allowed_in_parts,
    convolved,
    given_the_draw,
    over_the_draw,
    shared_draw,
    shared_noise,
    within_cap,
)
from dpscaffold.privacy.seeds import FROM_SYSTEM, SeedKnowledge


def part(name: str, took_part: list[list[int]] | None = None, **changes) -> Part:
    """A run with secret noise and a draw that nobody chose."""
    run = run_of(SMALL, **changes)
    ledger = None
    if took_part is not None:
        ledger = Ledger(run)
        for round, users in enumerate(took_part, 1):
            ledger.record(round, users)
    rounds = run.rounds if ledger is None else ledger.rounds
    return Part(run, rounds, ledger, name=name, secret=True, drawn=FROM_SYSTEM)


def total(parts: list[Part], name: str = "server", fixed: bool = False, colluders: int = 1):
    return over_the_draw(parts, name, colluders, fixed).epsilon


def given(parts: list[Part], name: str = "server", fixed: bool = False) -> float:
    return given_the_draw(parts, name, fixed_in_advance=fixed).epsilon


def test_two_gaussians_convolve_to_one():
    """Users as the unit, all of them in every round: μ² adds, ε does not."""
    noises = (6.0, 9.0)
    parts = [part(f"run {z}", unit="user", cohort_size=10, noise=z) for z in noises]
    exact = gaussian_epsilon(2e-5, math.sqrt(sum(60 / z**2 for z in noises)))
    assert exact * (1 - 1e-9) <= total(parts, fixed=True) <= exact * 1.01
    alone = sum(gaussian_epsilon(1e-5, math.sqrt(60) / z) for z in noises)
    assert alone <= total(parts) <= alone * 1.01
    assert state(parts).delta == 2e-5


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_run_cut_in_two_is_the_run(sampling):
    """T rounds in two runs with draws of their own are T rounds, each direction by itself."""
    for noise in (2.0, 1.0):
        whole = run_of(SMALL, sampling=sampling, rounds=30, delta=2e-5, noise=noise)
        parts = [part("", sampling=sampling, rounds=t, noise=noise) for t in (12, 18)]
        exact = epsilon(whole, SERVER)
        assert exact * (1 - 1e-9) <= total(parts, fixed=True) <= exact * 1.005
    at = np.array([0.0, 0.5, 1.0, 2.0])
    together, one = convolved([p.worst_losses(SERVER) for p in parts]), losses(whole, SERVER)
    for found, law in zip(together, one, strict=True):
        assert np.allclose(found.deltas(at), law.deltas(at), rtol=0.02)
    if sampling == "poisson":  # or the test would not tell the two directions apart
        assert np.any(abs(one[0].deltas(at) / one[1].deltas(at) - 1) > 0.1)


small_parts = st.builds(
    lambda **kw: part("r", **kw),
    rounds=st.integers(1, 40),
    local_steps=st.integers(1, 6),
    cohort_size=st.integers(1, 9),
    noise=st.floats(1.0, 20.0),
    extra=st.integers(0, 2),
)


@drawn_from(st.lists(small_parts, min_size=2, max_size=4))
@settings(max_examples=20, deadline=None)
def test_convolving_is_between_the_largest_and_the_sum(parts):
    added, fixed = total(parts), total(parts, fixed=True)
    delta = sum(p.run.delta for p in parts)
    alone = [epsilon(replace(p.run, delta=delta), SERVER) for p in parts]
    assert max(alone) * (1 - 1e-6) <= fixed <= added * (1 + 1e-3) + 1e-3
    assert added == pytest.approx(sum(p.over_the_draw(SERVER).epsilon for p in parts))


@pytest.mark.parametrize("fixed", [False, True])
def test_costs_and_repeats_count(fixed):
    plain = [part("a", rounds=1), part("b")]
    base = total(plain, fixed=fixed)
    again = part("a", [[0, 1]], rounds=1)
    assert total([again, plain[1]], fixed=fixed) == pytest.approx(base)
    again.ledger.record(1, [0, 1], again=True)
    assert total([again, plain[1]], fixed=fixed) > base * 1.02
    cost = replace(plain[0], costs=(Cost("mean", noise=3.0),))
    assert total([cost, plain[1]], fixed=fixed) > base * 1.02


@pytest.mark.parametrize("fixed", [False, True])
def test_what_is_spent_towards_everybody_is_at_least_that_of_each_part(fixed):
    """Colluders and lists count in all parts, and whom a part does not know sees its uploads."""
    sizes = {"records": [100] * 5 + [330] * 5, "batch_sizes": [19] * 5 + [67] * 5}
    sums = {"memory": False, "local_steps": 1, "cohort_size": 10, **sizes}
    plain, secure = part("a", **sums), part("b", secure=SecureSums(1, 10), **sums)
    for colluders, name in ((1, "server"), (1, "third_party"), (1, "alone"), (4, "participant")):
        runs = [(p.run, adversaries(p.run, colluders).get(name, SERVER)) for p in (plain, secure)]
        found = total([plain, secure], name, fixed, colluders)
        assert found >= max(epsilon(replace(run, delta=2e-5), who) for run, who in runs)
        added = sum(epsilon(run, who) for run, who in runs)
        assert found <= 1.3 * added if fixed else found == pytest.approx(added)
    assert plain.against("alone") == SERVER
    # A law that is worse than every site's is still far below what a site's own noise gives.
    twice = total([secure, secure], fixed=fixed)
    whole = replace(secure.run, rounds=40, delta=2e-5)
    assert epsilon(whole, adversaries(whole)["server"]) * (1 - 1e-6) <= twice
    assert twice < 0.5 * total([secure, secure], "alone", fixed)
    more = replace(secure, run=replace(secure.run, extra=9))
    assert total([more, secure], fixed=fixed) > twice


def test_given_who_took_part_the_same_user_adds_up():
    """Over one dataset users are the same: the largest sum; over unknown ones, the sum of the
    largest."""
    parts = []
    for name, often in (("a", 0), ("b", 5)):
        parts.append(part(name, [[often, 1]] * 8 + [[often]]))
    known = [replace(p, data="same") for p in parts]
    one = parts[0].ledger.of(1)
    assert given(known) == pytest.approx(2 * one)
    assert given([replace(p, source="one run") for p in parts]) == pytest.approx(2 * one)
    assert given(parts) == 2 * parts[0].ledger.of(0) > given(known)
    mean = (Cost("mean", noise=3.0),)
    assert given([replace(p, costs=mean) for p in known]) > 1.05 * given(known)
    named = [
        replace(known[0], people=tuple("abcdefghij")),
        replace(known[1], people=tuple("jbcdefghia")),
    ]
    assert given(named) == pytest.approx(parts[0].ledger.of(1) + parts[1].ledger.of(1))
    ten = Ledger(run_of(SMALL, delta=2e-5))
    for round in range(1, 19):
        ten.record(round, [0])
    assert given(parts, fixed=True) == pytest.approx(ten.largest(), rel=5e-3)


def test_given_who_took_part_colluders_and_repeats_count_where_plans_were_fixed():
    """Everybody takes part in every round, so that the draw hides nothing; and the noise of others
    is not counted where a round was run again."""
    sums = {"memory": False, "local_steps": 1, "cohort_size": 10}
    pair = [part(name, [list(range(10))] * 5, rounds=5, **sums) for name in "ab"]
    for colluders in (1, 4):
        said = state(pair, Facts(fixed_in_advance=True, colluders=colluders))
        for one in said.guarantees:
            assert one.given == pytest.approx(one.epsilon, rel=1e-6)
    for one in pair:
        one.ledger.record(5, range(10), again=True)
    for one in state(pair, Facts(fixed_in_advance=True)).guarantees:
        assert one.theorem == "convolved" and one.given == pytest.approx(one.epsilon, rel=1e-6)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_user_who_is_quiet_in_one_run_may_be_loud_in_the_other(fixed):
    exact = gaussian_epsilon(2e-5, math.sqrt(3 / 2.0**2 + 3 / 6.0**2))
    plan = {"users": 2, "cohort_size": 2, "local_steps": 1, "batch_sizes": 100, "rounds": 3}
    parts = [
        replace(part(name, [[0, 1]] * 3, **plan, louder=louder), data="d")
        for name, louder in (("a", [1.0, 3.0]), ("b", [3.0, 1.0]))
    ]
    for found in (total(parts, fixed=fixed), given(parts, fixed=fixed)):
        assert found >= exact * (1 - 1e-6)


def test_what_preparation_costs_if_all_other_sites_collude():
    """A prepared mean is then hidden by a site's own share of its noise. With full batches of all
    sites everything is a plain Gaussian: μ² adds."""
    rounds, noise, mean, share = 6, 4.0, 5.0, 0.5
    plan = {"users": 5, "cohort_size": 5, "rounds": rounds, "noise": noise, "batch_sizes": 100,
            "local_steps": 1, "memory": False, "secure": SecureSums(1, 5)}  # fmt: skip
    ran = replace(
        part("", [range(5)] * rounds, **plan), costs=(Cost("mean", noise=mean, alone=share),)
    )
    exact = gaussian_epsilon(1e-5, math.sqrt(rounds / noise**2 + 1 / (share * mean) ** 2))
    with_others = gaussian_epsilon(1e-5, math.sqrt(rounds / (4 * noise**2) + 1 / mean**2))
    for facts in (Facts(), Facts(held="sites")):
        said = state([ran], facts)
        for name, truth in (("alone", exact), ("server", with_others)):
            one = said.towards(name)
            assert truth <= one.epsilon <= truth * 1.003 and truth <= one.given <= truth * 1.003
    planned = state([replace(ran, ledger=None)]).towards("alone")
    assert exact <= planned.epsilon <= exact * 1.003 and planned.given is None


def seeded(name: str, value: int | None, secret: bool = False) -> Part:
    """A run of this seed; None where its seed is not known."""
    drawn = SeedKnowledge() if value is None else SeedKnowledge("given", f"mark of {name}", value)
    took_part = [[0, round] for round in range(1, 6)]
    return replace(part(name, took_part), secret=secret, drawn=drawn, data="same")


def test_runs_that_share_their_noise_promise_nothing():
    for other, why in ((7, "share the seed 7"), (None, "may share one seed")):
        pair = [seeded("a", 7), seeded("b", other)]
        assert why in shared_noise(pair)
        said = state(pair, Facts(seeded=True))
        assert not said.guarantee and why in said.reason and said.epsilon is None
    pair = [seeded("a", 7), seeded("b", 8)]
    assert shared_noise(pair) is shared_draw(pair) is None
    assert state(pair, Facts(seeded=True)).epsilon == total(pair)
    unknown = [Part(run_of(SMALL), 5, name=name) for name in "ab"]
    assert not state(unknown).guarantee
    # Parts of one run have noise and draws of their own.
    assert shared_noise([replace(p, source="one run") for p in unknown]) is None


def test_secret_runs_of_one_draw_add_their_ledgers_only():
    copies = [
        replace(seeded(name, None, True), drawn=SeedKnowledge("system", name, None, "line"))
        for name in "ab"
    ]
    for pair, why in (
        ([seeded("a", 3, True), seeded("b", 3, True)], "from the seed 3"),
        (copies, "copies of one run"),
    ):
        assert shared_noise(pair) is None and why in shared_draw(pair)
        said = state(pair)
        assert said.towards("server").epsilon is None and said.quotes_given
        assert said.epsilon == pytest.approx(2 * pair[0].ledger.largest())
    own = [replace(p, drawn=SeedKnowledge("system", p.name)) for p in copies]
    assert shared_draw(own) is None and state(own).towards("server").epsilon > 0


@pytest.mark.parametrize("origin", ["given", "default", "sites", "unknown"])
def test_runs_whose_draws_somebody_may_have_chosen_quote_what_was_spent(origin):
    """Over the draw is a promise about chance; one chosen draw among the runs is enough."""
    parts = [seeded("a", 1, True), seeded("b", 2, True)]
    parts[0] = replace(parts[0], drawn=SeedKnowledge("system", "a"))
    chosen = SeedKnowledge(origin, "own", 7)
    assert chosen.given and not FROM_SYSTEM.given
    spent = sum(p.ledger.of(0) for p in parts)
    for facts in (Facts(draw_given=True), Facts()):
        said = state([parts[0], replace(parts[1], drawn=chosen)], facts)
        assert said.quotes_given and said.epsilon == pytest.approx(spent)
    fresh = [replace(p, drawn=SeedKnowledge("system", p.name)) for p in parts]
    assert not state(fresh).quotes_given and state(fresh).epsilon == total(fresh) < spent
    # A simulation next to it does not make its draw a secret.
    mixed = state([replace(fresh[0], secret=False), parts[1]], Facts(seeded=True))
    assert mixed.quotes_given and mixed.epsilon == pytest.approx(spent)


def test_groups_of_users_that_differ_from_part_to_part():
    """ε by group is that of users that there are."""
    plan = {"users": 3, "cohort_size": 1}
    parts = [
        part("a", louder=[1.0, 1.0, 3.0], **plan),
        part("b", louder=[1.0, 3.0, 1.0], **plan),
    ]
    low, high = (epsilon(run_of(SMALL, **plan, noise=n), SERVER) for n in (6.0, 2.0))
    found = state(parts).by_group
    assert sorted(found) == pytest.approx([low + high, low + high, 2 * high], rel=1e-3)
    three = part("c", louder=[1.0, 3.0, 2.0], **plan)
    assert len(state([parts[0], three]).by_group) == 3


def test_what_is_added_to_a_run_of_a_chosen_draw_is_added_to_what_was_spent():
    """Other mechanisms on the same records raise the ε that counts, towards everybody."""
    ran = part("", [[0, round] for round in range(1, 6)])
    costs = (Cost("a count", epsilon=0.25, delta=1e-6),)
    said = state([ran], Facts(draw_given=True))
    assert said.epsilon == ran.ledger.largest() > 1.5 * said.towards("server").epsilon
    more = state([replace(ran, costs=costs)], Facts(draw_given=True))
    for one in more.guarantees:
        assert one.given > said.epsilon and one.epsilon > said.towards(one.adversary).epsilon
    assert said.epsilon < more.epsilon <= 0.26 + Ledger.at_delta(ran.ledger, 9e-6).largest()


def test_what_cannot_be_added_is_refused():
    for other in ({"unit": "user"}, {"sampling": "poisson"}):
        with refuses("units-differ: b protects"):
            state([part("a"), part("b", **other)])
    with refuses("records-differ: b ran on other data than a"):
        state([replace(part("a"), data="x"), replace(part("b"), data="y")])


def test_a_part_without_a_guarantee_leaves_none():
    said = state([part("a"), part("b", clip="median")])
    assert not said.guarantee and "private data" in said.reason


def test_a_cap_over_all_parts_is_never_below_any_mixture_of_them():
    """Three participations of one kind and three of another can cost more than six of either."""
    rare = {"batch_sizes": 5, "noise": 0.8, "local_steps": 1, "delta": 0.5e-5}
    parts = [part("a", **rare), part("b", **{**rare, "batch_sizes": 100, "noise": 4.0})]
    mixed = convolved([losses(p.run, SERVER, times=3) for p in parts])[0].epsilon(1e-5)
    alone = [epsilon(replace(p.run, delta=1e-5), SERVER, times=6) for p in parts]
    assert max(alone) < 0.98 * mixed < mixed <= within_cap(parts, 6).epsilon


def test_a_cap_over_all_parts_counts_extra_attempts_and_other_mechanisms():
    parts = [part("a", noise=8.0, extra=2), part("b", noise=2.0, extra=1)]
    most = within_cap(parts, 3).epsilon
    assert most == epsilon(replace(parts[1].run, delta=2e-5), SERVER, times=6)
    said = state(parts, Facts(cap=3))
    assert said.towards("server").theorem == "cap" and said.epsilon == most < total(parts)
    costly = [replace(parts[0], costs=(Cost("mean", noise=2.0),)), parts[1]]
    assert state(costly, Facts(cap=3)).epsilon > most * 1.05


def test_a_users_budget_counts_all_parts():
    run = run_of(SMALL, cohort_size=4, noise=4.0)
    budget = epsilon(run, SERVER, times=2)
    first, second = Ledger(run, budget), Ledger(run, budget)
    first.record(1, [0, 1])
    first.record(2, [0])
    parts = [Part(run, 20, first), Part(run, 20, second)]
    assert allowed_in_parts(parts, 1, [3, 1, 0]) == [3]
    assert allowed_in_parts([Part(run, 20, Ledger(run))] * 2, 1, [3, 0]) == [3, 0]
    dear = [replace(parts[0], costs=(Cost("mean", noise=2.0),)), parts[1]]
    assert allowed_in_parts(dear, 1, [3]) == []
