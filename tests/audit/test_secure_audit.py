"""The audit of secure sums passes the engine as it is, and fails planted mistakes.

Its confidence is 0.99; seeds are fixed, so these tests pass or fail for good.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold.audit import subject as subject_module
from dpscaffold.audit.play import AuditLimits, audit
from dpscaffold.audit.secure import SumAttack
from dpscaffold.audit.subject import read_case
from dpscaffold.cli import app
from dpscaffold.config import Run
from dpscaffold.config.secure import SumPlan
from dpscaffold.privacy import accounting
from dpscaffold.randomness.streams import Randomness

CONFIG = """
[data]
source = "synthetic"
users = 6
records = 40
[algorithm]
name = "fedavg"
[plan]
rounds = 2
local_steps = 1
user_ratio = 1.0
data_ratio = 0.5
[privacy]
clip = 0.5
noise = 0.7
delta = 1e-3
[secure]
colluders = 1
"""
QUICK = AuditLimits(trials=120, minutes=1.0, seed=3)
#: One attempt with the whole table: the most that a game can show.
ONCE = ("plan.rounds=1", "plan.data_ratio=1.0")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "secure.toml"
    path.write_text(CONFIG)
    return path


def audited(config, *overrides, views=("server", "alone"), trials=120):
    return audit(read_case(config, list(overrides)), replace(QUICK, trials=trials), views)


HONEST = [
    (),
    ("privacy.sampling=poisson", "privacy.secret=true"),
    ("secure.least=4", "secure.voids=2", "secure.colluders=2"),
    ("secure.colluders=0", "plan.user_ratio=0.5", "plan.rounds=4"),
    ("privacy.unit=user", "privacy.noise=2"),
]


@pytest.mark.parametrize("overrides", HONEST, ids=" ".join)
def test_nobody_beats_secure_sums_as_they_are(config, overrides):
    report = audited(config, *overrides, trials=100)
    server, alone = report.findings
    assert not report.beaten
    assert server.claimed < alone.claimed
    assert server.bound.startswith("Theorem 4") and alone.bound.startswith("Theorem 1")
    assert alone.colluders == read_case(config, list(overrides)).subject.run.cohort_size - 1


def test_a_quarter_of_both_claims_is_proved(config):
    report = audited(
        config, *ONCE, "data.users=3", "privacy.noise=0.7", "privacy.delta=0.01", trials=1000
    )
    assert not report.beaten
    for finding in report.findings:
        assert 1 / 4 < finding.ratio < 1


# --- planted mistakes -------------------------------------------------------------------------


def test_noise_that_does_not_follow_the_list(config, monkeypatch):
    """Noise for 12 members in a list of 4: about half of what it should be."""
    setting = (*ONCE, "data.users=12", "secure.least=4", "privacy.noise=0.25")
    assert not audited(config, *setting, views=("server",), trials=300).beaten
    monkeypatch.setattr(SumPlan, "noise_for", lambda self, members, noise=None: noise or self.noise)
    assert audited(config, *setting, views=("server",), trials=300).beaten


def test_noise_that_counts_on_colluders(config, monkeypatch):
    """√(m/|A|) in place of √((m − k)/(|A| − k)) in a list of 4 with 2 colluders."""
    few = ("data.users=20", "secure.least=4", "secure.colluders=2")
    setting = (*ONCE, *few, "privacy.noise=0.15")
    assert not audited(config, *setting, views=("server",), trials=800).beaten
    proper = SumPlan.noise_for

    def counting(self, *given):
        return proper(replace(self, secure=self.secure.changed(colluders=0)), *given)

    monkeypatch.setattr(SumPlan, "noise_for", counting)
    assert audited(config, *setting, views=("server",), trials=800).beaten


def test_an_account_that_counts_on_colluders(config, monkeypatch):
    """√m in place of √(m − k): the noise of 2 colluders of 4."""
    setting = (*ONCE, "data.users=4", "secure.colluders=2", "privacy.noise=0.4")
    assert not audited(config, *setting, views=("server",), trials=700).beaten
    proper = accounting.noise_seen

    def naive(run, who):
        return proper(replace(run, secure=replace(run.secure, colluders=0)), replace(who, knows=0))

    kept = (accounting.group_steps, accounting.losses)
    with monkeypatch.context() as patch:
        patch.setattr(accounting, "noise_seen", naive)
        for cached in kept:  # what was computed before is not what the mistake computes
            patch.setattr(accounting, cached.__name__, cached.__wrapped__)
        patch.setattr(subject_module, "losses", accounting.losses)
        assert audited(config, *setting, views=("server",), trials=700).beaten


def test_an_account_without_void_attempts(config):
    """Four attempts that the server voided are not in the claim."""
    case = read_case(config, [*ONCE, "data.users=3", "secure.voids=4", "privacy.noise=0.9"])
    run = replace(case.subject.run, extra=0)
    wrong = replace(case, claims=subject_module.claims_of(run, None))
    limits = replace(QUICK, trials=250)
    assert not audit(case, limits, ("server",)).beaten
    assert audit(wrong, limits, ("server",)).beaten


def test_a_site_that_relies_on_the_noise_of_others(config, monkeypatch):
    """Its own noise is missing: the others still hide it from the server, more or less, and nobody
    hides it if they collude."""

    class Silent:
        def standard_normal(self, dtype, out):
            out[...] = 0.0

    proper = Randomness.normals
    monkeypatch.setattr(
        Randomness,
        "normals",
        lambda self, round, user: proper(self, round, user) if user else Silent(),
    )
    assert audited(config, views=("alone",)).beaten


def test_noise_of_half_the_scale(config, monkeypatch):
    proper = Run.spreads
    monkeypatch.setattr(Run, "spreads", lambda self, *a, **b: 0.5 * proper(self, *a, **b))
    for finding in audited(config, *ONCE, "data.users=3", "privacy.noise=0.6", trials=300).findings:
        assert finding.beaten


# --- the command ------------------------------------------------------------------------------


def command(*words):
    return CliRunner().invoke(app, ["audit", *map(str, words)], env={"COLUMNS": "200"})


def test_the_command_names_both_adversaries(config):
    short = ("--trials", 100, "--minutes", 0.05, "--seed", 1)
    answer = command(config, *short)
    assert answer.exit_code == 0, answer.output
    for words in ("server with 1 site", "all other sites"):
        assert words in " ".join(answer.output.split())
    found = json.loads(command(config, *short, "--json", "--view", "server").stdout)
    (server,) = found["findings"]
    assert server["colluders"] == 1
    (alone,) = json.loads(command(config, *short, "--json", "--view", "alone").stdout)["findings"]
    assert alone["colluders"] == 5


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("--one-run", "20", "--out", "one"), "not-applicable: --one-run is 20"),
        (("--view", "third-party"), "unknown-view: --view is 'third-party'"),
        (("--view", "alone", "--set", "secure.colluders=5"), "too-few-sites: secure.colluders"),
    ],
)
def test_what_does_not_go_with_secure_sums_is_refused(config, words, refusal, tmp_path):
    """One sentence, and nothing is written."""
    with refuses(refusal):
        raise command(config, *words).exception
    assert list(tmp_path.iterdir()) == [config]


def test_only_secure_sums_have_the_view_alone(config):
    config.write_text(CONFIG.split("[secure]")[0])
    with refuses("unknown-view: --view is 'alone'"):
        raise command(config, "--view", "alone").exception


def test_a_list_has_the_length_that_is_worst(config):
    """Against the server the shortest list, against all others the longest."""
    case = read_case(config, ["secure.least=4"])
    rng = np.random.default_rng(1)
    for attack in (SumAttack(1, 4), SumAttack(5, 6)):
        inside, outside = attack.games(case.subject, 20, rng)
        assert inside.shape == outside.shape and np.isfinite(inside).all()


def test_sums_of_one_round_are_not_played(config):
    """The games are about clipped gradients, and ridge sums something else."""
    lines = ["algorithm.name=ridge", "plan.rounds=1", "plan.data_ratio=1.0"]
    with refuses("not-applicable: algorithm.name is 'ridge'"):
        read_case(config, lines)
