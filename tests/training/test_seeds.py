"""Which seed a run draws from, where it is kept, and what may be said of runs that share one."""

from __future__ import annotations

import json
import random
import shutil
import stat
import tomllib

import pytest
import torch
from refusals import refuses
from stated import call, read, refused, stated, written
from training.test_crashes import Crash, die_after

from dpscaffold import BadInput, Gaussian, Logistic, Plan, fedavg, synthetic, train
from dpscaffold.config import make_run
from dpscaffold.engine import State
from dpscaffold.privacy import Ledger, describe
from dpscaffold.privacy.numbers import round_up
from dpscaffold.runs.ledger import read_account
from dpscaffold.tasks import Mlp

CONFIG = """
[data]
source = "synthetic"
users = 12
records = 30
[plan]
rounds = 4
local_steps = 2
user_ratio = 0.25
checkpoint_every = 2
{plan}
[privacy]
noise = 6.0
{privacy}
"""
SECRET, RELEASE = "secret = true", "release = ['unprotected-preprocessing']"
PLAN = Plan(rounds=4, local_steps=2, user_ratio=0.25, checkpoint_every=2)


@pytest.fixture(scope="module")
def federation():
    return synthetic(users=12, records=30)


def configured(folder, name="run", plan="", privacy=""):
    path = folder / f"{name}.toml"
    path.write_text(CONFIG.format(plan=plan, privacy=privacy))
    return path


def trained(folder, name="run", plan="", privacy=""):
    """A run folder made by the command."""
    config = configured(folder, name, plan, privacy)
    done = call("train", str(config), "--out", str(folder / name), "--quiet")
    assert done.exit_code == 0, done.output
    return folder / name


def from_python(federation, out=None, secret=True, plan=PLAN, release=None, **options):
    privacy = Gaussian(noise=6.0, secret=secret, release=release)
    return train(federation, Logistic(40, 10), fedavg(), plan, privacy, out=out, **options)


