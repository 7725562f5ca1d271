"""What the statement says, what it must never leave out, and that its numbers can be recomputed."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from privacy.explicit_pairs import gaussian_epsilon
from privacy.settings import SMALL, SYNTHETIC, run_of
from refusals import refuses
from scipy.stats import norm

from dpscaffold.privacy import (
    Cost,
    Facts,
    Ledger,
    Mechanism,
    Part,
    Remark,
    SecureSums,
    Statement,
    adversaries,
    capped,
    charged,
    digits_up,
    epsilon,
    line,
    page,
    percent,
    round_up,
    state,
    table,
    without_guarantee,
)
from dpscaffold.privacy.accounting import epsilons_by_group, group_steps, step_epsilon
from dpscaffold.privacy.page import THEOREMS
from dpscaffold.privacy.preparation import left_open
from dpscaffold.privacy.seeds import FROM_SYSTEM

SITES = {**SYNTHETIC, "users": 60, "cohort_size": 12}


def part(run: Mechanism, rounds: int = 0, **more: Any) -> Part:
    """A plan, or a run whose first users took part."""
    ledger = Ledger(run) if rounds else None
    for round in range(1, rounds + 1):
        ledger.record(round, {0, round % run.users} if run.cohort_size > 1 else {0})
    return Part(run, rounds or run.rounds, ledger, secret=True, drawn=FROM_SYSTEM, **more)


COSTS = (Cost("a private mean", noise=3.0), Cost("a private vote", epsilon=0.1, delta=1e-9))
SUMS = run_of(SMALL, memory=False, local_steps=1, cohort_size=4)
LISTS = replace(SUMS, secure=SecureSums(1, 3))
MANY = run_of(SMALL, users=16, cohort_size=8, louder=[1 + 0.1 * k for k in range(16)], memory=False)
POISSON = run_of(SMALL, sampling="poisson")
PREPARED = (Remark("Rows have unit norm.", "none needed"), Remark("A raw mean.", "unprotected"))
#: One statement of each kind.
STATEMENTS: dict[str, Statement] = {
    "plan": state([part(run_of(SITES))], Facts(preparation=PREPARED)),
    "sites": state([part(run_of(SITES), 5)], Facts(held="sites", draw_given=True)),
    "simulation": state([part(SUMS, 7)], Facts(held="one computer", seeded=True, colluders=2)),
    "secure sums": state([part(LISTS, 4, costs=COSTS)], Facts(held="sites")),
    "poisson": state([part(POISSON, 3)], Facts(held="one computer")),
    "own noise": state([part(MANY, 9, costs=COSTS[:1])], Facts(held="one computer")),
    "parts": state([part(SUMS, 3), part(SUMS, 2, costs=COSTS)], Facts(held="sites")),
    "fixed": state([part(SUMS, 3), part(SUMS, 2)], Facts(fixed_in_advance=True)),
    "users": state([part(run_of(SMALL, unit="user"), 2)], Facts(held="one computer")),
    "no noise": state([part(run_of(SMALL, noise=0.0))]),
    "median": state([part(run_of(SMALL, clip="median"), 2)]),
    "not private": state([], Facts(preparation=PREPARED)),
}
PRIVATE = [kind for kind, said in STATEMENTS.items() if said.reason is None]


@pytest.mark.parametrize("kind", STATEMENTS)
def test_what_is_written_is_read_back(kind):
    said = STATEMENTS[kind]
    written = json.dumps(said.to_json(), allow_nan=False)
    assert len(written) <= 6000 and len(json.dumps(said.to_json(), indent=1)) <= 9000
    read = Statement.from_json(json.loads(written), "privacy.json")
    assert read == said and json.dumps(read.to_json()) == written
    assert page(read) == page(said) and line(read) == line(said) == repr(read)


def own_recount(written: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Every ε of privacy.json of one part, from its mechanism, rounds, counts and costs."""
    (stored,) = written["parts"]
    run = Mechanism.from_json(stored["mechanism"], "a file")
    costs = [Cost(**cost) for cost in stored.get("costs", ())]
    several = [re.match(r"(\d+) sites that pool", one["words"]) for one in written["guarantees"]]
    known = adversaries(run, next((int(found[1]) for found in several if found), 1))
    found = {}
    for one in written["guarantees"]:
        name = one["adversary"]
        who = known["server" if name == "hostile" else name]
        own = [cost.if_others_collude for cost in costs] if name == "alone" else costs
        if name == "hostile":
            found[name, "epsilon"] = capped(run, who, own)
            continue
        found[name, "epsilon"] = epsilon(run, who, stored["rounds"], costs=own)
        steps = group_steps(run, who if name == "alone" else known["server"])
        given = [
            step_epsilon(
                run, who if name == "alone" else known["server"], step, None, times, tuple(own)
            )
            for step, times in zip(steps, stored.get("most_often", ()), strict=False)
        ]
        if given:
            found[name, "given"] = max(given)
    return found


