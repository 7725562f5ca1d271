"""Stored federations: equal to what was saved, mapped without being loaded, whole or not there at
all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses

from dpscaffold import Gaussian, Logistic, Plan, scaffold, train
from dpscaffold.data import (
    FederationWriter,
    describe,
    load,
    preprocess,
    preprocess_to,
    save,
    synthetic,
)
from dpscaffold.federation import Federation


@pytest.fixture
def federation() -> Federation:
    private = {"step": "centre", "fit": "private", "norm_bound": 1.0, "noise": 2.0}
    made = synthetic(alpha=1, beta=1, users=7, records=40, size_spread=0.6)
    return preprocess(made, [private, "unit-norm"])


def equal(a: Federation, b: Federation) -> bool:
    tables = ((a.train, b.train), (a.test, b.test))
    return all(
        torch.equal(x.features, y.features)
        and torch.equal(x.labels, y.labels)
        and torch.equal(x.offsets, y.offsets)
        for x, y in tables
    )


def test_round_trip(federation: Federation, tmp_path: Path) -> None:
    found = load(save(federation, tmp_path / "kept"))
    assert equal(found, federation) and found.mapped
    for name in ("names", "classes", "title", "preparation"):
        assert getattr(found, name) == getattr(federation, name)
    assert [step.protection for step in found.preparation] == [
        "unprotected",
        "none needed",
        "private",
        "none needed",
    ]
    assert found.preparation[2].cost is not None
    assert found.train.digest() == federation.train.digest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]


def test_mapped_tables_live_in_their_files(federation: Federation, tmp_path: Path) -> None:
    found = load(save(federation, tmp_path / "kept"))
    # What is changed in the file shows in the tensor: nothing was copied.
    path = tmp_path / "kept" / "train-features.npy"
    with open(path, "r+b") as file:
        file.seek(128)
        file.write(np.float32(42.0).tobytes())
    assert float(found.train.features[0, 0]) == 42.0


def test_files_are_plain_npy(federation: Federation, tmp_path: Path) -> None:
    save(federation, tmp_path / "kept")
    np.testing.assert_array_equal(
        np.load(tmp_path / "kept" / "test-labels.npy"), federation.test.labels.numpy()
    )


def test_the_writer_and_save_agree(federation: Federation, tmp_path: Path) -> None:
    with FederationWriter(tmp_path / "b", federation.classes) as writer:
        for user, name in enumerate(federation.names):
            writer.append(federation.train.of(user), federation.test.of(user), name)
    assert equal(load(tmp_path / "b"), federation)


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    x, y = np.zeros((3, 2)), np.array([0, 1, 0])
    with (
        refuses("users-differ: second has 3"),
        FederationWriter(tmp_path / "c", 2) as writer,
    ):
        writer.append((x, y), (x, y), "first")
        writer.append((np.zeros((3, 3)), y), (x, y), "second")
    assert list(tmp_path.iterdir()) == []
    with refuses("no-users"), FederationWriter(tmp_path / "d", 2):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (np.zeros((3, 2)), np.array([0, 1]), "wrong-shape"),
        (np.zeros((0, 2)), np.array([]), "wrong-shape"),
        (np.zeros((2, 2)), np.array([0, 2]), "bad-labels: in 0 … to 1"),
        (np.full((2, 2), np.nan), np.array([0, 1]), "not-finite"),
    ],
)
def test_the_writer_checks_every_user(
    tmp_path: Path, x: np.ndarray, y: np.ndarray, said: str
) -> None:
    with refuses(said), FederationWriter(tmp_path / "c", 2) as writer:
        writer.append((x, y), (x, y))


def test_nothing_is_overwritten_unasked(federation: Federation, tmp_path: Path) -> None:
    save(federation, tmp_path / "kept")
    with refuses("file-exists"):
        save(federation, tmp_path / "kept")
    other = preprocess(federation, ["clip-norm:0.5"])
    assert equal(load(save(other, tmp_path / "kept", overwrite=True)), other)
    (tmp_path / "mine").mkdir()
    with refuses("file-exists"):
        save(federation, tmp_path / "mine", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "mine"]


def test_damaged_folders(federation: Federation, tmp_path: Path) -> None:
    whole = save(federation, tmp_path / "whole")

    def damaged() -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return Path(shutil.copytree(whole, tmp_path / "copy"))

    with refuses("not-prepared-data"):
        load(tmp_path)
    folder = damaged()
    (folder / "train-labels.npy").unlink()
    with refuses("data-damaged: train-labels.npy"):
        load(folder)
    folder = damaged()
    with open(folder / "train-features.npy", "r+b") as file:
        file.truncate(1000)
    with refuses("data-damaged: 1000"):
        load(folder)
    folder = damaged()
    with open(folder / "train-features.npy", "r+b") as file:
        file.seek(500)
        file.write(b"\xff")
    with refuses("data-damaged: checksum"):  # sizes are right: only a full reading tells
        load(folder)
    folder = damaged()
    (folder / "federation.json").write_text("{")
    with refuses("data-damaged"):
        load(folder)
    folder = damaged()
    index = json.loads((folder / "federation.json").read_text())
    (folder / "federation.json").write_text(json.dumps(index | {"format": 99}))
    with refuses("wrong-version: format 99"):
        load(folder)
    (folder / "federation.json").write_text(
        json.dumps({k: v for k, v in index.items() if k != "title"})
    )
    with refuses("data-damaged"):
        load(folder)


def test_preprocessing_from_folder_to_folder(federation: Federation, tmp_path: Path) -> None:
    steps = ["standardise", "pca:5", "unit-norm"]
    mapped = load(save(federation, tmp_path / "raw"))
    done = load(preprocess_to(mapped, steps, tmp_path / "done"))
    expected = preprocess(federation, steps)
    assert equal(done, expected) and done.preparation == expected.preparation


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Anonymous line")


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup"
)
def test_mapping_describing_and_validating_do_not_load_the_table(tmp_path: Path) -> None:
    """A table of 160 MB is written, mapped, validated and described within 60 MB of anonymous
    memory."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 100)).astype(np.float32), np.arange(200) % 10
    start = anonymous()
    with FederationWriter(tmp_path / "large", 10) as writer:
        for _ in range(2000):
            writer.append((x, y), (x[:2], y[:2]))
    federation = load(tmp_path / "large")
    assert federation.train.features.numel() * 4 == 160_000_000
    grown = [anonymous() - start]
    federation.validated()
    grown.append(anonymous() - start)
    describe(federation)
    grown.append(anonymous() - start)
    federation.train.digest()
    grown.append(anonymous() - start)
    assert max(grown) < 60e6


def test_training_on_a_mapped_federation_is_training(
    federation: Federation, tmp_path: Path
) -> None:
    """Only a round's users are loaded, and the result is the one that memory gives."""
    mapped = load(save(federation, tmp_path / "kept"))
    plan = Plan(rounds=4, local_steps=3, user_ratio=0.5, data_ratio=0.5, evaluate_every=2)
    outcomes = [
        train(
            data,
            Logistic(data.dimension, data.classes),
            scaffold(),
            plan,
            Gaussian(clip=1.0, noise=1.0),
        )
        for data in (federation, mapped)
    ]
    torch.testing.assert_close(outcomes[0].params, outcomes[1].params)
    assert outcomes[0].final["test_accuracy"] == pytest.approx(outcomes[1].final["test_accuracy"])
    assert outcomes[0].params.abs().max() > 0