def draws(folder):
    """(round, who took part) by the journal."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [(line["round"], tuple(line["users"])) for line in lines if "round" in line]


# --- the rule


@pytest.mark.parametrize("privacy", [SECRET, RELEASE], ids=["secret", "release"])
def test_a_secret_run_without_a_seed_draws_from_the_operating_system(tmp_path, privacy):
    one, other = (trained(tmp_path, name, privacy=privacy) for name in ("a", "b"))
    assert draws(one) != draws(other)
    kept = json.loads((one / "secret.json").read_text())["seed"]
    assert kept["origin"] == "system" and int(kept["seed"]) > 1 << 64
    assert stat.S_IMODE((one / "secret.json").stat().st_mode) == 0o600
    assert "seed" not in tomllib.loads((one / "config.toml").read_text())["plan"]
    texts = [kept["seed"], f"{int(kept['seed']):x}", kept["key"]]
    for path in one.rglob("*"):
        if path.is_file() and path.name != "secret.json":
            content = path.read_bytes()
            assert not [text for text in texts if text.encode() in content], path


def test_epsilon_over_the_draw_is_stated_everywhere_where_nobody_chose_it(tmp_path):
    config = configured(tmp_path, privacy=SECRET)
    text = config.read_text().replace("noise = 6.0", "epsilon = 2.0")
    config.write_text(text)
    said = json.loads(call("train", str(config), "--out", str(tmp_path / "run"), "--json").stdout)
    assert said["final"]["epsilon_server"] == pytest.approx(2, abs=2e-3)
    own = read(said["privacy"])
    assert not own.quotes_given and own.towards("server").theorem == "1"
    assert own.epsilon == own.towards("server").epsilon == pytest.approx(2, abs=2e-3)
    assert stated(config).epsilon == own.epsilon
    for source in (config, tmp_path / "run"):
        assert "2.000" in call("privacy", str(source)).stdout


def test_a_run_without_a_seed_and_without_secret_noise_is_that_of_seed_0(tmp_path, federation):
    plain, given = (trained(tmp_path, n, plan=p) for n, p in (("a", ""), ("b", "seed = 0")))
    assert draws(plain) == draws(given)
    texts = [(folder / "config.toml").read_text() for folder in (plain, given)]
    assert [tomllib.loads(text)["plan"]["seed"] for text in texts] == [0, 0]
    models = [
        from_python(federation, secret=False, plan=plan).params
        for plan in (PLAN, PLAN.changed(seed=0))
    ]
    assert torch.equal(*models)
    other = from_python(federation, secret=False, plan=PLAN.changed(seed=1)).params
    assert not torch.equal(models[0], other)


def test_first_weights_keep_seed_0(federation):
    task = Mlp(40, 10, hidden=5)
    secret = Gaussian(noise=6.0, secret=True)

    def first(seed, privacy=secret):
        plan = PLAN.changed(seed=seed)
        setting = make_run(federation.roster, task, fedavg(), plan, privacy)
        return State.initial(setting, torch.device("cpu")).params

    assert torch.equal(first(None), first(0)) and torch.equal(first(None), first(None, None))
    assert not torch.equal(first(None), first(1))


# --- resume


@pytest.mark.parametrize(
    "options", [{}, {"release": ["unprotected-preprocessing"]}], ids=["secret", "release"]
)
def test_a_resumed_run_draws_from_its_kept_seed(tmp_path, federation, options):
    with pytest.raises(Crash):
        from_python(federation, tmp_path / "run", on_round=die_after(3), **options)
    kept = (tmp_path / "run" / "secret.json").read_bytes()
    from_python(federation, tmp_path / "run", resume=True, **options)
    drawn = draws(tmp_path / "run")
    assert [round for round, _ in drawn] == [1, 2, 3, 3, 4] and drawn[2] == drawn[3]
    assert (tmp_path / "run" / "secret.json").read_bytes() == kept


def test_a_run_whose_seed_is_lost_or_exchanged_is_not_resumed(tmp_path, federation):
    for name in ("run", "other"):
        with pytest.raises(Crash):
            from_python(federation, tmp_path / name, on_round=die_after(3))
    folder = tmp_path / "run"
    seed = folder / "secret.json"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def refusal():
        with pytest.raises(BadInput) as raised:
            from_python(federation, folder, resume=True)
        now = {path.name: path.read_bytes() for path in folder.iterdir()}
        now.pop("secret.json", None)
        assert now == {name: text for name, text in before.items() if name != "secret.json"}
        return str(raised.value)

    seed.unlink()
    assert "without the seed that it draws from" in refusal()
    shutil.copy(tmp_path / "other" / "secret.json", seed)
    assert "on other data" in refusal()  # its key of the data is another too
    seed.write_text("{}")
    assert "does not hold the seed" in refusal()
    seed.write_text("{")
    assert "does not hold the seed" in refusal()


def test_another_seed_is_refused_on_resume(tmp_path, federation):
    with pytest.raises(Crash):
        from_python(federation, tmp_path / "run", on_round=die_after(3))
    with refuses("configuration-changed: plan.seed = None"):
        from_python(federation, tmp_path / "run", plan=PLAN.changed(seed=0), resume=True)


# --- what makes a simulation is bound to the folder


def edits(folder):
    """Changes of one file by which somebody could take a simulation for more."""
    config = folder / "config.toml"
    text = config.read_text()
    config.unlink()
    yield "removed"
    for key in ("secret", "release"):
        config.write_text(text.replace("[privacy]", f"[privacy]\n{key} = true").replace(
            "secret = false", "" if key == "secret" else "secret = false"))  # fmt: skip
        assert tomllib.loads(config.read_text())["privacy"][key] is True
        yield key
    config.write_text(text.replace("[plan]", "[plan]\n# ").replace("seed = 0\nwarm", "warm"))
    yield "without its seed"


def test_no_file_that_can_be_edited_makes_a_simulation_protected(tmp_path):
    folder = trained(tmp_path, plan="seed = 0")
    before = stated(folder)
    assert before.seeded is True
    for how in edits(folder):
        assert stated(folder) == before, how
    (folder / "secret.json").unlink()
    assert stated(folder) == before


def test_a_release_stays_one_without_its_configuration(tmp_path):
    folder = trained(tmp_path, privacy=RELEASE)
    before = stated(folder)
    (folder / "config.toml").unlink()
    assert stated(folder) == before
    allowed = [words for code, words in before.outside if code == "allowed"]
    assert len(allowed) == 1 and "unprotected-preprocessing" in allowed[0]


def test_colluders_are_bound_too(tmp_path):
    folder = trained(tmp_path, privacy=f"{SECRET}\ncolluders = 3")
    (folder / "config.toml").unlink()
    assert "3 sites" in stated(folder).towards("participant").words


def test_the_journal_tells_no_seed(tmp_path, federation):
    """Whoever has the journal cannot find a small seed by trying: the mark is under a key."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        from_python(federation, folder, secret=False, plan=PLAN.changed(seed=7))
    marks = [read_account(folder).drawn.mark for folder in folders]
    assert marks[0] != marks[1] and None not in marks


# --- several runs


def test_configurations_without_a_seed(tmp_path):
    """Without secret noise both are of seed 0; with it, each run will draw from a seed of its
    own."""
    plain = [str(configured(tmp_path, name)) for name in ("a", "b")]
    said = stated(*plain, "--fixed-in-advance")
    assert said.towards("server").epsilon is None and "share the seed 0" in said.reason
    assert said.seeded is True
    secret = [str(configured(tmp_path, name, privacy=SECRET)) for name in ("a", "b")]
    said = stated(*secret)
    assert said.epsilon == pytest.approx(2 * stated(secret[0]).epsilon) and not said.quotes_given
    given = [str(configured(tmp_path, n, "seed = 0", SECRET)) for n in ("a", "b")]
    assert stated(*given).towards("server").epsilon is None
    given[1] = str(configured(tmp_path, "b", "seed = 1", SECRET))
    assert "draw" in dict(stated(*given).needs)


