"""The audit passes the engine as it is, and fails every planted mistake that costs privacy.

Seeds are fixed, so these tests pass or fail for good.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from stated import over_draw, spent, written
from typer.testing import CliRunner

from dpscaffold.algorithms import Upload
from dpscaffold.audit import play as play_module
from dpscaffold.audit.onerun import OneRunRequest, play_one_run
from dpscaffold.audit.play import AuditLimits, audit
from dpscaffold.audit.subject import Claim, read_case
from dpscaffold.cli import app
from dpscaffold.config import Run
from dpscaffold.engine import query, work
from dpscaffold.engine.aggregate import Averaged
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.privacy import SERVER, TradeOff, losses
from dpscaffold.privacy.loss import participation_losses
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.budget_file import BudgetFile
from dpscaffold.runs.ledger import read_account
from dpscaffold.tasks import base as base_module
from dpscaffold.tasks import clipping as clipping_module
from dpscaffold.tasks import linear as linear_module
from dpscaffold.tasks import mlp as mlp_module

CONFIG = """
[data]
source = "synthetic"
users = 6
records = 40
[plan]
rounds = 2
local_steps = 4
user_ratio = 1.0
data_ratio = 0.5
[privacy]
clip = 0.5
noise = 1.5
delta = 1e-5
"""

PROPER_VIEW = play_module._view
QUICK = AuditLimits(trials=400, minutes=1.0, seed=3)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "audited.toml"
    path.write_text(CONFIG)
    return path


def audited(config, *overrides, views=("server",), limits=QUICK, one_run=None):
    return audit(read_case(config, list(overrides)), limits, views, one_run=one_run)


HONEST = [
    (),
    ("privacy.sampling=poisson",),
    ("privacy.sampling=poisson", "data.declared_sizes=32"),
    ("privacy.unit=user", "privacy.noise=3"),
    ("algorithm.name=fedavg", "task.kind=mlp"),
    ("algorithm.name=scaffold-warm", "plan.rounds=3", "plan.warm_rounds=1"),
    ("algorithm.name=fedsgd", "plan.local_steps=2", "privacy.secret=true"),
    ("data.size_spread=0.5", "plan.rounds=4", "privacy.user_epsilon=3"),
]
#: The same parts in other combinations.
COMBINED = [
    ("privacy.unit=user", "privacy.noise=3", "privacy.sampling=poisson"),
    ("algorithm.name=scaffold-balanced", "plan.weighting=records"),
    ("algorithm.name=fedprox", "algorithm.mu=0.5", "plan.regularisation=0.01"),
    ("algorithm.name=fedavg", "algorithm.server=adam", "plan.data_ratio=1.0", "privacy.noise=3"),
    ("task.kind=mlp", "privacy.sampling=poisson", "privacy.secret=true"),
    ("plan.rounds=8", "plan.user_ratio=0.5", "plan.data_ratio=0.1", "privacy.noise=0.7"),
]


def slow(*values):
    """A case that repeats others, for ``make test-all``."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("overrides", [*HONEST, *map(slow, COMBINED)], ids=" ".join)
def test_nobody_beats_the_engine_as_it_is(config, overrides):
    report = audited(config, *overrides)
    assert not report.beaten
    assert report.simulated == ("privacy.secret=true" not in overrides)


@pytest.mark.parametrize("sampling", ["fixed", slow("poisson")])
def test_a_third_of_the_claim_is_proved(config, sampling):
    """The setting named in docs/audits.md, with fewer games."""
    setting = ("plan.rounds=1", "plan.local_steps=1", "plan.data_ratio=1.0", "privacy.noise=1.0")
    noise = () if sampling == "fixed" else ("privacy.sampling=poisson", "privacy.noise=0.5")
    report = audited(config, *setting, *noise, limits=replace(QUICK, trials=8000))
    assert not report.beaten and report.findings[0].ratio > 1 / 3


