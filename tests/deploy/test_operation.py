"""Commands of a site and a server, their files, and what is said of wrong ones."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from deploy.world import OFFERED, TABLE, new_site
from refusals import refuses
from stated import at_most
from typer.testing import CliRunner

from dpscaffold import Gaussian
from dpscaffold.cli import app
from dpscaffold.deployment.protocol.agreement import SchemaSettings
from dpscaffold.deployment.server.config import load_served
from dpscaffold.deployment.site.file import SiteGrant, Terms
from dpscaffold.deployment.site.ledger import GrantedRun, SiteLedger
from dpscaffold.deployment.site.operation import ledger_of
from dpscaffold.deployment.site.reading import check_data_table, read_records
from dpscaffold.deployment.transports import flower
from dpscaffold.errors import BadInput
from dpscaffold.privacy import describe

flower.require()

PLAN = f"""
[schema]
features = 3
classes = 2
{OFFERED}"""


@pytest.fixture
def site(tmp_path):
    path = new_site(tmp_path, 'source = "npz"\npath = "data.npz"', {"epsilon": "9.0"})
    stream = np.random.default_rng(0)
    np.savez(
        path.parent / "data.npz",
        features=stream.standard_normal((50, 3)).astype(np.float32),
        labels=stream.integers(0, 2, 50),
    )
    return path


def said(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def plan(tmp_path, text=PLAN):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return path


def test_check_judges_a_plan_and_touches_no_ledger(site, tmp_path):
    result = said("site", "check", site, "--offline", "--offer", plan(tmp_path))
    assert result.exit_code == 0, result.output
    assert "would be accepted: at most 7 participations" in result.output
    assert not (site.parent / "state" / "ledger.jsonl").exists()
    weak = said("site", "check", site, "--offline", "--offer",
                plan(tmp_path, PLAN.replace("20.0", "1.0")))  # fmt: skip
    assert weak.exit_code == 1 and "policy-epsilon" in weak.output
    told = json.loads(said("site", "check", site, "--offline", "--json").output)
    assert told and all(entry["ok"] for entry in told)
    away = said("site", "check", site)
    assert away.exit_code == 1 and "cannot be reached" in away.output


def test_check_names_what_is_wrong(site):
    (site.parent / "site.key").chmod(0o644)
    result = said("site", "check", site, "--offline")
    assert result.exit_code == 1 and "can be read by others" in result.output
    (site.parent / "data.npz").unlink()
    assert "which is not a file" in said("site", "check", site, "--offline").output


def test_the_ledger_quotes_the_cap(site):
    state = site.parent / "state"
    state.mkdir()
    ledger = SiteLedger(state / "ledger.jsonl", "north")
    mechanism = Gaussian(1.0, 20.0, "fixed", "record", True)
    terms = Terms(5, 4, 1.0, 0.2, "uniform", "scaffold", "logistic", 8, mechanism)
    run = terms.run(50, 10, 1e-7)
    account = {
        "records": 50,
        "batch": 10,
        "declared": False,
        "terms": {
            key: value for key, value in vars(terms).items() if key not in ("mechanism", "sums")
        },
        "mechanism": mechanism.step.stored(),
    }
    ledger.reserve(GrantedRun("ab" * 16, "plan", SiteGrant(7, 0.8, 1e-7), account))
    ledger.begin("ab" * 16, "fixed")
    for number in (1, 2, 3):
        ledger.participate("ab" * 16, number)
    shown = ledger_of(site)
    assert shown["runs"][0]["epsilon_spent"] == pytest.approx(at_most(run, 3), rel=1e-9)
    assert shown["runs"][0]["left"] == 4 and "replace-one" in shown["runs"][0]["neighbours"]
    assert shown["epsilon_left"] == pytest.approx(9.0 - 0.8)
    text = said("site", "ledger", site)
    assert text.exit_code == 0 and "3 of 7 participations" in text.output
    assert json.loads(said("site", "ledger", site, "--json").output) == shown
    assert "not behind" in said("site", "recover", site, "--yes").output
    assert json.loads(said("site", "status", site, "--json").output)["online"] is False


def test_releases_outside_runs_stay_in_the_ledger(site):
    """A ledger may hold what a site let out by itself: steps of its own, or noised numbers."""
    state = site.parent / "state"
    state.mkdir()
    ledger = SiteLedger(state / "ledger.jsonl", "north")
    mechanism = Gaussian(1.0, 20.0, "fixed", "record", True)
    for run, made, algorithm, epsilon in (
        ("ab" * 16, mechanism, "fine-tune", 2.0),
        ("cd" * 16, None, "evaluation", 1.5),
    ):
        terms = Terms(1, 4, 1.0, 1.0, "uniform", algorithm, "logistic", 8, made)
        granted = SiteGrant(1, epsilon, 1e-7 if made else 0.0)
        ledger.reserve(GrantedRun(run, run, granted, terms.to_dict(50, 50, False)))
        ledger.begin(run, run)
        ledger.participate(run, 1)
    shown = ledger_of(site)
    assert shown["epsilon_left"] == pytest.approx(9.0 - 3.5)
    assert shown["participations"] == 2 and shown["runs_left"] == 8
    assert shown["runs"][1]["epsilon_spent"] == 1.5
    assert "ε spent 1.5" in said("site", "ledger", site).output


def test_bad_input_is_one_sentence(site, tmp_path):
    from dpscaffold.cli import main  # noqa: F401  (the sentences are printed there)

    for arguments, words in (
        (["site", "start", tmp_path / "none.toml"], "cannot be read"),
        (["site", "init", site], "not an invitation"),
        (["server", "run", plan(tmp_path), "--out", tmp_path / "r", "--server", tmp_path / "x"],
         "no server folder"),
        (["server", "run", plan(tmp_path), "--out", tmp_path / "r", "--server",
          tmp_path / "fed" / "server"], "no site is left"),
        (["server", "admit", site, "--server", tmp_path / "fed" / "server"], "public file"),
        (["server", "remove", "x", "--server", tmp_path / "fed" / "server"], "no site 'x'"),
        (["server", "status", tmp_path], "no deployed run"),
        (["server", "start", "--server", tmp_path / "fed" / "server", "--insecure", "--public",
          "0.0.0.0:18443"], "loopback only"),
    ):  # fmt: skip
        result = said(*arguments)
        assert isinstance(result.exception, BadInput), (arguments, result.output, result.exception)
        assert words in str(result.exception)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[schema]", "[data]", "server-with-data"),
        ("[schema]\nfeatures = 3\nclasses = 2\n", "", "missing-key"),
        ("classes = 2", "classes = 1", "too-few-classes: schema.classes is 1"),
        ("classes = 2", "klasses = 2", "unknown-key: 'classes'"),
        ("noise = 20.0", "epsilon = 1.0", "epsilon-without-sizes: deploy.records"),
        (
            "noise = 20.0",
            "noise = 20.0\n[deploy]\nrecords = { a = 0 }",
            "out-of-range: deploy.records.a is 0",
        ),
        ("rounds = 5", "rounds = 0", "out-of-range: plan.rounds is 0"),
        ("noise = 20.0", "noise = 20.0\n[deploy]\nquorum = 0", "out-of-range: deploy.quorum is 0"),
        ("noise = 20.0", "noise = 20.0\n[deploy]\naddress = 'here'", "bad-address"),
        ("noise = 20.0", "noise = 20.0\n[deploi]", "unknown-key"),
    ],
)
def test_a_wrong_plan_is_one_sentence(tmp_path, old, new, words):
    assert old in PLAN
    with refuses(words):
        load_served(plan(tmp_path, PLAN.replace(old, new, 1))).offer()


SIZES = "[deploy]\nrecords = { north = 90, east = 60, south = 200 }\n"


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_an_epsilon_is_solved_for_the_sites_public_sizes(tmp_path, sampling):
    """The noise is the smallest that keeps ε by direct accounting of the offered run."""
    text = PLAN.replace("noise = 20.0", f'epsilon = 2.0\ndelta = 1e-5\nsampling = "{sampling}"')
    settings = load_served(plan(tmp_path, text + SIZES))
    offer = settings.offer()
    run = describe(
        rounds=5,
        local_steps=4,
        users=3,
        cohort_size=3,
        records=(90, 60, 200),
        batch_sizes=(18, 12, 40),
        noise=offer.privacy.noise,
        clip=1.0,
        sampling=sampling,
        delta=1e-5,
        declared_sizes=sampling == "poisson",
    )
    assert 1.99 < at_most(run, 5) <= 2.0
    written = settings.resolved()["privacy"]
    assert written["noise"] == offer.privacy.noise and "epsilon" not in written


def test_sizes_are_not_named_where_a_user_is_the_unit(tmp_path):
    """Only who takes part: the noise that is solved for depends on nothing else."""
    text = PLAN.replace("noise = 20.0", 'epsilon = 2.0\ndelta = 1e-5\nunit = "user"')
    with refuses("records-hidden"):
        load_served(plan(tmp_path, text + SIZES)).offer()
    named = "[deploy]\nrecords = { north = 1, east = 1, south = 1 }\n"
    offer = load_served(plan(tmp_path, text + named)).offer()
    run = describe(
        rounds=5,
        local_steps=4,
        users=3,
        cohort_size=3,
        records=5,
        batch_sizes=1,
        noise=offer.privacy.noise,
        unit="user",
        delta=1e-5,
    )
    assert 1.99 < at_most(run, 5) <= 2.0


def test_a_test_file_with_a_broken_line_is_refused(tmp_path):
    """The server's own file: it is said with its line."""
    table = '[evaluate]\nsource = "csv"\npath = "test.csv"\n'
    schema = 'features = ["a", "b", "c"]\nlabel = "y"\nclasses = ["0", "1"]\n'
    text = PLAN.replace("features = 3\nclasses = 2\n", schema) + table
    settings = load_served(plan(tmp_path, text))
    (tmp_path / "test.csv").write_text("a,b,c,y\n1,2,3,1\n4,5,6,0\n")
    assert settings.scorer(tmp_path) is not None
    for wrong, words in (
        ("1,2,3,1\n4,5\n", "bad-evaluation-file: line 3"),
        ("1,x,3,1\n", "bad-evaluation-file: 'b'"),
        ("", "bad-evaluation-file"),
    ):
        (tmp_path / "test.csv").write_text("a,b,c,y\n" + wrong)
        with refuses(words):
            settings.scorer(tmp_path)


