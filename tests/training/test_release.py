"""A simulation says that it is one; a release keeps its promise or is refused."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from refusals import refuses
from stated import check_told_alike, page_of, read, stated
from stated import written as statement_in
from typer.testing import CliRunner

from dpscaffold.cli import app
from dpscaffold.privacy import Facts, Ledger, Part, describe, state
from dpscaffold.privacy.numbers import round_up

CONFIG = """
[data]
source = "synthetic"
alpha = 2.0
beta = 2.0
users = 12
records = 60
{data}
[plan]
rounds = 4
local_steps = 3
user_ratio = 0.25
checkpoint_every = 2
{plan}
[privacy]
clip = 1.0
noise = 4.0
{privacy}
"""


def command(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def written(tmp_path, data="", plan="", privacy=""):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(data=data, plan=plan, privacy=privacy))
    return path


def trained(tmp_path, *options, name="run", **parts):
    """The statement of a run of the command, and the one that the command answers."""
    config = written(tmp_path, **parts)
    answer = command("train", config, "--out", tmp_path / name, "--json", *options)
    assert answer.exit_code == 0, answer.output
    return statement_in(tmp_path / name), read(json.loads(answer.stdout)["privacy"])


def test_a_simulation_says_so_before_anything_else(tmp_path):
    said, answer = trained(tmp_path)
    assert said.seeded and answer.seeded and stated(tmp_path / "run.toml").seeded
    assert "seed" in dict(said.outside)
    for text in (
        page_of(tmp_path / "run"),
        command("privacy", tmp_path / "run").output,
    ):
        assert "with secret noise" in text and dict(said.outside)["seed"] in text
    # Over the draw, as the noise was solved for.
    assert said.epsilon == said.towards("server").epsilon


def visible(html):
    """The text of a page, without its tags."""
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_every_page_of_a_simulation_says_so(tmp_path):
    """The report, the table of a comparison, all JSON."""
    trained(tmp_path)
    answer = command("report", tmp_path / "run", "--out", tmp_path / "report.html")
    assert answer.exit_code == 0, answer.output
    for name in ("report.html", "report.md"):
        assert "with secret noise" in visible((tmp_path / name).read_text())
    rows = json.loads(command("compare", tmp_path / "run", "--json").stdout)["runs"]
    assert rows[0]["simulated"] is True
    table = command("compare", tmp_path / "run", "--out", tmp_path / "figure.png").output
    assert "with secret noise" in " ".join(table.split())
    audit = command("audit", tmp_path / "run", "--trials", "100", "--view", "server", "--json")
    assert json.loads(audit.stdout)["simulated"] is True
    trained(tmp_path, "--set", "plan.seed=8", name="other")
    assert stated(tmp_path / "run", tmp_path / "other").seeded


def test_a_given_draw_is_quoted_by_its_ledger_everywhere(tmp_path):
    """Secret noise, and a seed of the draw in the file: over the draw is a smaller number."""
    said, _ = trained(tmp_path, plan="seed = 0", privacy="secret = true")
    spent, over = said.towards("server").given, said.towards("server").epsilon
    assert spent > over
    assert said.quotes_given and said.epsilon == spent
    rows = json.loads(command("compare", tmp_path / "run", "--json").stdout)["runs"]
    assert rows[0]["epsilon"] == spent and rows[0]["simulated"] is False
    assert stated(tmp_path / "run", "--delta", said.delta / 100).epsilon > spent
    command("report", tmp_path / "run", "--out", tmp_path / "report.html")
    text = visible((tmp_path / "report.html").read_text())
    assert text.index(round_up(spent)) < text.index(
        f"Over a draw that nobody chose, ε is {round_up(over)}"
    )


def test_the_best_seed_of_many_is_below_its_own_ledger():
    """Why the ledger comes first: a seed can be chosen so that a user takes part often."""
    run = describe(
        rounds=8, local_steps=2, users=9, cohort_size=3, records=50, batch_sizes=10, noise=4
    )
    ledger = Ledger(run)
    for round in range(1, 9):
        ledger.record(round, [0, 1, 2])
    said = state([Part(run, 8, ledger)], Facts(draw_given=True))
    assert said.epsilon == said.towards("server").given > 1.2 * said.towards("server").epsilon


OPENLY = "unprotected-preprocessing"
RELEASE = ("--set", "privacy.release=true")
OVERRULED = ("--set", f'privacy.release=["{OPENLY}"]')


@pytest.fixture
def released(tmp_path):
    """Data that need no protection of their preparation."""
    return trained(tmp_path, *RELEASE, *OVERRULED)


def test_a_release_is_secret_and_nobody_chose_its_draw(tmp_path, released):
    said, _ = released
    assert said.seeded is False
    assert not said.quotes_given and said.epsilon == said.towards("server").epsilon
    assert "tuning" in dict(said.outside)
    assert "unprotected-preprocessing" in dict(said.outside)["allowed"]
    stored = (tmp_path / "run" / "config.toml").read_text()
    assert "secret = true" in stored and "release = [" in stored
    trained(tmp_path, *RELEASE, *OVERRULED, name="other")
    seeds = [
        json.loads((tmp_path / name / "secret.json").read_text())["seed"]
        for name in ("run", "other")
    ]
    assert seeds[0]["seed"] != seeds[1]["seed"] and seeds[0]["origin"] == "system"
    assert "seed" not in tomllib.loads(stored)["plan"]
    # Two releases of one configuration share neither noise nor draw: their epsilons add.
    together = stated(tmp_path / "run", tmp_path / "other")
    assert together.reason is None and together.epsilon == pytest.approx(2 * said.epsilon)


def test_two_runs_of_one_seed_promise_nothing_together(tmp_path):
    trained(tmp_path)
    trained(tmp_path, "--set", "plan.learning_rate=0.1", name="other")
    together = stated(tmp_path / "run", tmp_path / "other")
    assert together.epsilon is None and "share the seed" in together.reason


@pytest.mark.parametrize(
    ("parts", "options", "words"),
    [
        ({}, [*RELEASE], f"privacy.release = ['{OPENLY}']"),
        ({"privacy": "release = true"}, [], f"privacy.release = ['{OPENLY}']"),
        ({}, [*RELEASE, "--set", "privacy.clip=median"], "privacy.release = ['median-clip']"),
        ({}, [*RELEASE, "--set", "privacy.noise=0"], "protects nobody"),
        ({"plan": "seed = 3"}, [*RELEASE, *OVERRULED], "seed is 3"),
        ({}, ["--set", 'privacy.release=["everything"]'], "everything"),
        ({}, ["--set", "privacy.release=[]"], "privacy.release"),
        ({}, ["--set", "privacy=false", *RELEASE], "privacy"),
    ],
)
def test_what_a_release_refuses(tmp_path, parts, options, words):
    config = written(tmp_path, **parts)
    answer = command("train", config, "--out", tmp_path / "run", *options)
    assert answer.exit_code != 0 and words in str(answer.exception)
    assert type(answer.exception).__module__.startswith("dpscaffold")
    assert not (tmp_path / "run").exists()


def test_a_median_clip_may_be_released_and_promises_nothing(tmp_path):
    said, _ = trained(
        tmp_path, "--set", f'privacy.release=["median-clip", "{OPENLY}"]',
        "--set", "privacy.clip=median",
    )  # fmt: skip
    assert said.guarantee is False and said.epsilon is None and "clip" in said.reason
    assert any("median-clip" in words for code, words in said.outside if code == "allowed")


def test_a_release_from_python_states_what_the_command_does(tmp_path):
    from dpscaffold import Gaussian, Logistic, Plan, fedavg, synthetic, train

    data = synthetic(alpha=2, beta=2, users=12, records=60)
    plan = Plan(rounds=4, local_steps=3, user_ratio=0.25)
    for release, seed, words in (
        (True, None, "release-refused: privacy.release"),
        ([OPENLY], 0, "release-refused: plan.seed is 0"),
    ):
        privacy = Gaussian(noise=4.0, release=release)
        with refuses(words):
            train(data, Logistic(40, 10), fedavg(), plan.changed(seed=seed), privacy, out=tmp_path)
    privacy = Gaussian(noise=4.0, release=[OPENLY])
    result = train(data, Logistic(40, 10), fedavg(), plan, privacy, out=tmp_path / "run")
    said = result.privacy
    assert result.setting.privacy.secret and said.seeded is False
    assert not said.quotes_given and said.epsilon == said.towards("server").epsilon
    assert {"tuning", "allowed"} <= set(dict(said.outside))
    assert result.setting.plan.seed is None
    assert statement_in(tmp_path / "run") == said
    check_told_alike(tmp_path / "run")
