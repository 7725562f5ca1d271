"""``dpscaffold privacy`` and ``dpscaffold calibrate``, end to end."""

from __future__ import annotations

import hashlib
import json

import pytest
from privacy.settings import SMALL, run_of
from typer.testing import CliRunner

from dpscaffold.cli import app
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Cost, Ledger, PrivacyError, describe
from dpscaffold.runs.journal import Journal
from dpscaffold.runs.ledger import LedgerSummary, Opening
from dpscaffold.setting.seeds import Seed

OPTIONS = (
    "--users 100 --records 4000 --rounds 400 --local-steps 50 --user-ratio 0.2 --data-ratio "
    "0.2 --noise 60 --delta 2.5e-6"
)
SYNTHETIC = OPTIONS.split()


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def answer(*arguments: str):
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    """The sentence of the error; the program's entry prints it and exits with status 2."""
    result = call(*arguments)
    assert isinstance(result.exception, PrivacyError | BadInput), result.output
    message = str(result.exception)
    assert "\n" not in message
    return message


def without(options: list[str], name: str) -> list[str]:
    place = options.index(name)
    return options[:place] + options[place + 2 :]


def test_privacy_as_json():
    said = answer("privacy", *SYNTHETIC)
    assert said["delta"] == 2.5e-6
    assert said["server"]["epsilon"] == pytest.approx(0.860, rel=0.01)
    assert said["server"]["bound"] == "random_participation"
    assert said["third_party"]["epsilon"] == said["server"]["epsilon"]
    assert said["paper_third_party"]["epsilon"] == pytest.approx(12.906, rel=0.005)
    assert {row["name"] for row in said["bounds"]} >= {
        "random_participation",
        "random_participation_rdp",
        "ledger",
    }


def test_privacy_options_reach_the_account():
    assert answer("privacy", *SYNTHETIC, "--sampling", "poisson")["server"][
        "epsilon"
    ] == pytest.approx(0.404, rel=0.01)
    assert answer("privacy", *SYNTHETIC, "--delta", "1e-7")["delta"] == 1e-7
    assert (
        "whole dataset" in answer("privacy", *SYNTHETIC, "--unit", "user")["server"]["neighbours"]
    )
    one_step = [*without(SYNTHETIC, "--local-steps"), "--local-steps", "1"]
    assert (
        answer("privacy", *one_step, "--algorithm", "fedavg")["third_party"]["bound"] == "aggregate"
    )
    assert (
        answer("privacy", *one_step, "--algorithm", "scaffold")["third_party"]["bound"]
        == "random_participation"
    )


def test_privacy_as_a_table():
    result = call("privacy", *SYNTHETIC)
    assert result.exit_code == 0
    for words in (
        "0.861",
        "random_participation ← quote",
        "replace-one",
        "12.907",
        "outside the guarantee",
        "2.5e-06",
    ):
        assert words in result.stdout


def test_calibrate_noise_and_rounds():
    plan = without(SYNTHETIC, "--noise")
    found = answer("calibrate", "--epsilon", "1", *plan)
    assert 0.99 <= found["epsilon"] <= 1.0 and found["bound"] == "random_participation"
    back = answer("privacy", *plan, "--noise", str(found["noise"]))
    assert back["server"]["epsilon"] == pytest.approx(found["epsilon"])
    rounds = answer(
        "calibrate", "--epsilon", "1", "--solve", "rounds", *without(SYNTHETIC, "--rounds")
    )
    assert rounds["rounds"] > 400 and rounds["epsilon"] <= 1.0
    shown = call("calibrate", "--epsilon", "1", *plan)
    assert f"noise = {found['noise']:g}" in shown.stdout


def test_calibrate_the_published_rounds():
    options = [
        *without(SYNTHETIC, "--rounds"),
        "--user-ratio",
        "0.05",
        "--local-steps",
        "5",
        "--noise",
        "10",
    ]
    found = answer(
        "calibrate", "--epsilon", "3", "--view", "paper-third-party", "--solve", "rounds", *options
    )
    assert found["rounds"] == 488


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([*without(SYNTHETIC, "--noise"), "--noise", "0"], "epsilon is infinite"),
        ([*SYNTHETIC, "--delta", "0"], "delta is 0.0"),
        ([*SYNTHETIC, "--delta", "1.5"], "delta is 1.5"),
        ([*without(SYNTHETIC, "--user-ratio"), "--user-ratio", "1.5"], "--user-ratio is 1.5"),
        (
            [*without(SYNTHETIC, "--user-ratio"), "--user-ratio", "0.001"],
            "selects none of 100 users",
        ),
        ([*without(SYNTHETIC, "--data-ratio"), "--data-ratio", "-1"], "--data-ratio is -1.0"),
        ([*without(SYNTHETIC, "--records"), "--records", "2"], "a batch of 0"),
        ([*without(SYNTHETIC, "--rounds"), "--rounds", "0"], "rounds=0"),
        ([*SYNTHETIC, "--sampling", "shuffled"], "--sampling is 'shuffled'"),
        ([*SYNTHETIC, "--unit", "group"], "--unit is 'group'"),
        ([*SYNTHETIC, "--algorithm", "adam"], "--algorithm is 'adam'"),
        ([*SYNTHETIC, "--max-participations", "0"], "max_participations=0"),
        (without(SYNTHETIC, "--records"), "missing --records"),
        ([*without(SYNTHETIC, "--noise"), "--noise", "nan"], "--noise is nan"),
    ],
)
def test_bad_input_is_one_sentence(options, words):
    assert words in refused("privacy", *options)