@pytest.mark.parametrize("kind", [kind for kind in PRIVATE if kind not in ("parts", "fixed")])
def test_whoever_has_the_file_can_compute_every_number_again(kind):
    written = json.loads(json.dumps(STATEMENTS[kind].to_json()))
    stated = {
        (one["adversary"], which): one[which]
        for one in written["guarantees"]
        for which in ("epsilon", "given")
        if which in one
    }
    assert own_recount(written) == pytest.approx(stated, rel=1e-9) and stated
    run = Mechanism.from_json(written["parts"][0]["mechanism"], "a file")
    costs = [Cost(**cost) for cost in written["parts"][0].get("costs", ())]
    if by_group := written.get("by_group"):
        server, rounds = adversaries(run)["server"], written["parts"][0]["rounds"]
        assert by_group == pytest.approx(epsilons_by_group(run, server, rounds, costs))


def test_the_parts_of_a_sum_are_stated_each_by_itself():
    written = STATEMENTS["parts"].to_json()
    for one in written["guarantees"]:
        if one["adversary"] == "hostile":
            continue
        each = [stored["epsilons"][one["adversary"]] for stored in written["parts"]]
        assert one["epsilon"] == pytest.approx(sum(each)) and one["theorem"] == "sum"
    deltas = [stored["mechanism"]["delta"] for stored in written["parts"]]
    assert written["delta"] == pytest.approx(sum(deltas))
    for stored in written["parts"]:
        alone = {**written, "parts": [stored], "guarantees": [{"adversary": "server", "words": ""}]}
        assert own_recount(alone)["server", "epsilon"] == stored["epsilons"]["server"]


@pytest.mark.parametrize("kind", PRIVATE)
def test_a_curve_holds_what_its_theorem_states(kind):
    """It is that of the adversary who learns most of those whom the theorem is about."""
    said = STATEMENTS[kind]
    for one in (one for one in said.guarantees if one.adversary != "hostile"):
        most, deltas = said.curves[one.theorem]
        assert most >= one.epsilon * (1 - 1e-9) and deltas[0] >= 2 * one.guess - 1 - 1e-9
        assert list(deltas) == sorted(deltas, reverse=True)


@pytest.mark.parametrize(
    "change",
    [
        {"quote": "Everything is private."},
        {"guarantees": [{"adversary": "server", "surcharge": 1}]},
        {"guarantees": [{"adversary": "server", "epsilon": "small"}]},
        {"parts": [{"rounds": 1}]},
        {"parts": [{"mechanism": {}, "rounds": 1, "noised_models": 3}]},
        {"held": "a cloud"},
        {"outside": None},
    ],
    ids=str,
)
def test_a_file_of_another_version_is_refused(change):
    with refuses("run-damaged: privacy.json cannot be read by this version"):
        Statement.from_json({**STATEMENTS["plan"].to_json(), **change}, "privacy.json")
    for other in ([], "x", None):
        with refuses("run-damaged"):
            Statement.from_json(other, "privacy.json")


def words_of(text: str) -> list[str]:
    """The words of a page, without the rows of its table."""
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    return re.findall(r"[^\s|*#]+", " ".join(lines))