def test_noise_is_secret_unless_it_is_a_rehearsal(tmp_path):
    settings = load_served(plan(tmp_path))
    assert settings.offer().privacy.secret is True
    assert settings.resolved()["privacy"]["secret"] is True
    rehearsal = load_served(plan(tmp_path), ["privacy.secret=false"])
    assert rehearsal.offer().privacy.secret is False


# --- reading a site's table by the offer's schema


def written(tmp_path, text):
    (tmp_path / "d.csv").write_text(text)
    return {"source": "csv", "path": "d.csv"}


def test_a_table_is_read_by_the_schema(tmp_path):
    table = written(tmp_path, "id,sex,ill,age,bmi\n1,f,no,31,20.5\n2,m,yes,58,30\n")
    records = read_records(table, tmp_path, TABLE)
    assert records.features.tolist() == [[31, 20.5, 1, 0], [58, 30, 0, 1]]
    assert records.labels.tolist() == [0, 1]


def test_what_is_missing_is_filled_and_what_cannot_be_read_contributes_nothing(tmp_path):
    """data-unfit is decided by columns: whatever a record holds, it counts."""
    strange = (
        "id,sex,ill,age,bmi\n1,x,yes,,NA\n2,m,maybe,31,20\n3,m,,31,20\n4,m,yes,old,20\n"
        "5,m,yes,inf,20\n6,m,yes,1e400,20\n7,,no, 50 ,-5\n"
    )
    records = read_records(written(tmp_path, strange), tmp_path, TABLE)
    assert records.used.tolist() == [True, *[False] * 5, True]
    assert records.features[records.used].tolist() == [[-1, -1, 0, 0], [50, -5, 0, 0]]
    assert not records.features[~records.used].any() and records.labels.tolist() == [1, *[0] * 6]
    assert [said for said, fine in records.notes if not fine] == [
        "d.csv: 3 records count but contribute nothing, as 'age' is not a number: lines 5, 6, 7",
        "d.csv: 2 records count but contribute nothing, as 'ill' is not a class of the offer: "
        "lines 3, 4",
        "d.csv: 2 of 2 values of 'sex' are not among the offer's categories, and are zero "
        "everywhere",
    ]


