"""The identity of records: an HMAC whose key stays in the folder, and nothing else tells them."""

from __future__ import annotations

import hashlib
import hmac
import json
import stat
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import small
from deploy.world import World
from refusals import refuses
from stated import described
from typer.testing import CliRunner

from dpscaffold import BadInput, Gaussian, Logistic, Plan, fedavg, synthetic, train
from dpscaffold import run as run_configuration
from dpscaffold.cli import app
from dpscaffold.federation import Federation

PLAN = Plan(rounds=2, local_steps=1, user_ratio=0.5, evaluate_every=2)
NOISE = Gaussian(noise=8.0, secret=True)


@pytest.fixture(scope="module")
def federation():
    return synthetic(users=6, records=40, seed=5)


def go(federation, out, limits=None, **options):
    privacy = NOISE.changed(**(limits or {}))
    return train(federation, Logistic(40, 10), fedavg(), PLAN, privacy, out=out, **options)


def key_of(folder: Path) -> bytes:
    return bytes.fromhex(json.loads((folder / "secret.json").read_text())["data_key"])


def identity_of(folder: Path) -> str:
    return described(folder)["data"]


def plain_digest(federation: Federation) -> str:
    """The digest of all records without a key, written down again."""
    state = hashlib.blake2b(digest_size=16)
    state.update(repr((federation.classes, federation.dimension)).encode())
    for table in (federation.train, federation.test):
        one = hashlib.blake2b(table.offsets.numpy().tobytes(), digest_size=16)
        one.update(table.features.numpy().tobytes() + table.labels.numpy().tobytes())
        state.update(one.hexdigest().encode())
    return state.hexdigest()


def test_the_identity_is_an_hmac_whose_key_stays_in_the_folder(federation, tmp_path):
    for name in "ab":
        go(federation, tmp_path / name)
    keys = {key_of(tmp_path / name) for name in "ab"}
    assert len(keys) == 2 and {len(key) for key in keys} == {32}
    for name in "ab":
        folder, key = tmp_path / name, key_of(tmp_path / name)
        expected = hmac.new(key, plain_digest(federation).encode(), hashlib.sha256).hexdigest()
        assert identity_of(folder) == expected
        assert stat.S_IMODE((folder / "secret.json").stat().st_mode) == 0o600
        opening = json.loads((folder / "ledger.jsonl").read_text().splitlines()[0])
        assert opening["opens"]["data"] == expected
        for path in folder.rglob("*"):  # the key itself is in one file alone
            if path.is_file() and path.name != "secret.json":
                assert key not in path.read_bytes() and key.hex().encode() not in path.read_bytes()
    assert identity_of(tmp_path / "a") != identity_of(tmp_path / "b")


def test_runs_with_one_key_file_have_comparable_identities(federation, tmp_path):
    file = tmp_path / "records.key"
    for name in "ab":
        go(federation, tmp_path / name, data_key=file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {key_of(tmp_path / name) for name in "ab"} == {bytes.fromhex(file.read_text())}
    assert identity_of(tmp_path / "a") == identity_of(tmp_path / "b")
    tables = {"data": {"users": 4, "records": 30}, "plan": {"rounds": 1, "user_ratio": 0.5}}
    run_configuration(tables, out=tmp_path / "c", data_key=str(file))
    assert key_of(tmp_path / "c") == key_of(tmp_path / "a")
    assert identity_of(tmp_path / "c") != identity_of(tmp_path / "a")


def stop_after(row):
    if row.round == 1:
        raise KeyboardInterrupt


def test_resuming_needs_the_key(federation, tmp_path):
    """Its own, from the folder; the user's file may be named again, another one may not."""
    folder, file = tmp_path / "run", tmp_path / "records.key"
    with pytest.raises(KeyboardInterrupt):
        go(federation, folder, data_key=file, on_round=stop_after)
    other = tmp_path / "other.key"
    other.write_text("11" * 32)
    for wrong in (other, tmp_path / "none.key"):
        with refuses("data-key-changed"):
            go(federation, folder, resume=True, data_key=wrong)
    assert not (tmp_path / "none.key").exists()
    kept = (folder / "secret.json").read_text()
    (folder / "secret.json").unlink()
    with refuses("seed-missing: secret.json"):
        go(federation, folder, resume=True)
    (folder / "secret.json").write_text("nonsense")
    with refuses("seed-damaged"):
        go(federation, folder, resume=True)
    (folder / "secret.json").write_text(kept)
    with refuses("records-differ"):
        go(synthetic(users=6, records=40, seed=6), folder, resume=True)
    assert go(federation, folder, resume=True, data_key=file).ended == "completed"


def test_a_bad_key_file_is_one_sentence_and_nothing_is_written(federation, tmp_path):
    bad = tmp_path / "bad.key"
    bad.write_text("0123")
    for file, said in (
        (bad, "data-key-damaged: 64"),
        (tmp_path, "not-a-file"),
        (tmp_path / "none" / "a.key", "folder-not-found"),
    ):
        with refuses(said):
            go(federation, tmp_path / "run", data_key=file)
    with refuses("no-run-folder"):
        go(federation, None, data_key=bad)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with refuses("folder-not-empty"):
        go(federation, tmp_path / "full", data_key=tmp_path / "new.key")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.key", "full"]
    said = CliRunner().invoke(
        app, ["train", "--set", "plan.rounds=1", "--data-key", str(bad), "--out", str(tmp_path)]
    )
    assert isinstance(said.exception, BadInput)


def test_sites_keep_no_identity_of_their_records(tmp_path):
    """Nothing that a site keeps of a run is a function of its records, however they are hashed."""

    def kept(folder, shift):
        data = small.federation((9, 12, 7))
        table = replace(data.train, features=data.train.features + shift)
        world = World(folder, privacy=NOISE, data=replace(data, train=table))
        world.enrol()
        state = world.sites[world.names[0]].state
        (known,) = [run.enrolment() for run in state.runs()]
        return asdict(known), json.loads(state.ledger.read_text().splitlines()[1])["account"]

    (one, account), (other, same) = kept(tmp_path / "a", 0.0), kept(tmp_path / "b", 1.0)
    drawn = {"run", "nonce", "server_commitment", "anchor", "commitments", "nonces"}
    assert account == same
    assert {name for name in one if one[name] != other[name]} <= drawn