@pytest.mark.parametrize("algorithm", ["fedavg", slow("scaffold")])
def test_other_views_see_less_or_are_promised_less(config, algorithm):
    """Towards a third party FedAvg with one step claims the noise of all; games respect it, and
    its own noise taken off, a participant's claim is larger."""
    report = audited(
        config,
        f"algorithm.name={algorithm}",
        "plan.local_steps=1",
        "plan.data_ratio=1.0",
        "privacy.noise=0.5",
        views=("third_party", "participant"),
        limits=replace(QUICK, trials=150),
    )
    third, participant = report.findings
    assert not report.beaten
    if algorithm == "fedavg":
        assert third.proved > 0 and participant.proved > 0
        assert third.claimed < participant.claimed


def test_a_third_party_that_took_part_beats_the_claim_of_one_that_did_not(config):
    """Who took part takes its own noise off: five of six users against the sum's claim."""
    case = read_case(
        config,
        [
            "algorithm.name=fedavg",
            "plan.local_steps=1",
            "plan.data_ratio=1.0",
            "privacy.noise=0.5",
        ],
    )
    outsider = case.claims["third_party"]
    taken = {"participant": replace(outsider, view="participant", colluders=5)}
    report = audit(replace(case, claims=taken), replace(QUICK, trials=300), ("participant",))
    assert report.beaten


FEW = ("data.users=2", "plan.data_ratio=1.0", "privacy.noise=1.0")


@pytest.mark.parametrize("sampling", ["poisson", slow("fixed")])
def test_sums_of_several_local_steps_tell_something(config, sampling):
    """K = 4, with memory: what users remember is added back."""
    report = audited(
        config,
        *FEW,
        f"privacy.sampling={sampling}",
        views=("third_party", "participant"),
        limits=replace(QUICK, trials=300),
    )
    assert not report.beaten
    for finding in report.findings:
        assert finding.bound.startswith("Theorem 1") and finding.proved > 0.1


def test_the_server_gets_most_of_the_games_and_of_the_chance_of_error(config, monkeypatch):
    """Where no view is named. What all views may take together is what one would."""
    asked = {}

    def noted(subject, claim, limits, sure, seconds, rng, watch):
        asked[claim.view] = seconds, 1 - sure
        return PROPER_VIEW(subject, claim, replace(limits, trials=100), sure, seconds, rng, watch)

    monkeypatch.setattr(play_module, "_view", noted)
    audit(read_case(config), replace(QUICK, minutes=1.0))
    seconds, errors = (sum(values) for values in zip(*asked.values(), strict=True))
    assert seconds == pytest.approx(60.0) and errors == pytest.approx(1 - QUICK.confidence)
    assert asked["server"][0] > 0.75 * seconds and asked["server"][1] > 0.75 * errors


# --- planted mistakes -------------------------------------------------------------------------


def less_noise(monkeypatch, factor):
    """Every user adds this much of its noise."""
    proper = Run.spreads
    monkeypatch.setattr(Run, "spreads", lambda self, *a, **b: factor * proper(self, *a, **b))


def leaking(monkeypatch, join):
    """What leaves a user, and what it keeps, with noise and without it, joined."""
    proper = Averaged.participate

    def leaky(self, *given):
        *others, drawn, users = given
        drawn = list(drawn)
        bare = [(batch, None) for batch, _ in drawn]
        return join(proper(self, *others, drawn, users), proper(self, *others, bare, users))

    monkeypatch.setattr(Averaged, "participate", leaky)


@pytest.mark.parametrize("warm", [True, False], ids=["warm round first", "every round"])
def test_control_variates_without_noise(config, monkeypatch, warm):
    """Δc from the gradients as they were before the noise."""
    overrides = ("algorithm.name=scaffold-warm", "plan.rounds=3", "plan.warm_rounds=1")
    leaking(monkeypatch, lambda noised, bare: (Upload(noised[0].params, bare[0].totals), bare[1]))
    assert audited(config, *(overrides if warm else ())).beaten


def test_moves_without_noise(config, monkeypatch):
    """The noise is in the control variate alone."""
    leaking(monkeypatch, lambda noised, bare: (Upload(bare[0].params, noised[0].totals), noised[1]))
    assert audited(config).beaten