def test_bad_calibrations_are_one_sentence():
    plan = without(SYNTHETIC, "--noise")
    assert "missing --epsilon" in refused("calibrate", *plan)
    assert "epsilon is -1" in refused("calibrate", "--epsilon", "-1", *plan)
    assert "--solve is 'clip'" in refused("calibrate", "--epsilon", "1", "--solve", "clip", *plan)
    assert "view='anyone'" in refused("calibrate", "--epsilon", "1", "--view", "anyone", *plan)
    low = [*without(plan, "--rounds"), "--noise", "0.5"]
    assert "even at one round" in refused(
        "calibrate", "--epsilon", "0.001", "--solve", "rounds", *low
    )


COSTS = [{"name": "a private mean", "noise": 6.0, "epsilon": None, "delta": 0.0}]


def write_ledger(folder, rounds: int = 4) -> Ledger:
    """The ledger of a run folder, as a run writes it."""
    ledger, journal = Ledger(run_of(SMALL)), Journal(folder / "ledger.jsonl")
    seed, costs = Seed.of(None, secret=True), [Cost(**cost) for cost in COSTS]
    opening = Opening.of(ledger.to_dict(), costs, "data", seed, secret=True)
    journal.append({"opens": vars(opening)})
    (folder / "ledger.json").write_text(LedgerSummary(ledger.to_dict()).text(journal.anchor))
    write_costs(folder)
    for round in range(1, rounds + 1):
        ledger.record(round, [0, round])
        journal.append({"round": round, "users": [0, round], "again": False})
    return ledger


def write_costs(folder) -> None:
    said = {"steps": [{"sentence": "Rows were scaled.", "protection": "unprotected"}]}
    said["costs"] = COSTS
    (folder / "preprocessing.json").write_text(json.dumps(said))


def test_a_run_folder(tmp_path):
    ledger = write_ledger(tmp_path)
    said = answer("privacy", str(tmp_path))
    charged = ledger.charged([Cost(**COSTS[0])])
    assert said["rounds"] == 4 and said["ledger"]["epsilon"] == charged.of(0) > ledger.of(0)
    assert said["server"]["ledger"] == charged.of(0)
    assert (
        said["server"]["epsilon"] > said["server"]["training_alone"]
        and "Rows were scaled." in said["outside"]
    )
    assert (
        answer("privacy", str(tmp_path), "--delta", "1e-3")["server"]["epsilon"]
        < said["server"]["epsilon"]
    )
    assert said["journal"]["lines"] == 5


@pytest.mark.parametrize("lacks", ["journal", "version", "opening", "steps"])
def test_a_folder_of_another_version_is_refused(tmp_path, lacks):
    """A ledger that is not fully understood states nothing: what it leaves out may be an ε."""
    ledger = write_ledger(tmp_path)
    summary = json.loads((tmp_path / "ledger.json").read_text())
    if lacks == "journal":
        del summary["journal"]
    elif lacks == "version":
        body = {k: v for k, v in ledger.to_dict().items() if k != "checksum"} | {"version": 1}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        body["checksum"] = hashlib.sha256(text.encode()).hexdigest()
        summary = body | {"journal": summary["journal"]}
    elif lacks == "opening":
        lines = list(Journal(tmp_path / "ledger.jsonl").lines())
        lines[0]["opens"] = {key: lines[0]["opens"][key] for key in ("run", "costs", "data")}
        (tmp_path / "ledger.jsonl").unlink()
        journal = Journal(tmp_path / "ledger.jsonl")
        for line in lines:
            journal.append(line)
        summary["journal"] = vars(journal.anchor)
    else:
        said = {"sentences": ["Rows were scaled."], "costs": COSTS}
        (tmp_path / "preprocessing.json").write_text(json.dumps(said))
    (tmp_path / "ledger.json").write_text(json.dumps(summary))
    remedies = {"journal": "restore it", "version": "has version 1", "opening": "does not begin"}
    assert remedies.get(lacks, "cost of preprocessing is unknown") in refused(
        "privacy", str(tmp_path)
    )


