"""A simulation says that it is one; a release keeps its promise or is refused."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold.cli import app
from dpscaffold.privacy import Ledger, Statement, describe, statement
from dpscaffold.privacy.showing import round_up
from dpscaffold.report.statement_page import render

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
    """The statement of a run of the command, and its answer."""
    config = written(tmp_path, **parts)
    answer = command("train", config, "--out", tmp_path / name, "--json", *options)
    assert answer.exit_code == 0, answer.output
    return json.loads((tmp_path / name / "privacy.json").read_text()), json.loads(answer.stdout)


def test_a_simulation_says_so_before_anything_else(tmp_path):
    said, answer = trained(tmp_path)
    assert said["simulated"] is answer["simulated"] is answer["privacy"]["simulated"] is True
    assert said["quote"].startswith("A simulation")
    assert "With secret noise each record would be protected" in said["quote"]
    assert "do not add" in said["quote"]
    page = (tmp_path / "run" / "privacy.md").read_text()
    assert page.startswith("# Privacy statement of a simulation\n\n**A simulation")
    shown = command("privacy", tmp_path / "run")
    assert "a simulation" in " ".join(shown.output.split())
    plan = json.loads(command("privacy", tmp_path / "run.toml", "--json").stdout)
    assert plan["simulated"] is True and "would be protected" in plan["quote"]
    # Over the draw first, as calibrated, and the ledger next to it.
    over, given = round_up(said["server"]["epsilon"]), round_up(said["ledger"]["epsilon"])
    assert said["quote"].index(f"= {over} ") < said["quote"].index(f"is {given};")
    assert "over the random draw" in said["quote"]


def visible(html):
    """The text of a page, without its tags."""
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_every_page_of_a_simulation_says_so(tmp_path):
    """The report, the model card, the terms for people, the table of a comparison, all JSON."""
    said, _ = trained(tmp_path)
    assert said["person"].startswith("With secret noise it would hold: even if all but the noise")
    page = (tmp_path / "run" / "privacy.md").read_text()
    assert said["person"] in page and "Even if all but the noise" not in page
    shown = " ".join(command("privacy", tmp_path / "run").output.split())
    assert "With secret noise it would hold: even if" in shown
    assert "Even if all but the noise" not in shown
    answer = command("report", tmp_path / "run", "--out", tmp_path / "report.html")
    assert answer.exit_code == 0, answer.output
    for name in ("report.html", "report.md"):
        text = visible((tmp_path / name).read_text())
        assert "A simulation, whose noise comes from a stored seed." in text
        assert "This run is a simulation" in text and "simulated: " in text
        assert "With secret noise each record would be protected" in text
        assert "With secret noise it would hold: even if all but the noise" in text
        assert "Even if all but the noise" not in text and "record is protected with" not in text
    rows = json.loads(command("compare", tmp_path / "run", "--json").stdout)["runs"]
    assert rows[0]["simulated"] is True
    table = command("compare", tmp_path / "run", "--out", tmp_path / "figure.png").output
    assert "with secret noise; these are simulations" in " ".join(table.split())
    audit = command("audit", tmp_path / "run", "--trials", "100", "--view", "server", "--json")
    assert json.loads(audit.stdout)["simulated"] is True
    trained(tmp_path, "--set", "plan.seed=8", name="other")
    both = command("privacy", tmp_path / "run", tmp_path / "other", "--json")
    assert json.loads(both.stdout)["simulated"] is True


def test_a_given_draw_is_quoted_by_its_ledger_everywhere(tmp_path):
    """Secret noise, and a seed of the draw in the file: over the draw is a smaller number."""
    said, _ = trained(tmp_path, plan="seed = 0", privacy="secret = true")
    spent, over = said["ledger"]["epsilon"], said["server"]["epsilon"]
    assert spent > over
    assert said["quoted"].items() >= {"epsilon": spent, "bound": "ledger"}.items()
    assert said["quoted"]["towards"] == "everybody"
    assert said["person"] == said["human"]["ledger"]["sentence"] != said["human"]["server"]
    rows = json.loads(command("compare", tmp_path / "run", "--json").stdout)["runs"]
    assert rows[0]["epsilon"] == spent and rows[0]["simulated"] is False
    by_delta = said["epsilon_by_delta"]
    assert by_delta[0]["ledger"] == pytest.approx(spent) and by_delta[1]["ledger"] > spent
    command("report", tmp_path / "run", "--out", tmp_path / "report.html")
    text = visible((tmp_path / "report.html").read_text())
    assert f"{round_up(spent)} given who took part, {round_up(over)} over the draw" in text
    table = text[text.index("ε, smaller is stronger") :]
    assert table.index("anybody, given who took part") < table.index("the server")


def test_numbers_alone_are_no_simulation():
    run = describe(
        rounds=4, local_steps=3, users=9, cohort_size=3, records=50, batch_sizes=10, noise=4
    )
    said = statement(run)
    assert said["simulated"] is False and said["quote"].startswith("Each record is protected")


def test_secret_noise_with_a_given_seed_quotes_the_ledger_first(tmp_path):
    said, answer = trained(tmp_path, plan="seed = 0", privacy="secret = true")
    assert said["simulated"] is False and answer["simulated"] is False
    given = round_up(said["ledger"]["epsilon"])
    assert said["quote"].startswith(
        f"Each record is protected with epsilon = {given} towards every"
    )
    assert "given who took part, as the draw came from a given seed" in said["quote"]
    over = round_up(said["server"]["epsilon"])
    assert said["quote"].index(given) < said["quote"].index(f"it would be epsilon = {over}")
    assert f"**{said['quote']}**" in render(Statement.from_json(said))


def test_the_best_seed_of_many_is_below_its_own_ledger():
    """Why the ledger comes first: a seed can be chosen so that a user takes part often."""
    run = describe(
        rounds=8, local_steps=2, users=9, cohort_size=3, records=50, batch_sizes=10, noise=4
    )
    ledger = Ledger(run)
    for round in range(1, 9):
        ledger.record(round, [0, 1, 2])
    said = statement(run, ledger, draw_given=True)
    assert said["ledger"]["epsilon"] > 1.2 * said["server"]["epsilon"]
    assert said["quote"].startswith(f"Each record is protected with epsilon = "
                                    f"{round_up(said['ledger']['epsilon'])} ")  # fmt: skip


OPENLY = "unprotected-preprocessing"
RELEASE = ("--set", "privacy.release=true")
OVERRULED = ("--set", f'privacy.allow=["{OPENLY}"]')


@pytest.fixture
def released(tmp_path):
    """Data that need no protection of their preparation."""
    return trained(tmp_path, *RELEASE, *OVERRULED)


def test_a_release_is_secret_and_nobody_chose_its_draw(tmp_path, released):
    said, _ = released
    assert said["simulated"] is False
    assert said["quote"].startswith("Each record is protected with epsilon = ")
    assert "over the random draw of participants" in said["quote"]
    assert "given seed" not in said["quote"]
    assert any(line.startswith("Tuning: every run on these records") for line in said["outside"])
    assert "Released all the same (privacy.allow: unprotected-preprocessing)." in said["outside"]
    stored = (tmp_path / "run" / "config.toml").read_text()
    assert "secret = true" in stored and "release = true" in stored
    trained(tmp_path, *RELEASE, *OVERRULED, name="other")
    seeds = [json.loads((tmp_path / name / "seed.json").read_text()) for name in ("run", "other")]
    assert seeds[0]["seed"] != seeds[1]["seed"] and seeds[0]["origin"] == "system"
    assert "seed" not in tomllib.loads(stored)["plan"]
    # Two releases of one configuration share neither noise nor draw: their epsilons add.
    together = json.loads(command("privacy", tmp_path / "run", tmp_path / "other", "--json").stdout)
    assert together["reason"] is None and together["epsilon"]["server"] == pytest.approx(
        2 * said["server"]["epsilon"]
    )


def test_two_runs_of_one_seed_promise_nothing_together(tmp_path):
    trained(tmp_path)
    trained(tmp_path, "--set", "plan.learning_rate=0.1", name="other")
    together = json.loads(command("privacy", tmp_path / "run", tmp_path / "other", "--json").stdout)
    assert together["epsilon"]["server"] is None and "share the seed" in together["reason"]


def test_a_release_is_resumed_with_its_own_draw(tmp_path, monkeypatch):
    """Killed after round 3, whose checkpoint is that of round 2, and resumed by its file."""
    from dpscaffold.engines import Simulator

    real = Simulator.gather

    def dies(self, phase, broadcast, draw):
        if broadcast.round == 4:
            raise RuntimeError("killed")
        return real(self, phase, broadcast, draw)

    config = written(tmp_path, privacy="release = true\nallow = ['unprotected-preprocessing']")
    with monkeypatch.context() as patch:
        patch.setattr(Simulator, "gather", dies)
        assert command("train", config, "--out", tmp_path / "run").exit_code != 0
    for source in (config, tmp_path / "run"):
        answer = command("train", source, "--out", tmp_path / "run", "--resume")
        assert answer.exit_code == 0, answer.output
    lines = [json.loads(x) for x in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    taken = [(line["round"], tuple(line["users"])) for line in lines if "round" in line]
    assert [round for round, _ in taken] == [1, 2, 3, 4, 3, 4]
    assert taken[2:4] == taken[4:6]  # the same draw, with fresh noise, counted twice
    said = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert said == json.loads(command("privacy", tmp_path / "run", "--json").stdout)


@pytest.mark.parametrize(
    ("parts", "options", "words"),
    [
        ({}, [*RELEASE], f"privacy.allow = ['{OPENLY}']"),
        ({"privacy": "release = true"}, [], f"privacy.allow = ['{OPENLY}']"),
        ({}, [*RELEASE, "--set", "privacy.clip=median"], "privacy.allow = ['median-clip']"),
        ({}, [*RELEASE, "--set", "privacy.noise=0"], "protects nobody"),
        ({"plan": "seed = 3"}, [*RELEASE, *OVERRULED], "seed is 3"),
        ({}, ["--set", 'privacy.allow=["median-clip"]'], "nothing is released"),
        ({}, [*RELEASE, "--set", 'privacy.allow=["everything"]'], "everything"),
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
        tmp_path, *RELEASE, "--set", f'privacy.allow=["median-clip", "{OPENLY}"]',
        "--set", "privacy.clip=median",
    )  # fmt: skip
    assert said["guarantee"] is False and "no guarantee" in said["quote"].lower()
    assert "Released all the same (privacy.allow: median-clip)." in said["outside"]


def from_python(tmp_path, federation=None, privacy=None, plan=None, **options):
    from dpscaffold import Gaussian, Logistic, Plan, fedavg, synthetic, train

    federation = federation or synthetic(alpha=2, beta=2, users=12, records=60)
    plan = plan or Plan(rounds=4, local_steps=3, user_ratio=0.25, checkpoint_every=2)
    privacy = Gaussian(clip=1.0, noise=4.0) if privacy is None else privacy
    return train(federation, Logistic(40, 10), fedavg(), plan, privacy or None, **options)


OPEN = {"release": True, "allow": ["unprotected-preprocessing"]}


def test_a_release_from_python_states_what_the_command_does(tmp_path):
    result = from_python(tmp_path, out=tmp_path / "run", **OPEN)
    said = result.privacy
    assert result.setting.privacy.secret and said["simulated"] is False
    assert said["quote"].startswith("Each record is protected with epsilon = ")
    assert "over the random draw of participants" in said["quote"]
    assert "given seed" not in said["quote"]
    assert any(line.startswith("Tuning: every run on these records") for line in said["outside"])
    assert "Released all the same (privacy.allow: unprotected-preprocessing)." in said["outside"]
    assert result.setting.plan.seed is None
    shown = json.loads(command("privacy", tmp_path / "run", "--json").stdout)
    assert shown == json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert shown["quote"] == said["quote"]


def test_a_release_from_python_goes_on_with_its_own_draw(tmp_path):
    class Killed(Exception):
        pass

    def dies(round, row):
        if round == 3:
            raise Killed

    with pytest.raises(Killed):
        from_python(tmp_path, out=tmp_path / "run", observer=dies, **OPEN)
    result = from_python(tmp_path, out=tmp_path / "run", resume=True, **OPEN)
    assert result.ended == "completed" and "given seed" not in result.privacy["quote"]
    lines = [json.loads(x) for x in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    taken = [(line["round"], tuple(line["users"])) for line in lines if "round" in line]
    assert [round for round, _ in taken] == [1, 2, 3, 3, 4] and taken[2] == taken[3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"release": True}, "release-refused: privacy.allow"),
        ({"release": True, "allow": ["everything"]}, "unknown-choice: everything"),
        ({"allow": ["median-clip"]}, "not-applicable"),
        ({**OPEN, "privacy": False}, "no-privacy"),
        ({**OPEN, "noise": 0.0}, "release-refused"),
        ({**OPEN, "clip": "median"}, "release-refused: privacy.allow"),
        ({**OPEN, "seed": 3}, "release-refused: plan.seed is 3"),
        ({**OPEN, "seed": 0}, "release-refused: plan.seed is 0"),
    ],
)
def test_what_a_release_from_python_refuses(tmp_path, options, words):
    from dpscaffold import Gaussian, Plan

    options = dict(options)
    mechanism = {"clip": options.pop("clip", 1.0), "noise": options.pop("noise", 4.0)}
    privacy = options.pop("privacy", Gaussian(**mechanism))
    plan = Plan(rounds=4, local_steps=3, user_ratio=0.25, seed=options.pop("seed", None))
    with refuses(words):
        from_python(tmp_path, privacy=privacy, plan=plan, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