def test_a_clip_for_each_tensor(config, monkeypatch):
    """A joint norm of C·√2."""

    def each_alone(parts, weight, clip):
        bounds = [clipping_module.clip_outer([part], weight, clip) for part in parts]
        return bounds[0]

    monkeypatch.setattr(mlp_module, "clip_outer", each_alone)
    report = audited(config, "task.kind=mlp")
    assert report.beaten and report.canary > 2.5


@pytest.mark.parametrize("sampling", ["fixed", slow("poisson")])
def test_no_clip_at_all(config, monkeypatch, sampling):
    def idle(parts, weight, clip):
        return clip

    monkeypatch.setattr(linear_module, "clip_outer", idle)
    assert audited(config, f"privacy.sampling={sampling}").beaten


@pytest.mark.parametrize(
    ("factor", "games", "sampling"),
    [
        (0.25, 400, "fixed"),
        slow(0.25, 400, "poisson"),
        (0.5, 400, "fixed"),
        (0.5, 400, "poisson"),
        (0.75, 4000, "fixed"),
        slow(0.75, 4000, "poisson"),
    ],
)
def test_too_little_noise(config, monkeypatch, factor, games, sampling):
    """Divided by b twice (b is 4 in the game), of scale σC in place of 2σC, and a quarter short."""
    less_noise(monkeypatch, factor)
    noise = 3 if sampling == "fixed" else 1.5
    overrides = (f"privacy.sampling={sampling}", "plan.data_ratio=1.0", f"privacy.noise={noise}")
    assert audited(config, *overrides, limits=replace(QUICK, trials=games)).beaten


def test_no_noise_where_there_is_nothing_to_hide(config, monkeypatch):
    """A step whose batch is empty (here: sums to nothing) is skipped, and its noise with it."""
    proper = query.noised

    def skipping(mean, spread, normals):
        nothing = (mean == 0).all(dim=1, keepdim=True)
        return torch.where(nothing, mean, proper(mean.clone(), spread, normals))

    monkeypatch.setattr(query, "noised", skipping)
    report = audited(config, "privacy.sampling=poisson")
    assert report.beaten


def test_not_a_number_passes(config, monkeypatch):
    """Clipping by C/‖g‖ alone: padding and records that are not numbers poison the sum."""

    def naive(parts, weight, clip):
        squares = sum(
            part.left.square().sum(1) * (part.right.square().sum(1) + float(part.bias))
            for part in parts
        )
        factor, bound = base_module.clip_factors(squares.sqrt(), weight, clip)
        for part in parts:
            part.left.mul_(factor[:, None])
        return bound

    monkeypatch.setattr(linear_module, "clip_outer", naive)
    for sampling in ("fixed", "poisson"):
        assert audited(config, f"privacy.sampling={sampling}").beaten


@pytest.mark.parametrize("sampling", [slow("fixed"), "poisson"])
def test_a_clip_read_off_the_batch(config, monkeypatch, sampling):
    """The median of the batch's norms in place of C: one record decides how far others reach."""
    proper = clipping_module.clip_outer
    monkeypatch.setattr(linear_module, "clip_outer", lambda p, w, clip: proper(p, w, "median"))
    assert audited(config, f"privacy.sampling={sampling}").beaten


@pytest.mark.parametrize("sampling", [slow("fixed"), "poisson"])
def test_more_local_steps_than_are_counted(config, monkeypatch, sampling):
    """Epochs in place of K steps: whoever has more records takes more of them."""
    proper = work.drawn_on_host

    def epochs(number, *given):
        yield from proper(number, *given)
        for pass_ in (1, 2, 3):
            yield from proper(number + 1000 * pass_, *given)

    monkeypatch.setattr(work, "drawn_on_host", epochs)
    report = audited(config, f"privacy.sampling={sampling}", limits=replace(QUICK, trials=800))
    assert report.beaten


def test_sizes_read_off_the_data_where_sizes_are_hidden(config, monkeypatch):
    """b_i = ⌊sR_i⌋ of the true R_i under add/remove: the scale of the noise tells the size."""
    hidden = ["data.declared_sizes=32", "privacy.noise=8"]
    overrides = ("privacy.sampling=poisson", "plan.rounds=6", *hidden)
    assert not audited(config, *overrides).beaten
    proper = Federation.roster.func
    monkeypatch.setattr(
        Federation,
        "roster",
        property(lambda self: replace(proper(self), sizes=tuple(self.train.sizes.tolist()))),
    )
    assert audited(config, *overrides).beaten


