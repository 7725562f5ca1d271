"""What a configuration settles before a plan is made: it is kept, and σ_g is solved for the run
with all of it."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import dpscaffold
from dpscaffold import Gaussian, Linear, Plan, fedavg
from dpscaffold.cli import app
from dpscaffold.config import Run, load, make_run, parse
from dpscaffold.errors import BadInput
from dpscaffold.federation.roster import Roster
from dpscaffold.planning.facts import Facts, Limits
from dpscaffold.planning.recommendation import Goal
from dpscaffold.planning.surrogate import SurrogateSetting, surrogate
from dpscaffold.planning.trial import Bench, StepSizeTrial
from dpscaffold.privacy import Part, round_up, state
from dpscaffold.report.planning import plan_lines
from dpscaffold.tasks import LOSSES

FACTS = """[facts]
users = 6
records = [20, 30, 40, 50, 60, 70]
features = 3
classes = 2
"""
BASE = {"plan": {"rounds": 8, "local_steps": 1, "user_ratio": 0.5}, "privacy": {"epsilon": 2.0}}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Surrogates that are not trained on: what is tested here does not depend on scores."""

    def scored(self: Bench, asked: list[tuple[Run, float]]) -> list[StepSizeTrial]:
        scores = tuple((0.5, 0.7)[seed] for _ in range(2) for seed in self.seeds)
        return [StepSizeTrial(rate, scores) for _, rate in asked]

    monkeypatch.setattr(Bench, "run", scored)


def planned(folder: Path, tables: str, *options: str) -> Result:
    (folder / "run.toml").write_text(FACTS + tables)
    asked = ["plan", "--config", str(folder / "run.toml"), "--out", str(folder / "plan"), *options]
    return CliRunner().invoke(app, asked)


def toml(algorithm: str = "", **more: dict[str, object]) -> str:
    lines = [f'[algorithm]\nname = "{algorithm}"'] if algorithm else []
    for name in {**BASE, **more}:
        lines.append(f"[{name}]")
        values = {**BASE.get(name, {}), **more.get(name, {})}
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "tables",
    [
        toml(),
        toml(privacy={"sampling": "fixed"}),
        toml("fedavg", privacy={"view": "third-party", "sampling": "fixed"}),
        toml("fedavg", privacy={"view": "participant", "sampling": "fixed"}),
        toml("fedavg", privacy={"view": "participant", "sampling": "fixed", "colluders": 2}),
        toml("fedavg", plan={"weighting": "records"}, privacy={"view": "third-party", "clip": 2.0}),
        toml("fedavg", privacy={"view": "third-party", "user_epsilon": 1.5}),
        toml("scaffold-balanced-warm", plan={"warm_rounds": 2}),
        toml(secure={"colluders": 1}, plan={"local_steps": 5}),
        toml(secure={"colluders": 0, "least": 2, "voids": 3}, privacy={"view": "third-party"}),
        toml(privacy={"unit": "user"}),
        toml("fedavg", privacy={"unit": "user", "view": "third-party"}, secure={"colluders": 1}),
    ],
)
@pytest.mark.usefixtures("quick")
def test_the_noise_is_that_of_the_run_that_is_written(tmp_path, tables):
    """What train solves for the written configuration, on the users of the facts, is what the plan
    says: whatever limits it was given with."""
    result = planned(tmp_path, tables, "-q")
    assert result.exit_code == 0, result.exception
    said = json.loads((tmp_path / "plan" / "plan.json").read_text())
    sizes = tuple(tomllib.loads(FACTS)["facts"]["records"])
    facts = Facts(sizes, 3, 2)
    run = load(tmp_path / "plan" / "plan.toml").setting(Roster(sizes, (), facts.roster.schema))
    assert run.privacy is not None
    assert said["noise"] == pytest.approx(run.privacy.noise, rel=1e-9)
    assert said["delta"] == run.describe().delta