def test_a_folder_without_its_seed_counts_as_shared(tmp_path, federation):
    folders = [tmp_path / name for name in ("a", "b", "c", "d")]
    for folder, seed in zip(folders, (3, 4, None, None), strict=True):
        from_python(federation, folder, plan=PLAN.changed(seed=seed))
    names = [str(folder) for folder in folders]
    assert stated(*names[:2]).towards("server").epsilon > 0
    for folder in folders[1:]:
        (folder / "secret.json").unlink()
    said = stated(*names[:2])
    assert said.towards("server").epsilon is None and said.quotes_given
    assert said.towards("server").given > 0
    # Seeds of the operating system differ unless one folder is a copy of the other.
    assert stated(*names[2:]).towards("server").epsilon > 0


@pytest.mark.parametrize("advance", [(), ("--fixed-in-advance",)], ids=["added", "convolved"])
def test_runs_whose_seeds_were_given_quote_epsilon_given_the_draw(tmp_path, federation, advance):
    """Together as each of them alone does: over the draw is a smaller number."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder, seed in zip(folders, (3, 4), strict=True):
        from_python(federation, folder, plan=PLAN.changed(seed=seed))
    names = [str(folder) for folder in folders]
    said = stated(*names, *advance)
    server = said.towards("server")
    assert said.quotes_given and said.epsilon == server.given > server.epsilon
    rows = [line for line in call("privacy", *names, *advance).stdout.splitlines() if "|" in line]
    assert any(round_up(server.given) in row for row in rows)
    assert not any(round_up(server.epsilon) in row for row in rows)
    # Where nobody chose a draw, over the draw is right.
    for name in ("c", "d"):
        from_python(federation, tmp_path / name)
    both = [str(tmp_path / "c"), str(tmp_path / "d")]
    assert not stated(*both, *advance).quotes_given
    assert stated(names[0], both[0], *advance).quotes_given


@pytest.mark.parametrize("advance", [(), ("--fixed-in-advance",)], ids=["added", "convolved"])
def test_copies_of_one_run_that_both_went_on(tmp_path, federation, advance):
    """They draw the same users: only what was spent given who took part adds up."""
    with pytest.raises(Crash):
        from_python(federation, tmp_path / "a", on_round=die_after(2))
    for name in ("b", "c"):
        shutil.copytree(tmp_path / "a", tmp_path / name)
    for name in ("a", "b"):
        from_python(federation, tmp_path / name, resume=True)
    assert draws(tmp_path / "a") == draws(tmp_path / "b")
    said = stated(tmp_path / "a", tmp_path / "b", *advance)
    assert said.towards("server").epsilon is None
    alone = stated(tmp_path / "a").towards("server").given
    assert alone < said.towards("server").given <= 2 * alone * (1 + 1e-9)
    assert said.quotes_given and said.epsilon == said.towards("server").given
    # A copy that did not go on has released nothing that is not in the other's ledger.
    for names in (("a", "c"), ("c", "b")):
        words = refused("privacy", *(str(tmp_path / name) for name in names), *advance)
        assert f"{tmp_path / 'c'} is a copy of" in words and words.endswith("c out")


def last_progress_line(folder, name, **keys):
    """What the last line of progress says of a run, and what its statement quotes."""
    config = configured(folder, name, **keys)
    done = call("train", str(config), "--out", str(folder / name))
    assert done.exit_code == 0, done.output
    line = next(line for line in done.stderr.splitlines() if "round 4/4" in line)
    return line, written(folder / name)


def test_progress_shows_the_epsilon_that_is_quoted_at_the_end(tmp_path):
    line, said = last_progress_line(tmp_path, "given", plan="seed = 3", privacy=SECRET)
    assert said.epsilon > 1.2 * said.towards("server").epsilon
    assert f"ε(everybody) ≤ {round_up(said.epsilon)}" in line and "server" not in line
    for name, keys in (("own", {"privacy": SECRET}), ("simulated", {"plan": "seed = 3"})):
        line, said = last_progress_line(tmp_path, name, **keys)
        assert said.epsilon == said.towards("server").epsilon
        assert f"ε(server) ≤ {round_up(said.epsilon)}" in line


def test_progress_of_a_longer_run_adds_up_what_everybody_spent(tmp_path, federation):
    plan = PLAN.changed(seed=3)
    from_python(federation, tmp_path / "r", plan=plan)
    longer = from_python(federation, tmp_path / "r", plan=plan.changed(rounds=7), resume=True)
    assert longer.privacy.quotes_given and len(longer.privacy.parts) == 2
    assert longer.final["epsilon_everybody"] == longer.privacy.epsilon


def test_epsilon_given_who_took_part_is_never_shown_too_small(tmp_path):
    """And it is computed for few of many numbers of participations."""
    run = describe(rounds=300, local_steps=2, users=6, cohort_size=3, records=[40, 50] * 3,
                   batch_sizes=[8] * 6, noise=9.0)  # fmt: skip
    ledger, rng, shown = Ledger(run), random.Random(0), set()
    for round in range(1, 301):
        ledger.record(round, rng.sample(range(6), 3))
        shown.add(ledger.shown())
        assert ledger.largest() <= ledger.shown() <= 1.1 * ledger.largest()
    assert len(shown) < 60