def with_claim(case, laws):
    """The case with another accountant's word for it."""
    epsilon = max(law.epsilon(case.subject.run.delta) for law in laws)
    claim = Claim("server", "wrong", epsilon, case.subject.run.delta, TradeOff.of(laws))
    return replace(case, claims={"server": claim})


def test_an_account_that_starts_anew_every_round(config):
    case = read_case(config, ["plan.rounds=6"])
    wrong = with_claim(case, losses(case.subject.run, SERVER, 1))
    assert audit(wrong, QUICK, ("server",)).beaten
    assert not audit(case, QUICK, ("server",)).beaten


def test_an_account_that_multiplies_the_rates_and_composes_by_step(config):
    """One draw of a user covers all K steps."""
    setting = ["plan.rounds=1", "plan.local_steps=16", "plan.user_ratio=0.5", "privacy.noise=2"]
    case = read_case(config, [*setting, "plan.data_ratio=1.0"])
    laws = participation_losses(0.5, 2.0, "fixed", "record", 16)
    limits = replace(QUICK, trials=2500)
    assert audit(with_claim(case, laws), limits, ("server",)).beaten
    assert not audit(case, limits, ("server",)).beaten


def test_one_batch_for_all_local_steps(config, monkeypatch):
    """A record is in all K batches of a round or in none, and K steps count as K draws."""
    setting = ("plan.local_steps=16", "plan.data_ratio=0.1", "privacy.noise=1", "plan.rounds=3")
    assert not audited(config, *setting, limits=replace(QUICK, trials=600)).beaten
    proper = Randomness.batches

    def batches(self, *given):
        drawn = proper(self, *given)
        drawn.index[:], drawn.count[:] = drawn.index[0], drawn.count[0]
        return drawn

    monkeypatch.setattr(Randomness, "batches", batches)
    report = audited(config, *setting, limits=replace(QUICK, trials=600))
    assert report.beaten and "one batch for all steps" in report.findings[0].statistic


# --- one run on the real data -----------------------------------------------------------------


ONE_RUN = ("plan.data_ratio=1.0", "plan.learning_rate=0.001")


def one_run(case, out, **changes):
    return play_one_run(replace(OneRunRequest.of(case, 120, out, seed=4), **changes), 0.99, 60.0)


@pytest.mark.parametrize("sampling", ["fixed", slow("poisson")])
def test_one_run_on_real_data(config, sampling, monkeypatch, tmp_path):
    """Not beaten as it is; with hardly any noise it proves more than was claimed."""
    case = read_case(config, [f"privacy.sampling={sampling}", *ONE_RUN])
    honest = one_run(case, tmp_path / "honest")
    assert not honest.beaten and honest.rounds == 2 and honest.canaries == 96
    less_noise(monkeypatch, 1e-3)
    silent = one_run(case, tmp_path / "silent", run=replace(case.subject.run, noise=12.0))
    assert silent.right == silent.guesses and silent.beaten


def test_one_run_is_a_run_with_a_ledger_and_a_statement(config, tmp_path):
    """Every round that was played is in its ledger, and its folder states what it spent."""
    case = read_case(config, [*ONE_RUN, "privacy.secret=true"])
    played = one_run(case, tmp_path / "run")
    account = read_account(tmp_path / "run")
    users, rounds = case.setting.users, played.rounds
    assert rounds == 2 and account.ledger.participations.tolist() == [rounds] * users
    claimed = over_draw(case.subject.run, rounds)
    assert played.spent.epsilon == pytest.approx(claimed, rel=1e-9)
    assert played.spent.epsilon == account.statement().epsilon
    assert not played.spent.simulated and str(tmp_path / "run") in played.spent.sentence


def test_one_run_keeps_the_limits_of_its_setting(config, tmp_path):
    """A user who may take part once takes part once, and is not scored in the second round."""
    once = spent(read_case(config, ONE_RUN).subject.run, 1) * 1.01
    case = read_case(config, [*ONE_RUN, f"privacy.user_epsilon={once}"])
    one_run(case, tmp_path / "run")
    assert read_account(tmp_path / "run").ledger.participations.tolist() == [1] * 6


