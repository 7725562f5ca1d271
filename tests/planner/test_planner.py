"""The planner: surrogates that have the facts, noise that is the real run's, and no record read."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stated import over_draw
from typer.testing import CliRunner

import dpscaffold
from dpscaffold import (
    BadInput,
    Federation,
    Gaussian,
    Linear,
    Logistic,
    Plan,
    scaffold,
    scaffold_balanced,
)
from dpscaffold.cli import app
from dpscaffold.config import Run, make_run
from dpscaffold.planning import Facts, Goal, Limits
from dpscaffold.planning.recommendation import Recommendation, default_task, numbers_sent
from dpscaffold.planning.shape import Shape
from dpscaffold.planning.surrogate import SurrogateAssumptions, SurrogateSetting, kinds, surrogate
from dpscaffold.planning.trial import CLOSE, Bench, Choice, StepSizeTrial
from dpscaffold.tasks import LOSSES

FACTS = Facts.of(users=12, records=60, features=6, classes=3)
SMALL = ["--users", "12", "--records", "60", "--features", "6", "--classes", "3"]


def public(facts: Facts = FACTS, noise: float = 2.0, **plan: object) -> Run:
    """A run of which only the facts are known."""
    values = {"rounds": 6, "local_steps": 8, "user_ratio": 0.5, "regularisation": 0.0}
    squares = Linear(facts.features, 1, LOSSES["squared"])
    task = Logistic(facts.features, facts.classes) if facts.classes else squares
    return make_run(
        facts.roster,
        task,
        scaffold_balanced(),
        Plan(**(values | plan)),  # type: ignore[arg-type]
        Gaussian(0.7, noise, "poisson"),
    )


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(20, 900), min_size=2, max_size=60),
    ratio=st.sampled_from([0.1, 0.25, 1.0]),
    share=st.sampled_from([0.5, 1.0]),
    steps=st.integers(1, 60),
    noise=st.floats(0.1, 300),
)
def test_a_rounds_mean_has_the_noise_of_the_real_run(sizes, ratio, share, steps, noise):
    """The variance of one coordinate of the mean move, over K steps and m users, worked out from
    the paper's 2Cσ_g/b by hand on both sides; and the distance Kη_l of a round is the same."""
    facts = Facts(tuple(sizes), 4, 2)
    real = public(facts, noise, data_ratio=ratio, user_ratio=share, local_steps=steps)
    small = SurrogateSetting.of(real).on(surrogate(real, facts.guess, 0.5), 0.9)
    batches = [math.floor(ratio * size + 1e-9) for size in sizes]
    variance = sum((2 * 0.7 * noise / b) ** 2 for b in batches) / len(sizes)
    wanted = variance / (steps * math.floor(share * len(sizes) + 1e-9))
    batch = int(small.batch_sizes[0])
    got = (2 * 0.7 * small.privacy.noise / batch) ** 2
    got /= small.plan.local_steps * small.cohort_size
    assert got == pytest.approx(wanted, rel=1e-6)
    travelled = 0.9 / ratio
    assert small.plan.step_size * small.plan.local_steps == pytest.approx(travelled)
    assert small.plan.rounds == real.plan.rounds


def test_a_surrogate_has_the_facts():
    facts = Facts.of(users=500, records=3000, features=30, classes=10, row_norm=2.5)
    stand_in = surrogate(public(facts, user_ratio=0.2), facts.guess, 0.5)
    shape = Shape.of(public(facts, user_ratio=0.2))
    assert (stand_in.users, stand_in.dimension, stand_in.classes) == (shape.users, 30, 10)
    assert shape.cohort_size / shape.users == pytest.approx(0.2)
    assert torch.allclose(stand_in.train.features.norm(dim=1), torch.tensor(2.5))
    counts = np.bincount(stand_in.train.labels.numpy(), minlength=10)
    assert counts.min() > 0.6 * counts.mean()
    alone = [len(stand_in.train.of(user)[1].unique()) for user in range(stand_in.users)]
    alike = surrogate(public(facts, user_ratio=0.2), SurrogateAssumptions(100.0), 0.5)
    mixed = [len(alike.train.of(user)[1].unique()) for user in range(alike.users)]
    assert max(alone) <= 3 and min(mixed) >= 8


