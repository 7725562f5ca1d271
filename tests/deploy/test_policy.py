"""The site's file, what its policy refuses, and what it grants, against direct accounting."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deploy.world import new_site
from refusals import refuses
from stated import at_most

from dpscaffold import Gaussian
from dpscaffold.deployment.protocol.messages import Refused
from dpscaffold.deployment.site.file import (
    Policy,
    RemainingBudget,
    SiteGrant,
    Terms,
    check_terms,
    grant,
    read_site_file,
)
from dpscaffold.deployment.site.ledger import GrantedRun, SiteLedger
from dpscaffold.errors import BadInput
from dpscaffold.privacy import describe

POLICY = Policy(
    epsilon=2.0,
    delta=1e-6,
    max_runs=2,
    algorithms=("scaffold", "package.file:factory"),
)
SECRET = Gaussian(1.0, 24.0, "fixed", "record", secret=True)
TERMS = Terms(20, 10, 0.5, 0.2, "uniform", "scaffold", "logistic", 410, SECRET)


def reason(policy: Policy, terms: Terms) -> str:
    try:
        check_terms(policy, terms)
    except Refused as no:
        return no.code
    return ""


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, ""),
        ({"mechanism": None}, "policy-unprotected"),
        ({"mechanism": SECRET.changed(secret=False)}, "policy-unprotected"),
        ({"mechanism": SECRET.changed(noise=0.0)}, "policy-noise"),
        ({"mechanism": SECRET.changed(clip="median")}, "policy-clip"),
        ({"mechanism": SECRET.changed(unit="user")}, "policy-unit"),
        ({"unproved": ("start",)}, "policy-unit"),
        ({"local_steps": 101}, "policy-steps"),
        ({"algorithm": "fedavg"}, "policy-algorithm"),
        ({"algorithm": "package.file:factory"}, ""),
        ({"algorithm": "other.file:factory"}, "policy-algorithm"),
        ({"task": "package:net"}, "policy-model"),
        ({"parameters": 2_000_001}, "policy-model"),
    ],
)
def test_each_rule_has_its_code(changed, code):
    assert reason(POLICY, replace(TERMS, **changed)) == code


def test_what_the_file_allows_is_allowed():
    loose = POLICY.model_copy(update={"units": ("record", "none")})
    assert reason(loose, replace(TERMS, mechanism=None)) == ""
    assert reason(loose, replace(TERMS, mechanism=SECRET.changed(secret=False))) == ""
    users = POLICY.model_copy(update={"units": ("user",)})
    by_user = replace(TERMS, mechanism=SECRET.changed(unit="user"))
    assert reason(users, by_user) == ""
    assert reason(users, replace(by_user, weighting="records")) == "policy-unit"


def direct(terms: Terms, records: int, batch: int, n: int, delta: float) -> float:
    """ε of n participations by the bound ``cap``, from a description of its own."""
    assert terms.mechanism is not None
    run = describe(
        rounds=n,
        local_steps=terms.local_steps,
        users=7,
        cohort_size=3,
        records=records,
        batch_sizes=batch,
        noise=terms.mechanism.noise,
        sampling=terms.mechanism.sampling,
        delta=delta,
    )
    return at_most(run)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_the_grant_is_the_largest_that_fits(sampling):
    terms = replace(TERMS, mechanism=SECRET.changed(sampling=sampling))
    whole = grant(POLICY, terms, 400, 80, RemainingBudget(2.0, 1e-6, 2))
    assert whole.participations == 22  # T + max(2, ⌈T/20⌉)
    assert whole.epsilon == pytest.approx(direct(terms, 400, 80, 22, 5e-7), rel=1e-9)
    least = direct(terms, 400, 80, 12, 5e-7)  # ⌈lT⌉ + 2
    some = grant(POLICY, terms, 400, 80, RemainingBudget(direct(terms, 400, 80, 15, 5e-7), 1e-6, 1))
    assert some.participations == 15 and some.delta == 5e-7
    assert grant(POLICY, terms, 400, 80, RemainingBudget(least, 1e-6, 1)).participations == 12
    with refuses("policy-epsilon"):
        grant(POLICY, terms, 400, 80, RemainingBudget(least * 0.999, 1e-6, 1))
    with refuses("policy-runs"):
        grant(POLICY, terms, 400, 80, RemainingBudget(2.0, 1e-6, 0))
    with refuses("policy-epsilon"):
        grant(POLICY, terms, 400, 80, RemainingBudget(2.0, 4e-7, 1))


def test_one_run_gets_its_share_and_no_more():
    left = RemainingBudget(2.0, 1e-6, 2)
    thrifty = POLICY.model_copy(update={"epsilon": 2 * direct(TERMS, 400, 80, 13, 5e-7)})
    assert grant(thrifty, TERMS, 400, 80, left).participations == 13
    assert grant(POLICY, TERMS, 400, 80, left, most=14).participations == 14
    long = replace(TERMS, rounds=200, user_ratio=0.01)
    assert grant(POLICY, long, 400, 80, RemainingBudget(2.0, 1e-6, 2)).participations <= 210


def test_without_a_promise_nothing_is_booked():
    open_ = replace(TERMS, mechanism=None)
    assert grant(POLICY, open_, 400, 80, RemainingBudget(0.0, 0.0, 1)) == SiteGrant(22, None, 0.0)


@pytest.fixture
def site(tmp_path):
    return new_site(tmp_path)


def test_a_new_site_has_the_documented_policy(site):
    file = read_site_file(site)
    assert file.policy == Policy(epsilon=2.0, delta=1e-6, preparation=True)
    assert file.state == site.parent / "state" and file.data["source"] == "csv"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("max_runs", "max_ruins", "did you mean 'max_runs'"),
        ("epsilon = 2.0", "epsilon = 0.0", "policy.epsilon is 0.0"),
        ("epsilon = 2.0", "epsilon = nan", "policy.epsilon is nan"),
        (
            "delta = 1e-6",
            "delta = 1e-6\nmin_noise = 5.0",
            "unknown key policy.min_noise; known here",
        ),
        ("delta = 1e-6", "delta = 1.5", "policy.delta is 1.5"),
        ("delta = 1e-6", "delta = 1e-13", "too small for the accountant"),
        ("delta = 1e-6", "", "policy.delta is missing"),
        ('name = "north"', 'name = "../x"', "the site's name is '../x'"),
        ('"ed25519:', '"rsa:', "it must be 'ed25519:'"),
        ("127.0.0.1:1", "127.0.0.1", "write host:port"),
        ('name = "north"', 'state = "ledger"\nname = "north"', "move the ledger there"),
        ('name = "north"', "name = ", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_sentence(site, old, new, says):
    text = site.read_text()
    assert old in text
    site.chmod(0o600)
    site.write_text(text.replace(old, new, 1))
    with pytest.raises(BadInput) as error:
        read_site_file(site)
    assert says in str(error.value) and "\n" not in str(error.value).strip()


def test_what_earlier_runs_were_granted_is_not_left(tmp_path):
    ledger = SiteLedger(tmp_path / "ledger.jsonl", "north")
    for run, epsilon in (("aa", 0.5), ("bb", 0.75)):
        ledger.reserve(GrantedRun(run, "plan", SiteGrant(5, epsilon, 2e-7), {}))
    assert ledger.left(POLICY) == RemainingBudget(0.75, pytest.approx(6e-7), 0)
    assert ledger.left(POLICY, "bb") == RemainingBudget(1.5, pytest.approx(8e-7), 1)


def test_a_rehearsal_is_granted_without_an_epsilon():
    """Its noise comes from the plan's seed, which the server knows."""
    rehearsal = replace(TERMS, mechanism=SECRET.changed(secret=False))
    assert not rehearsal.protected
    assert grant(POLICY, rehearsal, 100, 20, RemainingBudget(2.0, 1e-6, 2)).epsilon is None