@pytest.mark.parametrize("kind", [kind for kind in STATEMENTS if kind not in ("parts", "fixed")])
def test_a_page_is_short_and_says_nothing_twice(kind):
    text = page(STATEMENTS[kind])
    assert len(words_of(text)) <= 150, len(words_of(text))
    whole = " ".join(line for line in text.splitlines() if not line.startswith(("|", "#")))
    sentences = [s for s in re.split(r"(?<=[.:;])\s+", whole.replace("**", "")) if s]
    assert len(sentences) == len(set(sentences))
    assert "R_i" not in text and "√" not in text and "None" not in text and "nan" not in text


@pytest.mark.parametrize("kind", PRIVATE)
def test_the_table_has_epsilon_delta_guess_and_theorem(kind):
    said = STATEMENTS[kind]
    rows = [line for line in page(said).splitlines() if line.startswith("| ")][1:]
    found = table(said)
    assert len(rows) == len(found) > 0
    for row, text in zip(found, rows, strict=True):
        cells = (row.words, row.epsilon, digits_up(said.delta), row.guess, row.theorem)
        assert text == f"| {' | '.join(cells)} |"
        assert row.theorem in THEOREMS.values() and row.guess.endswith("%")
    for one in said.guarantees:
        quoted, guess = (one.epsilon, one.guess)
        if said.quotes_given and one.given is not None:
            quoted, guess = one.given, one.given_guess
        (row,) = (row for row in found if one.words in row.words)
        assert (row.epsilon, row.guess) == (round_up(quoted), percent(guess))
        assert 0.5 < guess <= 1 - (1 - said.delta) / (1 + math.exp(quoted)) + 1e-9
    shown = line(said)
    assert round_up(said.epsilon) in shown and digits_up(said.delta) in shown
    first = said.guarantees[0]
    assert said.epsilon == (first.given if said.quotes_given else first.epsilon)


def test_sixty_sites_who_held_the_records_and_the_hostile_server():
    """The first line says who held the records; a hostile server has a row of its own exactly where
    sites held them and it could choose among draws."""
    beginnings = {
        "sites": "60 sites held their own records.",
        "one computer": "One computer held the records of all 60 users and played them.",
        "plan": "A plan for 60 users: nothing has run.",
    }
    for held, first in beginnings.items():
        for cohort in (12, 59, 60):
            run = run_of(SITES, cohort_size=cohort)
            said = state([part(run, 400 if held != "plan" else 0)], Facts(held=held))
            assert page(said).startswith(first)
            hostile = said.towards("hostile")
            assert (hostile.epsilon is not None) == (held == "sites" and cohort < 60)
            if hostile.epsilon is not None:
                assert hostile.epsilon == capped(run, adversaries(run)["server"])
                assert hostile.epsilon > said.towards("server").epsilon
                assert "hostile server" in table(said)[1].words
    said = STATEMENTS["sites"]
    assert said.quotes_given and said.epsilon == said.towards("server").given
    assert "given who took part" in page(said) and "a draw that nobody chose" in page(said)
    assert [row.theorem for row in table(said)] == [THEOREMS["given"], THEOREMS["cap"]]


def test_the_hostile_server_counts_attempts_and_every_part():
    ran = [part(SUMS, 3), part(replace(SUMS, rounds=4), 2)]
    ran[0].ledger.record(3, [0], again=True)
    hostile = state(ran, Facts(held="sites")).towards("hostile")
    alone = [
        epsilon(p.run, adversaries(p.run)["server"], times=n)
        for p, n in zip(ran, (21, 4), strict=True)
    ]
    assert hostile.epsilon == pytest.approx(sum(alone)) and hostile.theorem == "cap"


def test_a_run_states_what_it_released_and_what_everybody_spent():
    run = run_of(SMALL)
    ran = part(run, 7)
    said = state([ran])
    server = adversaries(run)["server"]
    one = said.towards("server")
    assert one.epsilon == epsilon(run, server, 7) < one.given == ran.ledger.of(0)
    assert f"For whoever knows who took part, ε is {round_up(one.given)}." in page(said)
    assert said.parts[0].participations == {7: 1, 1: 7, 0: 2} and said.parts[0].most_often == (7,)
    ran.ledger.record(7, [0, 7], again=True)
    again = state([ran]).towards("server")
    assert again.epsilon == epsilon(replace(run, extra=1), server, 7) > one.epsilon
    assert again.given == ran.ledger.of(0) > one.given
    assert state([ran]).rounds == 7 and state([ran]).run == replace(run, extra=1)