def test_columns_decide(tmp_path):
    twice = "sex,ill,age,bmi,age\nf,no,1,2,3\n"
    for text in ("id,sex,ill,age\n1,f,no,3\n", "", "\x00\x01", twice):
        with refuses("data-unfit"):
            read_records(written(tmp_path, text), tmp_path, TABLE)
    assert len(read_records(written(tmp_path, "id,sex,ill,age,bmi\n"), tmp_path, TABLE)) == 0
    np.savez(tmp_path / "d.npz", features=np.zeros((3, 2)), labels=np.zeros(3, int))
    with refuses("data-unfit"):
        read_records({"source": "npz", "path": "d.npz"}, tmp_path, TABLE)


def test_preparation_is_by_public_constants(tmp_path):
    steps = [
        {"step": "standardise", "fit": "public", "mean": [1.0, 1.0], "deviation": [2.0, 0.5]},
        {"step": "unit-norm"},
    ]
    rows = SchemaSettings(features=2, classes=2, prepare=steps)
    np.savez(tmp_path / "d.npz", features=np.float32([[7.0, 3.0]]), labels=np.array([1]))
    records = read_records({"source": "npz", "path": "d.npz"}, tmp_path, rows)
    np.testing.assert_allclose(records.features.numpy(), [[0.6, 0.8]], rtol=1e-6)