@pytest.mark.usefixtures("quick")
def test_a_plan_with_secure_sums_says_both_epsilons(tmp_path):
    """One local step, no memory, and the ε alone that the statement of the run would have."""
    result = planned(tmp_path, toml(secure={"colluders": 1}, plan={"local_steps": 5}))
    assert result.exit_code == 0, result.exception
    written = load(tmp_path / "plan" / "plan.toml")
    assert written.secure is not None and written.secure.colluders == 1
    assert written.plan.local_steps == 1 and not written.algorithm.build().memory
    sizes = tuple(tomllib.loads(FACTS)["facts"]["records"])
    run = written.setting(Roster(sizes, (), Facts(sizes, 3, 2).roster.schema)).describe()
    assert run is not None
    said = state([Part(run, run.rounds)])
    alone = said.towards("alone").epsilon
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert plan["epsilon"]["alone"] == pytest.approx(alone)
    assert plan["epsilon"]["value"] == 2.0 >= said.towards("server").epsilon > 1.9  # type: ignore[operator]
    assert f"ε alone = {round_up(alone)}" in result.output
    assert "together with at most 1 site" in result.output


@pytest.mark.usefixtures("quick")
def test_a_plan_with_secure_sums_needs_an_algorithm_that_is_proved(tmp_path):
    result = planned(tmp_path, toml("scaffold", secure={"colluders": 1}))
    assert isinstance(result.exception, BadInput) and result.exception.code == "secure-not-proved"


@pytest.mark.usefixtures("quick")
def test_what_was_given_is_written(tmp_path):
    limits = {
        "user_epsilon": 1.5,
        "release": True,
        "colluders": 2,
        "delta": 1e-5,
    }
    more = {"server_rate": 0.5, "seed": 4, "evaluate_every": 3}
    result = planned(tmp_path, toml("fedprox", plan=more, privacy=limits), "-q")
    assert result.exit_code == 0, result.exception
    written = tomllib.loads((tmp_path / "plan" / "plan.toml").read_text())
    assert limits.items() <= written["privacy"].items()
    assert more.items() <= written["plan"].items()
    assert written["algorithm"]["name"] == "fedprox"


@pytest.mark.usefixtures("quick")
def test_an_algorithm_of_ones_own_keeps_its_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dpscaffold import fedavg\n\n\ndef factory():\n    return fedavg()\n"
    )
    result = planned(tmp_path, toml("mine:factory"))
    assert result.exit_code == 0, result.exception
    assert "copy your own file next to" in result.output
    written = tomllib.loads((tmp_path / "plan" / "plan.toml").read_text())
    assert written["algorithm"] == {"name": "mine:factory"}


def test_a_mean_by_records_has_its_own_noise():
    """Σ w_i²v_i with w_i = R_i/ΣR_j, on average over cohorts, by hand from 2Cσ_g/b_i."""
    sizes = (20, 50, 900, 300)
    facts = Facts(sizes, 4, 2)
    real = make_run(
        facts.roster,
        Linear(4, 2, LOSSES["softmax"]),
        fedavg(),
        Plan(rounds=6, local_steps=8, user_ratio=1.0, data_ratio=0.1, weighting="records"),
        Gaussian(0.7, 3.0, "poisson"),
    )
    small = SurrogateSetting.of(real).on(surrogate(real, facts.guess, 0.5), 0.9)
    wanted = sum((r / sum(sizes) * 2 * 0.7 * 3.0 / math.floor(0.1 * r)) ** 2 for r in sizes) / 8
    assert small.privacy is not None
    got = (2 * 0.7 * small.privacy.noise / int(small.batch_sizes[0])) ** 2
    got /= small.plan.local_steps * small.cohort_size
    assert got == pytest.approx(wanted, rel=1e-6)


@pytest.mark.usefixtures("quick")
def test_what_is_not_proved_or_loose_is_said():
    facts = Facts.of(users=6, records=40, features=3, classes=2)
    found = dpscaffold.plan(
        facts, Goal(2.0, "third-party", 0.02, "fixed"), Limits(rounds=4, local_steps=2)
    )
    said = "\n".join(plan_lines(found))
    assert "one record at random in the clear" in said
    small = dpscaffold.plan(facts, Goal(2.0), Limits(rounds=4, local_steps=2))
    assert "in the clear" not in "\n".join(plan_lines(small))