def test_why_others_hide_nobody_is_said_where_a_plan_can_change_it():
    said = state([part(replace(SUMS, declines="a site's policy"))])
    assert said.towards("third_party").theorem == "1" and "a site's policy" in page(said)
    assert state([part(SUMS)]).towards("third_party").theorem == "2"
    assert state([part(run_of(SMALL))]).towards("third_party").not_more is not None


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_of(SMALL, clip="median"), "private data"),
        (run_of(SMALL, noise=0.0), "epsilon is infinite"),
        (run_of(SMALL, unit="user", weighting="records"), "how many records"),
        (run_of(SMALL, unproved_hooks=("new",)), "no theorem covers new"),
    ],
)
def test_no_guarantee_is_said_with_its_reason(run, words):
    for said in (state([part(run)]), state([part(run, 1)])):
        assert not said.guarantee and said.epsilon is None and words in said.reason
        assert words in page(said) and words in line(said) and table(said) == []
        assert "**Nothing is guaranteed" in page(said)
    bare = without_guarantee("somebody said so.")
    assert line(bare) == "nothing is guaranteed: somebody said so"
    assert "A raw mean." in page(STATEMENTS["not private"])


def test_other_mechanisms_that_spent_delta_leave_no_guarantee():
    """Nothing is said without its reason."""
    vote = Cost("a vote", epsilon=0.1, delta=1e-5)
    for run in (run_of(SMALL), MANY):
        said = state([part(run, costs=(vote,))])
        assert not said.guarantee and "is spent by other mechanisms (a vote)" in page(said)
        json.dumps(said.to_json(), allow_nan=False)


def codes(said: Statement) -> dict[str, str]:
    return dict(said.outside)


def test_what_is_outside_is_named():
    said = STATEMENTS["plan"]
    assert codes(said)["preparation"] == "A raw mean." and "unit norm" not in str(said.outside)
    assert {"metrics", "tuning", "other-runs"} <= set(codes(said)) and "seed" not in codes(said)
    simulation = STATEMENTS["simulation"]
    assert "remove the noise" in codes(simulation)["seed"]
    assert "count as uploads" in codes(simulation)["single-uploads"]
    assert "could tell, with secret noise" in page(simulation)
    assert line(simulation).startswith("with secret noise")
    sums = state([part(LISTS)], Facts(held="one computer"))
    assert "one process simulates" in codes(sums)["simulated-sums"]
    assert "simulated-sums" not in codes(STATEMENTS["secure sums"])
    assert "X25519" in page(STATEMENTS["secure sums"]) and "X25519" not in page(said)
    allowed = state([part(SUMS)], Facts(allowed=("metrics",)))
    assert "privacy.release: metrics" in codes(allowed)["allowed"]
    drawn = dict(state([part(SUMS)], Facts(draw_given=True)).needs)
    assert "draw" in drawn and "draw" not in dict(state([part(SUMS)]).needs)


def test_a_step_that_says_something_unknown_of_itself_is_outside_the_guarantee():
    """Only what says that it is harmless is taken to be."""
    steps = (Remark("My own step.", "harmless"), Remark("Drawn up by hand.", "drafted"))
    outside = [text for _, text in state([], Facts(preparation=steps)).outside]
    assert {"My own step.", "Drawn up by hand."} <= {*outside} & {*left_open(steps)}


def test_private_preparation_is_charged_where_it_hides_what_the_run_protects():
    step = Remark("A mean.", "private", Cost("mean", noise=3.0, add_remove=6.0))
    uncounted = replace(step, divided=True)
    declared = replace(POISSON, declared_sizes=True)
    for run, one, noise in (
        (run_of(SMALL), step, 3.0),
        (POISSON, step, 6.0),
        (POISSON, replace(step, cost=Cost("mean", noise=3.0)), None),
        (run_of(SMALL, unit="user"), step, None),
        (declared, step, 6.0),
        (declared, uncounted, None),
    ):
        costs, open_ = charged([one], run)
        assert [cost.noise for cost in costs] == [noise] * (noise is not None)
        assert [remark.protection for remark in open_] == ["unprotected"] * (noise is None)
    counted = charged([Remark("Small ones left out.", "none needed", counted=True)], declared)
    assert "how many records there are, which this run hides" in counted[1][0].sentence


