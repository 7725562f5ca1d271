"""Private tuning: who learns what, what is drawn how, and what is refused."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refuses
from scipy import stats
from stated import over_draw
from typer.testing import CliRunner

from dpscaffold import BadInput
from dpscaffold.cli import app
from dpscaffold.models.export import export
from dpscaffold.models.loading import load_model
from dpscaffold.privacy import Cost, Facts, Part, describe, state
from dpscaffold.privacy.numbers import round_up
from dpscaffold.privacy.seeds import FROM_SYSTEM
from dpscaffold.privacy.selection import SelectionCost, TrialCount, Trials
from dpscaffold.randomness.csprng import CipherStream
from dpscaffold.tasks.metrics import METRICS
from dpscaffold.training.events import StopRequested
from dpscaffold.tuning import private_tuning
from dpscaffold.tuning.private_scores import ScoreRule, noised, record_sums, scored
from dpscaffold.tuning.private_tuning import PrivateTuningResult, tune_privately
from dpscaffold.tuning.tuning import parse_tuning

CPU = torch.device("cpu")
TOY = {
    "data": {"users": 6, "records": 50, "alpha": 0.0, "beta": 0.0},
    "plan": {"rounds": 6, "local_steps": 2, "user_ratio": 0.5, "data_ratio": 0.5},
    "algorithm": {"name": "fedavg"},
    "privacy": {"noise": 4.0},
}
PRIVATE = {"score_noise": 3.0, "grid": {"plan.learning_rate": [0.1, 1.0]}}


def tuned(seed: int = 0, **keys: object) -> PrivateTuningResult:
    settings, table = parse_tuning(TOY | {"tune": PRIVATE | keys})
    return tune_privately(settings, table, CPU, choosing=random.Random(seed))


def toml(tables: dict) -> str:
    import tomli_w

    return tomli_w.dumps(tables)


RUN = describe(
    rounds=30,
    local_steps=5,
    users=40,
    cohort_size=8,
    records=100,
    batch_sizes=20,
    noise=8,
    delta=1e-5,
)


def test_towards_the_server_all_trials_compose_and_towards_others_none_is_counted():
    """The server's ε is that of `together` over the drawn runs and scores; the winner's does not
    depend on how many were drawn."""
    score = Cost("score", noise=15.0)
    few, many = (SelectionCost.of(Trials((RUN,), (0,) * n, TrialCount(5.0), score)) for n in (2, 9))
    for n, found in ((2, few), (9, many)):
        parts = [
            Part(replace(RUN, delta=1e-5 / n), 30, None, (score,), secret=True, drawn=FROM_SYSTEM)
            for k in range(n)
        ]
        known = state(parts, Facts(fixed_in_advance=True)).epsilon
        assert found.all_trials["server"] == pytest.approx(known, rel=1e-9)
    assert few.winner == many.winner
    assert few.all_trials["server"] < many.all_trials["server"]
    one = over_draw(RUN, costs=(score,))
    assert one < few.winner < 4 * one


def test_the_winner_costs_more_the_more_candidates_there_could_be_and_less_without_scores():
    def third(mean: float, score: Cost | None = None) -> float:
        found = SelectionCost.of(Trials((RUN,), (0,), TrialCount(mean), score))
        return found.winner

    assert third(2.0) < third(5.0) < third(50.0)
    assert third(5.0) < third(5.0, score=Cost("score", noise=10.0))


def test_the_worst_candidate_counts_wherever_it_stands():
    loud = replace(RUN, noise=5.0)
    found = [
        SelectionCost.of(Trials(runs, (0,), TrialCount(4.0), None))
        for runs in ((RUN, loud), (loud,))
    ]
    assert found[0].winner == pytest.approx(found[1].winner)


def test_preparation_counts_once():
    mean = Cost("mean", noise=6.0)
    bare, with_mean = (
        SelectionCost.of(Trials((RUN,), (0, 0, 0), TrialCount(4.0), None, costs))
        for costs in ((), (mean,))
    )
    for view in ("server", "participant"):
        assert bare.all_trials[view] < with_mean.all_trials[view]
    assert bare.winner < with_mean.winner
    parts = [
        Part(replace(RUN, delta=1e-5 / 3), 30, None, costs, secret=True, drawn=FROM_SYSTEM)
        for costs in ((mean,), (), ())
    ]
    known = state(parts, Facts(fixed_in_advance=True)).epsilon
    assert with_mean.all_trials["server"] == pytest.approx(known)


def test_candidates_are_drawn_with_replacement_each_as_likely(monkeypatch):
    """150 tunings without training: J is geometric with the mean asked for, and the two candidates
    come up evenly; a law of another mean is rejected (wrong once in 10,000)."""
    monkeypatch.setattr(private_tuning, "scored", lambda *rest: 0.5)
    monkeypatch.setattr(private_tuning.SelectionCost, "of", lambda trials: trials)

    class Bare:
        model = None

    monkeypatch.setattr(
        private_tuning, "_train", lambda settings, *rest: [Bare() for _ in settings]
    )
    settings, table = parse_tuning(TOY | {"tune": PRIVATE | {"trials": 3.0}})
    stream = random.Random(3)
    found = [tune_privately(settings, table, CPU, choosing=stream) for _ in range(150)]
    counts = [len(one.trials) for one in found]
    assert min(counts) >= 1
    total = sum(counts)
    low, high = (150 + stats.nbinom(150, 1 / 3).ppf(q) for q in (5e-5, 1 - 5e-5))
    assert low <= total <= high
    assert not (150 + stats.nbinom(150, 1 / 5).ppf(5e-5) <= total)  # a mean of 5 is seen
    first = sum(t.values["plan.learning_rate"] == 0.1 for one in found for t in one.trials)
    assert stats.binomtest(first, total, 0.5).pvalue > 1e-4


def test_trials_have_noise_and_participants_of_their_own():
    """The same candidate twice gives two models, and no seed of them is in the result."""
    settings, table = parse_tuning(
        TOY | {"tune": PRIVATE | {"grid": {"plan.learning_rate": [0.5]}, "trials": 6.0}}
    )

    class High(random.Random):
        def random(self) -> float:
            return 0.5

    found = tune_privately(settings, table, CPU, choosing=High())
    assert len(found.trials) >= 2
    models = [trial.model for trial in found.trials]
    assert not torch.equal(models[0], models[1])
    secret = private_tuning._candidate(_setting(settings))
    seeds = {private_tuning._fresh(secret).randomness().seed for _ in range(3)}
    assert len(seeds) == 3


def test_the_noise_of_trials_comes_from_no_seed(monkeypatch):
    """Two trials of one candidate that are given the same seed still have noise of their own."""
    monkeypatch.setattr(private_tuning, "_fresh", lambda setting: setting)
    seeded = TOY | {"plan": TOY["plan"] | {"seed": 5, "user_ratio": 1.0}}
    settings, table = parse_tuning(seeded | {"tune": PRIVATE | {"grid": {"plan.rounds": [2]}}})

    class Two(random.Random):
        def random(self) -> float:
            return 0.2

    found = tune_privately(settings, table, CPU, choosing=Two())
    first, second, *_ = [trial.model for trial in found.trials]
    assert not torch.equal(first, second)


def _setting(settings):
    from dpscaffold.data.loading import load_federation

    return settings.setting(load_federation(settings.data))


def test_scores_are_noised_counts_user_by_user():
    values = np.zeros(20_000)
    sent = noised(values, 3.0, CipherStream(bytes(32)), 1.0)
    assert (sent % 1 == 0).all()
    spread = sent.var() - 1 / 12  # rounding adds its own
    low, high = (9.0 * stats.chi2(19_999).ppf(q) / 19_999 for q in (5e-5, 1 - 5e-5))
    assert low <= spread <= high and not low <= 1.1 * spread <= high
    assert abs(np.corrcoef(sent[:-1], sent[1:])[0, 1]) < 0.03


def test_right_answers_are_counted():
    found = tuned(seed=2)
    settings, table = parse_tuning(TOY | {"tune": PRIVATE})
    setting = _setting(settings)
    from dpscaffold.data.loading import load_federation
    from dpscaffold.training.stack import Outcome

    data = load_federation(settings.data)
    outcome = Outcome(setting, model=found.winner.model)
    counts, sizes = record_sums(outcome, data.test, ScoreRule(METRICS["accuracy"]))
    task = setting.task
    for user in range(data.users):
        x, y = data.test.of(user)
        scores = task.scores(found.winner.model, task.prepare(x))
        assert counts[user] == int((scores.argmax(1) == y).sum()) and sizes[user] == len(y)
    assert table.public is None


def test_one_record_changes_no_sum_by_more_than_the_bound():
    """Whatever the scores, infinite ones too: neighbours that differ in one record, by hand."""
    stream = torch.Generator().manual_seed(1)
    logits = 50 * torch.randn(40, 3, generator=stream)
    logits[0] = torch.tensor([math.inf, 0.0, -math.inf])
    labels = torch.randint(3, (40,), generator=stream)
    loss = ScoreRule(METRICS["log_loss"], 2.0)
    counts = loss.counts(logits, labels)
    plain = torch.logsumexp(logits.double(), 1) - logits.double()[torch.arange(40), labels]
    assert counts[1:].tolist() == pytest.approx(plain[1:].clamp(max=2.0).tolist())
    assert float(counts[0]) in (0.0, 2.0) and float(counts.max()) == 2.0
    z, t = 5 * torch.randn(40, 1, generator=stream), torch.randn(40, generator=stream)
    for name, power in (("mae", 1), ("rmse", 2)):
        error = ScoreRule(METRICS[name], 3.0)
        known = (z[:, 0].double() - t.double()).abs().clamp(max=3.0) ** power
        assert error.counts(z, t).tolist() == pytest.approx(known.tolist())
        assert error.most == 3.0**power and error.shown(9.0) == 9.0 ** (1 / power)


def test_noise_of_a_score_is_in_units_of_its_bound():
    """The spread of scores of one model over 300 tries is z·B·√M/N, and no other bound's (wrong
    once in 10,000)."""
    settings, table = parse_tuning(
        TOY | {"tune": PRIVATE | {"metric": "log_loss", "score_bound": 4.0, "score_noise": 2.0}}
    )
    from dpscaffold.data.loading import load_federation
    from dpscaffold.training.stack import Outcome

    data, setting = load_federation(settings.data), _setting(settings)
    outcome = Outcome(setting, model=torch.zeros(setting.task.parameters))
    compared = ScoreRule(METRICS["log_loss"], 4.0)
    sums, sizes = record_sums(outcome, data.test, compared)
    assert sums == pytest.approx(sizes * math.log(10), rel=1e-6)  # a model of zeros
    run = setting.describe()
    # five folds of this many training records each hold sizes.sum() out
    held = [int(4 * size) for size in sizes]
    found = np.array([scored(outcome, data.test, compared, table, run, held) for _ in range(300)])
    wanted = 2.0 * 4.0 * math.sqrt(data.users) / sizes.sum()
    ratio = found.var(ddof=1) / wanted**2 * 299
    low, high = stats.chi2(299).ppf([5e-5, 1 - 5e-5])
    assert low < ratio < high and not low < ratio / 4 < high and not low < ratio * 2 < high
    assert abs(found.mean() - math.log(10)) < 4 * wanted / math.sqrt(300)


def test_the_smallest_loss_wins_and_any_metric_is_for_public_records():
    found = tuned(seed=4, metric="log_loss", score_bound=5.0, trials=4.0)
    scores = [trial.score for trial in found.trials if trial.score is not None]
    assert found.winner.score == min(scores)
    assert found.released()["metric"] == "log_loss"
    assert found.released()["privacy"]["number_of_trials"] == "geometric with mean 4"
    public = {"users": 3, "records": 40, "alpha": 0.0, "beta": 0.0, "seed": 9}
    table = {"public": public, "grid": PRIVATE["grid"], "trials": 2.0}
    settings, read = parse_tuning(TOY | {"tune": table | {"metric": "balanced_accuracy"}})
    found = tune_privately(settings, read, CPU, choosing=random.Random(1))
    assert found.winner.score == max(t.score for t in found.trials)
    assert found.released()["metric"] == "balanced_accuracy"


def test_a_public_score_costs_nothing_and_has_no_noise():
    public = {"users": 3, "records": 40, "alpha": 0.0, "beta": 0.0, "seed": 9}
    settings, table = parse_tuning(
        TOY | {"tune": {"trials": 10.0, "public": public, "grid": PRIVATE["grid"]}}
    )
    found = tune_privately(settings, table, CPU, choosing=random.Random(1))
    assert "public records" in found.scored_on
    shares = [trial.score * 96 for trial in found.trials]  # 3 users, 32 records each
    assert all(abs(share - round(share)) < 1e-6 for share in shares)
    scored = tuned(seed=1)
    assert found.privacy.winner < scored.privacy.winner


def test_preparation_without_protection_is_named_to_everybody():
    settings, table = parse_tuning(TOY | {"tune": PRIVATE})
    told = []
    found = tune_privately(settings, table, CPU, told.append, choosing=random.Random(0))
    assert any("standardised" in one for one in found.outside)
    assert "Outside the guarantee: " in found.privacy_note
    assert found.released()["privacy"]["outside"] == list(found.outside)
    assert found.seen_by_server()["privacy"]["outside"] == list(found.outside)
    digits = {"source": "digits", "users": 6, "preprocess": ["unit-norm"], "similarity": 100}
    settings, table = parse_tuning(TOY | {"data": digits, "tune": PRIVATE})
    assert tune_privately(settings, table, CPU, choosing=random.Random(0)).outside == ()
    assert told and "accuracy" not in repr(told)  # held-out scores leave with noise alone


def test_the_command_keeps_the_two_adversaries_apart(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(toml(TOY | {"tune": PRIVATE | {"trials": 3.0}}))
    out = tmp_path / "tuned"
    done = CliRunner().invoke(app, ["tune", str(config), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    count = len(said["server"]["trials"])
    assert said["server"]["privacy"]["trials"] == count
    winner = json.loads((out / "winner" / "winner.json").read_text())
    assert winner == said["winner"]
    handed = "".join(
        path.read_text()
        for path in (out / "winner").rglob("*")
        if path.suffix in (".json", ".toml")
    )
    assert '"trials":' not in handed  # how many there were is the server's alone
    scores = {trial["score"] for trial in said["server"]["trials"]}
    assert winner["score"] == max(s for s in scores if s is not None)
    assert "the server" in said["statement"] and "the winner alone" in said["statement"]
    assert (out / "server.json").stat().st_mode & 0o077 == 0
    model = load_model(out / "winner" / "model")
    assert torch.isfinite(model.params).all()
    stated, third = model.privacy, winner["privacy"]
    assert stated.guarantee and not stated.seeded
    assert stated.towards("third_party").epsilon == stated.epsilon == third["epsilon"]
    assert stated.towards("server").epsilon is None and stated.delta == third["delta"]
    assert set(third["outside"]) < {sentence for _, sentence in stated.outside}
    page = (out / "winner" / "model" / "privacy.md").read_text()
    assert round_up(third["epsilon"]) in page
    export(replace(model, preparation=()), "safetensors", tmp_path / "left", only_protected=True)
    other = str(tmp_path / "other")
    shown = CliRunner().invoke(app, ["tune", str(config), "--out", other, "-q"])
    assert shown.exit_code == 0 and "Chosen privately" in shown.output


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"score_noise": None, "score_bound": 2.0}, "neither tune.trials nor tune.score_noise"),
        ({"score_noise": None, "trials": 2.0}, "give tune.score_noise"),
        ({"score_noise": 0.0}, "tune.score_noise is 0"),
        ({"trials": 1.0}, "above 1"),
        ({"metric": "log_loss"}, "give tune.score_bound"),
        ({"metric": "f1"}, "needs two classes"),
        ({"metric": "balanced_accuracy"}, "one record can change by any amount"),
        ({"metric": "rmse"}, "is for numbers"),
        ({"score_bound": 2.0}, "a record counts at most 1"),
        ({"metric": "log_loss", "score_bound": 0.0}, "tune.score_bound is 0"),
        ({"grid": {"privacy.noise": [0.0, 4.0]}}, "trains without noise"),
        ({"grid": {"privacy.sampling": ["fixed", "poisson"]}}, "same unit and sampling"),
        ({"public": {"users": 3, "records": 40, "features": 7}}, "leave one of them out"),
    ],
)
def test_what_cannot_be_private_is_refused_in_one_sentence(tmp_path, keys, said):
    tables = {k: v for k, v in (PRIVATE | keys).items() if v is not None}
    config = tmp_path / "run.toml"
    config.write_text(toml(TOY | {"tune": tables}))
    done = CliRunner().invoke(app, ["tune", str(config), "--out", str(tmp_path / "out"), "-q"])
    assert done.exit_code != 0
    text = " ".join((done.output + str(done.exception or "")).split())
    assert said in text, text
    assert not (tmp_path / "out").exists()


def test_without_privacy_or_of_another_kind_there_is_nothing_to_choose_privately():
    bare = {name: table for name, table in TOY.items() if name != "privacy"}
    settings, table = parse_tuning(bare | {"tune": PRIVATE})
    with refuses("no-noise"):
        tune_privately(settings, table, CPU)
    sizes = {"data": TOY["data"] | {"declared_sizes": [40] * 6}}
    more = {"privacy": {"noise": 4.0, "sampling": "poisson"}}
    settings, table = parse_tuning(TOY | sizes | more | {"tune": PRIVATE})
    with refuses("neighbours-not-proved"):
        tune_privately(settings, table, CPU)
    other = {"public": {"users": 3, "records": 40, "features": 7}, "trials": 10.0}
    settings, table = parse_tuning(TOY | {"tune": other})
    with refuses("public-records-differ: 7 features"):
        tune_privately(settings, table, CPU)


def test_trials_with_secure_sums_say_what_holds_if_all_others_collude(tmp_path):
    """Both ε are in the sentence and in the server's file, and not in the winner's."""
    plan = TOY["plan"] | {"local_steps": 1, "user_ratio": 1.0}
    tables = TOY | {"plan": plan, "secure": {"colluders": 1}, "tune": PRIVATE}
    (tmp_path / "c.toml").write_text(toml(tables))
    asked = ["tune", str(tmp_path / "c.toml"), "--out", str(tmp_path / "t"), "--json"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.exception
    found = json.loads(result.output)
    server = found["server"]["privacy"]
    each = server["epsilon"]
    assert each["alone"] > each["server"] > 0
    assert round_up(each["alone"]) in found["statement"]
    assert isinstance(found["winner"]["privacy"]["epsilon"], float)
    grid = {"grid": PRIVATE["grid"], "folds": 2}  # outside the guarantee, as without secure sums
    (tmp_path / "c.toml").write_text(toml(tables | {"tune": grid}))
    plainly = CliRunner().invoke(app, [*asked[:3], str(tmp_path / "u"), "-q"])
    assert plainly.exit_code == 0, plainly.exception


def test_an_earlier_private_tuning_is_not_written_over(tmp_path):
    """Its ε adds to that of the next, so the folder stays as it is."""
    config = tmp_path / "tune.toml"
    config.write_text(toml(TOY | {"tune": PRIVATE | {"trials": 2.0}}))
    asked = ["tune", str(config), "--out", str(tmp_path / "out"), "-q"]
    assert CliRunner().invoke(app, asked).exit_code == 0
    before = (tmp_path / "out" / "server.json").read_bytes()
    result = CliRunner().invoke(app, asked)
    assert isinstance(result.exception, BadInput)
    assert "holds a private tuning" in str(result.exception)
    assert (tmp_path / "out" / "server.json").read_bytes() == before


@pytest.mark.parametrize(
    ("private", "public", "refused"),
    [
        ({"users": 4, "records": 30}, {"users": 4, "records": 30}, True),
        ({"users": 4, "records": 30}, {"users": 4, "records": 30, "seed": 1}, False),
        ({"source": "digits", "users": 4}, {"source": "digits", "users": 2}, True),
        (
            {"source": "csv", "path": "a/../b.csv", "label": "y", "user": "u"},
            {"source": "csv", "path": "b.csv", "label": "y", "user": "u"},
            True,
        ),
        (
            {"source": "csv", "path": "a.csv", "label": "y", "user": "u"},
            {"source": "csv", "path": "b.csv", "label": "y", "user": "u"},
            False,
        ),
        ({"source": "mnist", "path": "a"}, {"source": "mnist", "path": "copy"}, True),
        ({"source": "mnist", "path": "a"}, {"source": "emnist", "path": "a"}, False),
    ],
)
@pytest.mark.parametrize("mode", [True, False])
def test_private_records_do_not_pass_as_public_ones(private, public, refused, mode):
    """Scores on them would cost nothing, though they tell of them."""
    tables = {"data": private, "tune": {"trials": 2.0 if mode else None, "public": public}}
    if not refused:
        parse_tuning(tables)
        return
    with refuses("not-public"):
        parse_tuning(tables)


def test_limits_that_tuning_does_not_keep_are_refused():
    settings, table = parse_tuning(
        TOY | {"privacy": {"noise": 4.0, "user_epsilon": 1}, "tune": PRIVATE | {"trials": 2.0}}
    )
    with refuses("not-applicable: privacy.user_epsilon is 1 … private tuning"):
        tune_privately(settings, table, CPU, choosing=random.Random(0))


def test_colluding_participants_are_counted():
    """Without memory and with K = 1 a participant is hidden by the others' noise too: the less of
    it, the more of them pool what they know."""
    run = replace(RUN, memory=False, one_sum=True, local_steps=1)
    found = [
        SelectionCost.of(Trials((run,), (0, 0), TrialCount(4.0), None, (), colluders))
        for colluders in (1, 3)
    ]
    few, many = (one.all_trials["participant"] for one in found)
    assert few < many <= found[1].all_trials["server"]
    assert round_up(many) in found[1].sentence() and found[1].for_server()["colluders"] == 3


def test_what_stopped_trials_have_told_is_said(tmp_path, monkeypatch):
    """ε of all that were drawn, which the server can have learnt at most."""
    config = tmp_path / "tune.toml"
    config.write_text(toml(TOY | {"tune": PRIVATE | {"trials": 2.0}}))
    spent: list[float] = []

    def stopped(*arguments: object) -> None:
        raise StopRequested("SIGTERM")

    of = SelectionCost.of

    def accounted(trials: Trials) -> object:
        found = of(trials)
        spent.append(found.all_trials["server"])
        return found

    monkeypatch.setattr(private_tuning, "_train", stopped)
    monkeypatch.setattr(private_tuning.SelectionCost, "of", accounted)
    result = CliRunner().invoke(app, ["tune", str(config), "--out", str(tmp_path / "out")])
    assert result.exit_code == 143
    assert f"epsilon is at most {math.ceil(1000 * spent[0]) / 1000:.3f}" in result.output
    assert not (tmp_path / "out").exists()


def test_a_table_that_is_none_and_a_number_beyond_drawing_are_refused():
    for asked in (3, [1], "private"):
        with refuses("not-a-table"):
            parse_tuning({"tune": asked})
    with refuses("out-of-range: at most 1,000,000"):
        parse_tuning({"tune": PRIVATE | {"trials": 1e9}})
    with refuses("not-a-number: tune.trials is True"):
        parse_tuning({"tune": PRIVATE | {"trials": True}})