def test_a_number_may_be_the_target(tmp_path):
    """Labels are on the scale of the range; one beyond an end counts as the end, and a record
    without one contributes nothing."""
    rows = SchemaSettings(features=("a",), classes=0, label="y", low=-5.0, high=5.0)
    records = read_records(written(tmp_path, "a,y\n1,2.5\n2,\n3,99\n"), tmp_path, rows)
    assert records.labels.tolist() == [0.5, 0.0, 1.0]
    assert records.used.tolist() == [True, False, True]


def test_what_a_site_may_have_as_data(tmp_path):
    for table, words in (
        ({"source": "mnist"}, "unknown-source"),
        ({"source": "csv", "path": "x", "users": 3}, "not-applicable: data.users"),
        ({"source": "csv", "path": "x"}, "file-not-found"),
    ):
        with refuses(words):
            check_data_table(table, tmp_path)


@pytest.mark.parametrize(("typed", "sentence"), [("", "nobody answered"), ("n\n", "was no")])
def test_nothing_is_booked_without_a_yes(site, typed, sentence):
    state = {path: path.read_bytes() for path in site.parent.rglob("*") if path.is_file()}
    result = CliRunner().invoke(app, ["site", "recover", str(site)], input=typed)
    assert isinstance(result.exception, BadInput) and sentence in str(result.exception)
    assert {p: p.read_bytes() for p in site.parent.rglob("*") if p.is_file()} == state


# --- what the check of a site finds


