"""CIFAR-10 from its binary archive, with small files made here."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

from dpscaffold.data import cifar10

NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (4, 3072)).astype(np.uint8), rng.integers(0, 10, 4)


def binary(number: int) -> bytes:
    pixels, labels = batch(number)
    return np.concatenate([labels.astype(np.uint8)[:, None], pixels], axis=1).tobytes()


def pack(path: Path, contents: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in contents.items():
            entry = tarfile.TarInfo(f"cifar-10-batches/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def place(tmp_path: Path, **other: bytes) -> Path:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    contents = {name: binary(i) for i, name in enumerate(NAMES)} | other
    path = folder / "cifar-10-binary.tar.gz"
    pack(path, {f"{name}.bin": content for name, content in contents.items()})
    return path


def test_the_archive_gives_its_photographs(tmp_path: Path) -> None:
    place(tmp_path)
    pool = cifar10(tmp_path)
    np.testing.assert_array_equal(pool.features, np.concatenate([batch(i)[0] for i in range(5)]))
    np.testing.assert_array_equal(pool.labels, np.concatenate([batch(i)[1] for i in range(5)]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"short", "dataset-damaged: 3073"),
        (b"", "dataset-damaged: 3073"),
        (bytes([10]) + bytes(3072), "bad-labels: contain 10"),
    ],
)
def test_damaged_batches(tmp_path: Path, content: bytes, said: str) -> None:
    place(tmp_path, data_batch_1=content)
    with refuses(said):
        cifar10(tmp_path)


def test_damaged_archives(tmp_path: Path) -> None:
    archive = place(tmp_path)
    archive.write_bytes(archive.read_bytes()[:2000])
    with refuses("dataset-damaged"):
        cifar10(tmp_path)
    pack(archive, {"data_batch_1.bin": binary(0)})
    with refuses("dataset-damaged: data_batch_2"):
        cifar10(tmp_path)


def test_absent(tmp_path: Path) -> None:
    with refuses("dataset-not-found"):
        cifar10(tmp_path)