@pytest.mark.usefixtures("quick")
def test_private_preparation_is_not_forgotten(tmp_path):
    prepared = 'preprocess = [{step = "centre", fit = "private", norm_bound = 1.0, noise = 5.0}]'
    columns = 'path = "nowhere.csv"\nlabel = "ill"\nuser = "site"'
    data = f'[data]\nsource = "csv"\n{columns}\n{prepared}\n'
    result = planned(tmp_path, toml() + data)
    assert result.exit_code == 0, result.exception
    assert "train solves a larger σ_g" in result.output
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["remarks"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--view", ""], "--view is ''"),
        (["--sampling", ""], "--sampling is ''"),
    ],
)
def test_an_empty_word_is_refused(tmp_path, options, said):
    result = planned(tmp_path, toml(), *options)
    assert isinstance(result.exception, BadInput) and said in str(result.exception)
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"privacy": {"noise": 1.0, "clip": "medain"}}, "give a number or 'median'"),
        ({"facts": {"records": [3, "a"]}}, "facts.records[1] is 'a'; give a whole number"),
        ({"facts": {"records": "many"}}, "facts.records is 'many'; give a whole number or a list"),
        ({"facts": {"row_norm": [1]}}, "facts.row_norm is [1]; give a number or 'none'"),
        ({"plan": {"learning_rate": True}}, "plan.learning_rate is True; give a number"),
        ({"facts": {"users": True}}, "facts.users is True; give a whole number"),
    ],
)
def test_a_slip_is_named_by_its_key_and_by_what_would_do(tables, said):
    with pytest.raises(BadInput) as refused:
        parse(tables)
    assert said in str(refused.value)
    parse({"privacy": {"noise": 1.0, "secret": True, "release": True}, "task": {"hidden": 10}})


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    def tried(*arguments: object, **more: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(Bench, "run", tried)
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(
        "dpscaffold.cli.folder.os.access", lambda place, mode: "closed" not in str(place)
    )
    for out, said in (
        ("file", "which is a file"),
        ("file/plan", "file is a file"),
        ("closed/a/b", "nothing can be written to"),
    ):
        result = planned(tmp_path, toml(), "--out", str(tmp_path / out))
        assert isinstance(result.exception, BadInput) and said in str(result.exception)
    assert not list((tmp_path / "closed").iterdir())


@pytest.mark.usefixtures("quick")
def test_a_plan_hears_all_users_by_their_records_unless_told_otherwise(tmp_path):
    """Up to 200 users all take part, and the mean is weighted by records; what a configuration says
    of either is kept."""
    tables = toml(plan={"rounds": 8, "local_steps": 1}).replace("user_ratio = 0.5\n", "")
    assert planned(tmp_path, tables).exit_code == 0
    written = tomllib.loads((tmp_path / "plan" / "plan.toml").read_text())["plan"]
    assert (written["user_ratio"], written["weighting"]) == (1.0, "records")
    assert planned(tmp_path, toml(plan={"weighting": "uniform"})).exit_code == 0
    written = tomllib.loads((tmp_path / "plan" / "plan.toml").read_text())
    assert (written["plan"]["user_ratio"], written["plan"]["weighting"]) == (0.5, "uniform")
    assert [Limits().share(users) for users in (3, 200, 1000, 5000)] == [1.0, 1.0, 0.2, 0.2]


@pytest.mark.usefixtures("quick")
def test_a_plan_gives_epsilon_for_both_relations(tmp_path):
    said = planned(tmp_path, toml()).output
    assert "For replacing one record by another, ε = " in " ".join(said.split())
    fixed = planned(tmp_path, toml(privacy={"sampling": "fixed"})).output
    assert "replacing one record" not in fixed