def test_a_journal_that_records_less_than_its_summary_counts(tmp_path):
    """Even where the summary names the head of the shortened journal."""
    write_ledger(tmp_path, rounds=3)
    more = Ledger(run_of(SMALL))
    for round in range(1, 5):
        more.record(round, [0, round])
    head = Journal(tmp_path / "ledger.jsonl").anchor
    (tmp_path / "ledger.json").write_text(LedgerSummary(more.to_dict()).text(head))
    assert "records less than ledger.json counts" in refused("privacy", str(tmp_path))


def test_preparation_that_is_not_the_run_s_own(tmp_path):
    """Costs struck from the folder would lower ε; the journal's opening holds their hash."""
    write_ledger(tmp_path)
    said = {"steps": [], "costs": []}
    (tmp_path / "preprocessing.json").write_text(json.dumps(said))
    assert "not the one this run began with" in refused("privacy", str(tmp_path))


def test_a_folder_without_a_ledger_or_with_a_damaged_one(tmp_path):
    assert "no ledger" in refused("privacy", str(tmp_path))
    write_ledger(tmp_path)
    text = (tmp_path / "ledger.json").read_text()
    for broken in (text[:-30], text.replace('"noise": 2.0', '"noise": 9.0'), "[]"):
        assert broken != text
        (tmp_path / "ledger.json").write_text(broken)
        assert "damaged" in refused("privacy", str(tmp_path))


def test_numbers_and_a_folder_are_not_mixed(tmp_path):
    write_ledger(tmp_path)
    assert "--noise is given, and" in refused("privacy", str(tmp_path), "--noise", "3")


def test_a_missing_source():
    assert "does not exist" in refused("privacy", "nowhere.toml")


def test_a_configuration(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(
        "[data]\nsource = 'synthetic'\nusers = 10\nrecords = 100\n"
        "[plan]\nrounds = 30\nlocal_steps = 4\nuser_ratio = 0.2\ndata_ratio = "
        "0.25\n[privacy]\nnoise = 5.0\n"
    )
    said = answer("privacy", str(config))
    run = describe(
        rounds=30,
        local_steps=4,
        users=10,
        cohort_size=2,
        records=said["run"]["groups"][0]["records"],
        batch_sizes=said["run"]["groups"][0]["batch"],
        noise=5.0,
    )
    assert said["run"]["rounds"] == 30 and said["run"]["cohort_size"] == 2
    assert said["run"]["groups"][0]["batch"] == said["run"]["groups"][0]["records"] // 4
    assert said["server"]["epsilon"] > 0 and run.delta == pytest.approx(said["delta"])


PLANNED = "--users 40 --records 50 --rounds 10 --user-ratio 0.2 --data-ratio 0.2 --delta 1e-4"
MEMORYLESS = [*PLANNED.split(), "--algorithm", "fedavg"]


def test_what_is_calibrated_is_what_is_stated():
    """A user as unit, towards a third party: no run hides who took part, so no plan may either."""
    options = [*MEMORYLESS, "--unit", "user", "--local-steps", "3"]
    found = answer("calibrate", *options, "--epsilon", "1", "--view", "third-party")
    assert found["bound"] == "random_participation"
    said = answer("privacy", *options, "--noise", str(found["noise"]))
    assert said["third_party"]["bound"] == found["bound"]
    assert said["third_party"]["epsilon"] == found["epsilon"] <= 1.0


def test_participants_on_the_command_line():
    options = [*MEMORYLESS, "--local-steps", "1"]
    found = answer(
        "calibrate", *options, "--epsilon", "1", "--view", "participant", "--colluders", "4"
    )
    assert found["bound"] == "aggregate_participant" and found["view"] == "participant"
    options += ["--noise", str(found["noise"])]
    said = answer("privacy", *options, "--colluders", "4")
    assert said["participant"]["epsilon"] == found["epsilon"] and found["epsilon"] <= 1.0
    assert said["third_party"]["epsilon"] < said["participant"]["epsilon"]
    shown = call("privacy", *options, "--view", "participant", "--colluders", "9").stdout
    assert "aggregate_participant ←" not in shown and "random_participation ← quote" in shown
    rows = [line.split()[0] for line in shown.splitlines() if " ← " in line or "cap" in line]
    assert set(rows) == {"participant"}
    assert "--view is 'nobody'" in refused("privacy", *options, "--view", "nobody")
    assert "colluders=0 " in refused("privacy", *options, "--colluders", "0")
    assert "colluders=40 " in refused("privacy", *options, "--colluders", "40")