def test_names_of_users_are_said_only_where_users_are_not_what_is_hidden():
    step = Remark("Small users were left out.", "none needed", named="They are: north.")
    for unit, shown in (("record", True), ("user", False)):
        said = state([part(run_of(SMALL, unit=unit))], Facts(preparation=(step,)))
        assert ("north" in json.dumps(said.to_json())) == ("north" in page(said)) == shown


@pytest.mark.parametrize(("delta", "large"), [(1e-3, True), (0.5, True), (0.999e-3, False)])
def test_a_delta_from_one_over_n_up_is_named(delta, large):
    said = state([part(run_of(SMALL, delta=delta))])  # 10 users with 100 records
    assert ("not below 1/1000" in codes(said).get("large-delta", "")) == large
    user = state([part(run_of(SMALL, delta=0.1, unit="user"))])
    assert "not below 1/10, one over the number of users" in page(user)


def test_an_epsilon_that_promises_next_to_nothing_is_not_left_without_a_word():
    for noise, little in ((0.3, True), (2.0, False)):
        said = state([part(run_of(SMALL, noise=noise, cohort_size=10))])
        assert (said.epsilon > 10) == little
        for text in (page(said), line(said)):
            assert ("promises next to nothing" in text) == little


def gaussian(changes: dict[str, Any]) -> Statement:
    full = {**SMALL, "users": 5, "cohort_size": 5, "local_steps": 1, "rounds": 30}
    return state([part(run_of(full, batch_sizes=100, **changes))])


@pytest.mark.parametrize("noise", [3.0, 12.0])
def test_full_batches_are_exact_in_both_relations(noise):
    """T releases with every record: one Gaussian of shift √T/(2σ_g) for removing a record's
    content, √T/σ_g for replacing it; the best guess is right with probability Φ(μ/2)."""
    mu = math.sqrt(30) / noise
    removed, replaced = gaussian_epsilon(1e-5, mu / 2), gaussian_epsilon(1e-5, mu)
    one = gaussian({"noise": noise, "sampling": "poisson"}).towards("server")
    assert removed <= one.epsilon <= removed * 1.002 and replaced <= one.replace_one
    assert one.replace_one <= replaced * 1.002
    assert norm.cdf(mu / 4) <= one.guess <= norm.cdf(mu / 4) + 1e-3
    fixed = gaussian({"noise": noise})
    assert replaced <= fixed.epsilon <= replaced * 1.002
    assert fixed.towards("server").replace_one is None


def test_the_page_and_the_line_give_epsilon_for_replacing_a_record_too():
    ran = part(POISSON, 4)
    for said in (state([part(POISSON)]), state([ran]), state([ran], Facts(draw_given=True))):
        one = said.towards("server")
        shown = round_up(one.replace_one)
        assert one.replace_one > 1.8 * one.epsilon
        assert f"For a record replaced by another, ε is {shown} towards the server." in page(said)
        assert f"({shown} for replacing it)" in line(said)
    assert "for replacing it" not in line(STATEMENTS["plan"])
    once, twice = (state([part(POISSON)] * n).towards("server").replace_one for n in (1, 2))
    assert twice == pytest.approx(2 * once)


def test_other_mechanisms_are_in_the_number_and_named():
    run = run_of(SMALL)
    said = state([part(run, costs=COSTS)])
    assert said.epsilon == epsilon(run, adversaries(run)["server"], costs=COSTS)
    assert "Included: a private mean, a private vote." in page(said)
    assert "a private mean" in json.dumps(said.to_json())


def test_users_with_noise_of_their_own_see_the_least_and_the_most():
    said = STATEMENTS["own noise"]
    assert len(said.by_group) == 16 and max(said.by_group) == pytest.approx(said.epsilon)
    low, high = round_up(min(said.by_group)), round_up(max(said.by_group))
    assert f"their ε is {low} to {high}" in page(said)