def test_one_run_takes_its_grant_from_the_budget_file(config, tmp_path):
    """The first is granted its whole plan; for the second nothing is left, so it is refused before
    any game is played, and nothing is written."""
    budget = tmp_path / "budget.jsonl"
    setting = [*ONE_RUN, "privacy.secret=true", "privacy.delta=2e-6"]
    claimed = read_case(config, setting).claims["server"].epsilon
    BudgetFile.open(budget, epsilon=1.5 * claimed, delta=1e-5)
    options = [
        word for key in (*setting, f"privacy.budget_file={budget}") for word in ("--set", key)
    ]
    given = (config, *options, "--view", "server", "--trials", 100, "--minutes", 0.05)
    answer = command(*given, "--one-run", 20, "--out", tmp_path / "first")
    assert answer.exit_code == 0, answer.output
    assert "trained on the real records and spent" in " ".join(answer.output.split())
    contents = BudgetFile(budget).read()
    (grant,) = contents.grants.values()
    assert grant.epsilon >= claimed and contents.participations == {grant.run: 2}
    before = budget.read_bytes()
    refused = command(*given, "--one-run", 20, "--out", tmp_path / "second")
    assert isinstance(refused.exception, BadInput) and "left" in str(refused.exception)
    assert "games" not in refused.output
    assert budget.read_bytes() == before and not (tmp_path / "second").exists()


# --- the command ------------------------------------------------------------------------------


def command(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_the_command_in_json(config, tmp_path):
    answer = command(
        *(config, "--trials", 150, "--minutes", 0.2, "--json"),
        *("--one-run", 20, "--out", tmp_path / "run"),
    )
    assert answer.exit_code == 0, answer.output
    said = json.loads(answer.stdout)
    assert [row["view"] for row in said["findings"]] == ["server", "third_party", "participant"]
    assert said["simulated"] and not said["beaten"] and said["one_run"]["canaries"] == 20
    assert said["one_run"]["spent"]["epsilon"] > 0


def test_the_command_fails_when_a_claim_is_beaten(config, monkeypatch):
    less_noise(monkeypatch, 0.25)
    answer = command(config, "--trials", 500, "--view", "server", "--seed", 1)
    assert answer.exit_code == 4
    assert "BEATEN" in answer.output


def test_a_run_folder_is_held_to_its_ledger(config, tmp_path):
    trained = CliRunner().invoke(app, ["train", str(config), "--out", str(tmp_path / "run")])
    assert trained.exit_code == 0, trained.output
    answer = command(tmp_path / "run", "--trials", 120, "--view", "server", "--json")
    assert answer.exit_code == 0, answer.output
    said = json.loads(answer.stdout)
    stated = written(tmp_path / "run")
    assert said["findings"][0]["claimed"] == pytest.approx(stated.towards("server").given)
    assert said["participations"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trials", "3"], "--trials is 3"),
        (["--minutes", "0"], "--minutes is 0"),
        (["--confidence", "1"], "--confidence is 1"),
        (["--view", "nobody"], "--view is 'nobody'"),
        (["--one-run", "1"], "--one-run is 1"),
        (["--one-run", "20"], "name a folder for it with --out"),
        (["--out", "run"], "nothing is trained without --one-run"),
        (["--one-run", "20", "--out", "."], "--out is ., which is not empty"),
        (["--set", "privacy=false"], "not private"),
        (["--set", "privacy.noise=0"], "no claim to audit"),
        (["--set", "privacy.clip=median"], "no claim to audit"),
    ],
)
def test_bad_input_is_one_sentence(config, arguments, said, tmp_path):
    before = sorted(tmp_path.iterdir())
    answer = command(config, *arguments)
    assert answer.exit_code != 0 and said in str(answer.exception)
    assert type(answer.exception).__module__.startswith("dpscaffold")
    assert sorted(tmp_path.iterdir()) == before


def test_no_such_source(tmp_path):
    assert "does not exist" in str(command(tmp_path / "none.toml").exception)
    assert "holds no run" in str(command(tmp_path).exception)
