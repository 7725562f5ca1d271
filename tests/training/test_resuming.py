"""A run is resumed as itself or not at all: other data, numbers, engines and ledgers are refused.

Every refusal is one sentence and leaves every byte of the folder as it was.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace

import pytest
import torch
from refusals import refuses
from stated import stated
from typer.testing import CliRunner

from dpscaffold import (
    Gaussian,
    Logistic,
    Plan,
    fedavg,
    fedprox,
    scaffold,
    synthetic,
    train,
)
from dpscaffold.cli import app
from dpscaffold.config.identity import algorithm_identity
from dpscaffold.data.storage import load as load_saved
from dpscaffold.data.storage import save
from dpscaffold.federation import tables as federation_module
from dpscaffold.runs.checkpoint import CHECKPOINT_FORMAT
from dpscaffold.runs.journal import START, digest
from dpscaffold.runs.ledger import Account

PLAN = Plan(rounds=6, local_steps=2, user_ratio=0.25, evaluate_every=2, checkpoint_every=3)
NOISY = Gaussian(clip=1.0, noise=3.0)
LIMITED = NOISY.changed(delta=1e-3, user_epsilon=40.0, view="server")


class Cut(Exception):
    """Stops a run."""


def cut(row):
    if row.round == 5:
        raise Cut


@pytest.fixture(scope="module")
def federation():
    return synthetic(alpha=2, beta=2, users=12, records=60, seed=3)


def contents(folder):
    """Every file but the lock, which names its last holder."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def go(federation, folder, algorithm=None, privacy=NOISY, **options):
    algorithm = algorithm or fedprox(0.1)
    return train(federation, Logistic(40, 10), algorithm, PLAN, privacy, out=folder, **options)


def begin(federation, folder, algorithm=None, privacy=NOISY, **options):
    with pytest.raises(Cut):
        go(federation, folder, algorithm, privacy, on_round=cut, **options)


#: Why a run is not resumed: other records, settings, formats or a damaged ledger.
RESUMED_OTHERWISE = (
    "records-differ|configuration-changed|wrong-version|ledger-behind|ledger-damaged|"
    "ledger-of-another-run|ledger-missing|run-damaged"
)


def refuses_to_resume(sentence, federation, folder, algorithm=None, privacy=NOISY, **options):
    """Resuming raises one sentence and writes nothing."""
    before = contents(folder)
    with refuses(f"{RESUMED_OTHERWISE}: {sentence}") as caught:
        go(federation, folder, algorithm, privacy, resume=True, **options)
    assert "\n" not in str(caught.value)
    assert contents(folder) == before


def with_one_label_changed(federation, part="train"):
    table = getattr(federation, part)
    labels = table.labels.clone()
    labels[-1] = (labels[-1] + 1) % federation.classes
    return replace(federation, **{part: replace(table, labels=labels)})


@pytest.mark.parametrize("privacy", [NOISY, None], ids=["private", "plain"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_one_record_changed_is_other_data(federation, tmp_path, privacy, part):
    begin(federation, tmp_path / "run", privacy=privacy)
    other = with_one_label_changed(federation, part)
    refuses_to_resume("holds a run on other data", other, tmp_path / "run", privacy=privacy)


def test_what_the_digest_of_a_huge_federation_covers(federation, tmp_path, monkeypatch):
    """Beyond the limit: stored checksums, labels, sizes and a sample; it says so."""
    save(federation, tmp_path / "one")
    save(with_one_label_changed(federation), tmp_path / "two")
    features = federation.train.features.clone()
    features[1] += 1.0  # a row that a sample of three does not hold
    moved = replace(federation, train=replace(federation.train, features=features))
    save(moved, tmp_path / "three")
    whole = {load_saved(tmp_path / name).digest().value for name in ("one", "two", "three")}
    monkeypatch.setattr(federation_module, "WHOLE", 0)
    monkeypatch.setattr(federation_module, "SAMPLED_ROWS", 3)
    sampled = {load_saved(tmp_path / name).digest() for name in ("one", "two", "three")}
    assert len(whole) == len(sampled) == 3
    assert all("3 rows of train and of test" in digest.covers for digest in sampled)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert load_saved(tmp_path / "copy").digest() in sampled
    # in memory: always whole
    assert federation.digest().covers == "every record, train and test"


def scaled(by, offset=0.0):
    def direction(gradient, y, broadcast, memory, *, stretch=by):
        return gradient * stretch + offset

    return fedavg().replace(name="scaled", direction=direction)


def looped():
    def direction(gradient, y, broadcast, memory):
        return direction

    return fedavg().replace(name="looped", direction=direction)


def test_numbers_are_found_where_algorithms_keep_them():
    """In defaults, closures, arrays and nested algorithms; a function that holds itself ends."""
    seen = [
        algorithm_identity(algorithm)
        for algorithm in (
            scaled(1.0),
            scaled(2.0),
            scaled(1.0, offset=1.0),
            scaled(1.0, offset=torch.ones(3)),
            scaled(1.0, offset=torch.zeros(3)),
            scaled(torch.tensor(1.5)),
            scaffold(),
            scaffold().replace(warm_up=fedprox(0.1)),
            scaffold().replace(warm_up=fedprox(0.2)),
            looped(),
        )
    ]
    assert len({digest(one) for one in seen}) == len(seen)
    assert algorithm_identity(scaled(2.0)) == algorithm_identity(scaled(2.0))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"privacy": LIMITED.changed(delta=1e-2)}, "privacy.delta = 0.001, not 0.01"),
        ({"privacy": LIMITED.changed(user_epsilon=50.0)}, "privacy.user_epsilon = 40.0, not 50.0"),
        ({"privacy": LIMITED.changed(user_epsilon=None)}, "privacy.user_epsilon = 40.0, not None"),
        ({"privacy": LIMITED.changed(view="third-party")}, "view = 'server', not 'third-party'"),
        ({"engine": "loop"}, "engine = 'simulator', not 'loop'"),
        ({"algorithm": fedprox(50.0)}, "algorithm.direction … mu = 0.1, not 50.0"),
        ({"algorithm": fedavg()}, "algorithm"),
    ],
    ids=["delta", "budget", "no-budget", "view", "engine", "number", "algorithm"],
)
def test_another_run(federation, tmp_path, changed, named):
    begin(federation, tmp_path / "run", privacy=LIMITED)
    options = {"privacy": LIMITED} | changed
    refuses_to_resume(named, federation, tmp_path / "run", **options)