def test_files_that_others_can_use_fail_the_check(site):
    """Modes count where other users can reach the file through all its folders."""
    from dpscaffold.deployment.provision import open_to_others

    state = site.parent / "state"
    state.mkdir(mode=0o700)
    loose = {site: 0o666, site.parent / "data.npz": 0o644, state: 0o755}
    for path, mode in loose.items():
        path.chmod(mode)
    result = said("site", "check", site, "--offline")
    reachable = all(parent.stat().st_mode & 0o001 for parent in site.resolve().parents)
    assert (result.exit_code == 1) == reachable
    with pytest.MonkeyPatch.context() as patch:  # every folder above lets others in
        patch.setattr(
            "dpscaffold.deployment.transports.flower.operation.open_to_others",
            lambda path, bits: bool(path.stat().st_mode & bits),
        )
        result = said("site", "check", site, "--offline")
        assert result.exit_code == 1
        for words in ("the policy can be changed", "the data can be read", "the state folder"):
            assert f"FAIL {words}" in result.output
        for path in loose:
            path.chmod(0o700)
        assert said("site", "check", site, "--offline").exit_code == 0
    assert not open_to_others(site, 0o077)


def test_open_to_others_looks_at_all_folders(tmp_path, monkeypatch):
    from dpscaffold.deployment.provision import open_to_others

    inner = tmp_path / "inner"
    inner.mkdir()
    path = inner / "file"
    path.touch()
    found = type(path).stat
    walls = {tmp_path: 0o40755, inner: 0o40755}
    monkeypatch.setattr(
        type(path),
        "stat",
        lambda self, **more: SimpleNamespace(
            st_mode=walls.get(self, found(self, **more).st_mode if self == path else 0o40755)
        ),
    )
    path.chmod(0o644)
    assert open_to_others(path, 0o006) and not open_to_others(path, 0o022)
    walls[inner] = 0o40700
    assert not open_to_others(path, 0o006)
    walls[inner] = 0o40710
    path.chmod(0o664)
    assert open_to_others(path, 0o022) and not open_to_others(path, 0o006)


PEOPLE = [f'"{30 + k},3",{"WM"[k % 2]},20,{("ja", "nein")[k % 2]}' for k in range(40)]
GERMAN = "\n".join(["age,sex,bmi,ill", *PEOPLE])


def test_a_table_in_other_codes_fails_the_check(tmp_path):
    """Decimal commas, other words for the label and for a category: nothing of it passes."""
    site = new_site(tmp_path, 'source = "csv"\npath = "d.csv"', {"epsilon": "9.0"})
    (site.parent / "d.csv").write_text(GERMAN + "\n")
    schema = """
[schema]
features = ["age", "sex", "bmi"]
categories = { sex = ["f", "m"] }
label = "ill"
classes = ["no", "yes"]
"""
    offer = ("--offline", "--offer", plan(tmp_path, schema + OFFERED))
    result = said("site", "check", site, *offer)
    assert result.exit_code == 1
    assert "'age' is not a number" in result.output and "no record can be read" in result.output
    assert json.loads(said("site", "check", site, *offer, "--json").output)
    right = GERMAN.replace('"', "").replace(",3,", ".3,").replace("ja", "yes").replace("nein", "no")
    (site.parent / "d.csv").write_text(right + "\n")
    result = said("site", "check", site, *offer)
    assert result.exit_code == 1  # of sex, no value is known
    assert "FAIL d.csv: 40 of 40 values of 'sex'" in result.output
    assert "labels (shown to you alone): no 20, yes 20" in result.output
    assert "age (shown to you alone): 30.3 to 69.3" in result.output
    (site.parent / "d.csv").write_text(right.replace("W", "f").replace("M", "m") + "\n")
    assert said("site", "check", site, *offer).exit_code == 0


def test_a_full_disk_does_not_silence_a_site(site, monkeypatch):
    from dpscaffold.deployment.site.file import read_site_file
    from dpscaffold.deployment.transports.flower.operation import logger_of

    def full(*given, **more):
        raise OSError(28, "No space left on device")

    heard = []
    say = logger_of(read_site_file(site), heard.append)
    monkeypatch.setattr("pathlib.Path.open", full)
    say("the server is away")
    assert heard == ["the server is away"]