def test_many_features_do_not_make_surrogates_easier():
    """Nearest class means in 40 and in 400 features err alike: classes lie apart in the first 40
    alone. Apart in all 400, none of these records would be mistaken."""

    def mistaken(features: int) -> float:
        facts = Facts.of(users=50, records=800, features=features, classes=10)
        stand_in = surrogate(public(facts), SurrogateAssumptions(100.0), 0.5)
        x, y = stand_in.train.features.double(), stand_in.train.labels
        spread = x.std(0)
        centres = torch.stack([x[y == c].mean(0) for c in range(10)]) / spread
        x, y = stand_in.test.features.double() / spread, stand_in.test.labels
        return float((torch.cdist(x, centres).argmin(1) != y).double().mean())

    few, many = mistaken(40), mistaken(400)
    assert 0.5 * few < many < 1.5 * few and many > 0.05


def test_a_number_has_a_surrogate_of_its_own():
    facts = Facts.of(users=10, records=80, features=5, classes=0, similarity=100.0, row_norm=None)
    stand_in = surrogate(public(facts), facts.guess, 1.0)
    x, y = (part.double() for part in (stand_in.train.features, stand_in.train.labels))
    assert float(y.mean()) == pytest.approx(0, abs=0.1) and float(y.std()) == pytest.approx(
        1, abs=0.1
    )
    assert torch.allclose(x.var(0), torch.ones(5, dtype=torch.float64), atol=0.25)
    solved = torch.linalg.lstsq(x, y).solution
    left = float((y - x @ solved).var() / y.var())
    assert 0.02 < left < 0.9  # there is something to learn, and noise
    [found] = Bench(facts.guess).choices([(public(facts, noise=0.1), [0.03, 0.1, 0.3])])
    assert 0 < found.score < 1
    assert default_task(facts).name == "linear-squared"


def test_a_recommendation_keeps_its_promise_and_its_limits():
    found = dpscaffold.plan(FACTS, Goal(2.0, delta=1e-4), Limits(8, 3, 4))
    plan = found.setting.plan
    assert plan.rounds <= 8 and plan.local_steps <= 3 and found.setting.cohort_size == 4
    run = found.setting.describe()
    assert run is not None and run.delta == 1e-4
    epsilon = over_draw(run)
    assert 1.9 < epsilon <= 2.0
    assert 0 < found.kept <= 1 and found.public >= found.choice.score
    low, high = found.choice.flat
    assert low <= found.choice.rate <= high
    assert found.local_steps == plan.rounds * plan.local_steps * 4


def test_traffic_counts_every_vector():
    p = Logistic(6, 3).parameters
    assert numbers_sent(replace(public(), algorithm=scaffold())) == (2 * p, 2 * p)
    assert numbers_sent(public()) == (3 * p, 2 * p + 3)


def test_the_best_is_the_best_and_the_flat_part_is_around_it():
    trials = tuple(
        StepSizeTrial(r, (s,)) for r, s in [(0.1, 0.5), (0.3, 0.79), (1, 0.795), (3, 0.6)]
    )
    choice = Choice(public(), trials)
    assert choice.rate == 1 and choice.flat == (0.3, 1)


def records(seed: int) -> Federation:
    stream = torch.Generator().manual_seed(seed)
    parts = [
        (torch.randn(40, 6, generator=stream), torch.randint(3, (40,), generator=stream))
        for _ in range(10)
    ]
    return Federation.from_arrays(parts, parts, classes=3)


CONFIG = """
[data]
source = "csv"
path = "{path}"
label = "ill"
user = "site"
[plan]
rounds = 6
local_steps = 2
user_ratio = 0.5
[privacy]
epsilon = 5.0
view = "server"
[facts]
users = 6
records = 20
features = 2
classes = 2
"""


def test_plan_reads_no_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is made while the private file does not even exist, and every way to load data is
    barred; then the file comes, and the plan is ready to train."""
    private, config = tmp_path / "private.csv", tmp_path / "run.toml"
    config.write_text(CONFIG.format(path=private))

    def refused(*arguments: object, **more: object) -> None:
        raise AssertionError("a plan must not load data")

    with monkeypatch.context() as barred:
        for place in ("data.loading", "tuning.tuning", "paper.solving", "paper.runner"):
            barred.setattr(f"dpscaffold.{place}.load_federation", refused)
        asked = ["plan", "--config", str(config), "--out", str(tmp_path / "plan"), "-q"]
        result = CliRunner().invoke(app, asked)
        assert result.exit_code == 0, result.output
        assert not private.exists()
    ready = tmp_path / "plan" / "plan.toml"
    lines = [f"{u},{(u * 7 + k) % 5},{k % 3},{k % 2}" for u in range(6) for k in range(25)]
    private.write_text("site,age,dose,ill\n" + "\n".join(lines) + "\n")
    result = CliRunner().invoke(app, ["train", str(ready), "--out", str(tmp_path / "run"), "-q"])
    assert result.exit_code == 0, result.output


NETWORK = """
import torch