@pytest.mark.parametrize("number", [CHECKPOINT_FORMAT + 1, None])
def test_a_checkpoint_of_another_format(federation, tmp_path, number):
    begin(federation, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.pt"
    saved = torch.load(path, weights_only=True)
    assert saved["format"] == CHECKPOINT_FORMAT
    torch.save({**saved, "format": number}, path)
    sentence = f"has format {number}, and this version reads format {CHECKPOINT_FORMAT}"
    refuses_to_resume(sentence, federation, tmp_path / "run")


def rewritten(lines):
    """The lines with a chain of their own, as a forger would make it, and the last hash."""
    head, text = START, ""
    for line in lines:
        body = {key: value for key, value in line.items() if key != "chain"}
        head = hashlib.sha256(f"{head}\n{json.dumps(body, sort_keys=True)}".encode()).hexdigest()
        text += json.dumps({**body, "chain": head}, sort_keys=True) + "\n"
    return text, head


def replace_users(lines):
    lines[2]["users"] = [(user + 1) % 12 for user in lines[2]["users"]]


def swap_rounds(lines):
    """Nobody took part less often."""
    lines[1]["users"], lines[2]["users"] = lines[2]["users"], lines[1]["users"]


def raise_noise(lines):
    lines[0]["opens"]["run"]["noise"] = 30.0


def forget_all(lines):
    lines.clear()


def forget_rounds(lines):
    del lines[3:]


FORGERIES = [forget_rounds, forget_all, replace_users, swap_rounds, raise_noise]


def forged(folder, forge, head):
    """The ledger of a folder, written again as somebody would like it, its head too if asked."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    text, last = rewritten(lines)
    assert (folder / "ledger.jsonl").read_text() == text
    assert (folder / "ledger.head").read_text() == last and len(last) == 64
    forge(lines)
    text, last = rewritten(lines)
    (folder / "ledger.jsonl").write_text(text)
    if head:
        (folder / "ledger.head").write_text(last)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("forge", FORGERIES)
def test_a_forged_or_shortened_ledger(federation, tmp_path, forge, head):
    """Its head gives it away, or else the statement in the model's folder: to the privacy command
    and on resume."""
    folder = tmp_path / "run"
    go(federation, folder)
    forged(folder, forge, head)
    with refuses("ledger-damaged: ledger"):
        CliRunner().invoke(app, ["privacy", str(folder)], catch_exceptions=False)
    refuses_to_resume("ledger", federation, folder)


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_forgery_while_a_run_is_stopped(federation, tmp_path, forge):
    """Before there is a statement, the checkpoint of round 3 holds the head too."""
    folder = tmp_path / "run"
    begin(federation, folder)
    forged(folder, forge, head=True)
    refuses_to_resume("ledger", federation, folder)


def test_a_journal_cut_back_is_refused_at_every_line(federation, tmp_path):
    """Or lost, with the checkpoint of round 3 or without: its head names the last of 5 rounds."""
    folder, secret = tmp_path / "run", NOISY.changed(secret=True)
    begin(federation, folder, privacy=secret)
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 6 and not (folder / "model").exists()
    for kept in (0, 1, 2, 3, 4, 5):
        (folder / "ledger.jsonl").write_text("".join(lines[:kept]))
        with refuses("ledger-damaged"):
            CliRunner().invoke(app, ["privacy", str(folder)], catch_exceptions=False)
        refuses_to_resume("ledger", federation, folder, privacy=secret)
    for name in ("ledger.jsonl", "checkpoint.pt"):
        (folder / name).unlink()
        with refuses("ledger-damaged"):
            CliRunner().invoke(app, ["privacy", str(folder)], catch_exceptions=False)
        refuses_to_resume("ledger", federation, folder, privacy=secret)


def test_a_crash_between_a_line_and_its_head(federation, tmp_path, monkeypatch):
    """The journal is longer by a round that has not run, which is no damage."""
    folder, real = tmp_path / "run", Account.name_head

    def dies(self):
        if len(self.journal) == 5:
            raise Cut
        real(self)

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(Account, "name_head", dies)
        go(federation, folder)
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert (folder / "ledger.head").read_text() == lines[3]["chain"] and len(lines) == 5
    assert stated(folder).rounds == 4
    assert go(federation, folder, resume=True).ended == "completed"


@pytest.mark.parametrize("text", ["[plan", "rounds = 3", "[run]\nsetting = 3"])
def test_a_damaged_configuration_is_found_before_a_round_runs(federation, tmp_path, text):
    begin(federation, tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text(text)
    refuses_to_resume("", federation, tmp_path / "run")