def network():
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
"""


@pytest.mark.parametrize(
    ("target", "task"),
    [("number", 'kind = "linear"'), ("class", 'kind = "module"\nmodule = "network:network"')],
)
def test_train_chooses_the_step_size_of_a_number_and_of_a_module(tmp_path, target, task):
    lines = [f"{u},{(u * 7 + k) % 5},{k % 3},{k % 2}" for u in range(6) for k in range(25)]
    (tmp_path / "rows.csv").write_text("site,age,dose,ill\n" + "\n".join(lines) + "\n")
    (tmp_path / "network.py").write_text(NETWORK)
    config, folder = tmp_path / "run.toml", tmp_path / "run"
    text = CONFIG.format(path=tmp_path / "rows.csv").split("[facts]")[0]
    text = text.replace("rounds = 6", "rounds = 4")
    if target == "number":
        text = text.replace(
            'user = "site"', 'user = "site"\ntarget = { kind = "number", low = 0, high = 1 }'
        )
    config.write_text(f"{text}[task]\n{task}\n")
    result = CliRunner().invoke(app, ["train", str(config), "--out", str(folder), "-q"])
    assert result.exit_code == 0, result.output
    tables = tomllib.loads((folder / "config.toml").read_text())
    assert 0 < tables["plan"]["learning_rate"] < 1000


def test_a_plan_leaves_other_files_alone_and_is_not_written_over_its_configuration(tmp_path):
    """An earlier plan is replaced; what else lies in the folder stays as it was."""
    out = tmp_path / "plan"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "plan.toml").write_text("# an earlier plan\n")
    more = ["--rounds", "2", "--local-steps", "1", "--epsilon", "5", "-q", "--out", str(out)]
    result = CliRunner().invoke(app, ["plan", *SMALL, *more])
    assert result.exit_code == 0, result.output
    assert (out / "notes.txt").read_text() == "mine"
    assert "earlier" not in (out / "plan.toml").read_text()
    before = (out / "plan.toml").read_bytes()
    own = ["plan", "--config", str(out / "plan.toml"), *more]
    result = CliRunner().invoke(app, own)
    assert isinstance(result.exception, BadInput) and result.exit_code != 0
    assert "whose plan.toml is the configuration" in str(result.exception)
    assert (out / "plan.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--epsilon", "1", "--participants", "13"], "participants is 13, and there are 12"),
        (["--epsilon", "1", "--view", "moon"], "--view is 'moon'"),
        (["--epsilon", "1", "--records", "60,20"], "lists 2 sizes and facts.users is 12"),
        (["--epsilon", "1", "--records", "many"], "--records is 'many'"),
        (["--epsilon", "1", "--classes", "1"], "facts.classes is 1"),
        (["--epsilon", "1", "--similarity", "120"], "facts.similarity is 120"),
        (["--epsilon", "-1"], "epsilon is -1"),
        (["--epsilon", "1", "--rounds", "0"], "the most rounds"),
        ([], "epsilon is not given"),
    ],
)
def test_bad_facts_are_one_sentence(tmp_path, options, said):
    result = CliRunner().invoke(app, ["plan", *SMALL, "--out", str(tmp_path), *options])
    assert result.exit_code != 0
    assert isinstance(result.exception, BadInput) and said in str(result.exception)


def test_missing_facts_and_a_batch_below_one_record_are_named(tmp_path):
    result = CliRunner().invoke(app, ["plan", "--users", "3", "--epsilon", "1"])
    assert "facts.records, facts.features, facts.classes are not given" in str(result.exception)
    config = tmp_path / "c.toml"
    config.write_text("[plan]\ndata_ratio = 0.01\n")
    asked = ["plan", *SMALL, "--epsilon", "1", "--config", str(config), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, asked)
    assert "a batch below one" in str(result.exception)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('[privacy]\nepsilon = "one"\n', "privacy.epsilon is 'one'"),
        ('[task]\nkind = "tree"\n', "task.kind is 'tree'"),
        ("[plan]\nroundz = 5\n", "roundz"),
        ('[algorithm]\nname = "scaffold-balanced"\ntrust = 1.5\n', "algorithm.trust is 1.5"),
    ],
)
def test_a_configuration_that_training_would_refuse_is_not_planned_on(tmp_path, table, said):
    config, out = tmp_path / "c.toml", tmp_path / "out"
    config.write_text(table)
    asked = ["plan", *SMALL, "--epsilon", "1", "--config", str(config), "--out", str(out)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code != 0 and not out.exists()
    assert isinstance(result.exception, BadInput) and said in str(result.exception)


def test_the_figure_tells_the_kinds_of_surrogates_apart(tmp_path, monkeypatch):
    """Six scores: two of each separation, then two of users with models of their own."""
    from dpscaffold.report import planning

    drawn = []
    monkeypatch.setattr(planning, "save_figure", lambda figure, *rest: drawn.append(figure))
    trials = tuple(StepSizeTrial(r, (0.1, 0.3, 0.5, 0.7, 0.8, 0.9), 2) for r in (0.1, 1.0))
    setting = public()
    found = Recommendation(FACTS, Goal(1.0), setting, Choice(setting, trials), (), 0.9)
    planning._draw(found, tmp_path / "plan.png")
    lines = {line.get_label(): line.get_ydata()[0] for line in drawn[0].axes[0].lines}
    assert lines["separation 0.5"] == pytest.approx(0.2)
    assert lines["separation 1"] == pytest.approx(0.6)
    assert lines["models of their own"] == pytest.approx(0.85)


def test_where_nothing_is_known_users_may_have_models_of_their_own():
    """γ unknown adds surrogates whose users drift: all of a user's records lie close together, and
    users who lie alike do not say alike. A known γ adds none, nor does a number."""
    unknown = Facts.of(users=12, records=60, features=6, classes=3)
    known = Facts.of(users=12, records=60, features=6, classes=3, similarity=0.0)
    assert unknown.guess.own_models and not known.guess.own_models
    assert [k.differ for k in kinds(unknown.guess, 3, (0, 1))] == ["classes"] * 4 + ["models"] * 2
    assert [k.differ for k in kinds(known.guess, 3, (0, 1))] == ["classes"] * 4
    assert [k.differ for k in kinds(unknown.guess, 0, (0, 1))] == ["classes"] * 4
    data = surrogate(public(unknown), unknown.guess, 1.0, 0, "models")
    parts = [data.train.of(user)[0] for user in range(data.users)]
    within = sum(float(x.var(0).sum()) for x in parts) / len(parts)
    between = float(torch.stack([x.mean(0) for x in parts]).var(0).sum())
    assert between > 20 * within
    assert torch.cat(parts).norm(dim=1).allclose(torch.ones(1), atol=1e-5)


def test_both_kinds_of_surrogates_weigh_alike_and_are_tried():
    facts = Facts.of(users=12, records=60, features=6, classes=3)
    [found] = Bench(facts.guess).choices([(public(facts), [0.1, 1.0])])
    for trial in found.trials:
        assert len(trial.scores) == 6 and trial.own_models == 2
        means = sum(trial.scores[:4]) / 4, sum(trial.scores[4:]) / 2
        assert trial.score == pytest.approx(sum(means) / 2)


@settings(max_examples=30, deadline=None)
@example([0.5, 0.5008])
@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_every_rung_of_a_ladder_is_tried_once_and_the_best_is_chosen(scores):
    """Whatever the scores, with two peaks as well; of those that cannot be told apart the smaller
    step."""
    ladder = [float(3**k) for k in range(len(scores))]
    asked: list[float] = []

    def scored(self, wanted):
        asked.extend(rate for _, rate in wanted)
        return [StepSizeTrial(rate, (round(scores[ladder.index(rate)], 3),)) for _, rate in wanted]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "run", scored)
        [found] = Bench(SurrogateAssumptions()).choices([(public(), ladder)])
    assert asked == ladder
    rounded = [round(score, 3) for score in scores]
    close = [score >= max(rounded) - CLOSE for score in rounded]
    assert found.rate == ladder[close.index(True)]


def test_a_run_whose_step_size_was_chosen_goes_on(tmp_path):
    """What is written of public facts reads back as it was meant, and further rounds may be asked
    for."""
    base = (
        "[data]\nusers = 5\nrecords = 40\n[plan]\nrounds = 3\nlocal_steps = 2\nuser_ratio = 0.4\n"
    )
    (tmp_path / "c.toml").write_text(base + "[privacy]\nnoise = 4.0\n")
    run = ["train", "--out", str(tmp_path / "run"), "-q"]
    assert CliRunner().invoke(app, [*run, str(tmp_path / "c.toml")]).exit_code == 0
    for words in ((), ("--set", "plan.rounds=5")):
        result = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "run"), *words, "-q"])
        assert result.exit_code == 0, result.exception
