"""Image datasets from IDX files: made ones here, the real ones where they are at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from idx_files import write_idx
from refusals import refuses

from dpscaffold.data import load_federation
from dpscaffold.data.sources import catalogue, images
from dpscaffold.data.sources.idx import read_idx

Maker = Callable[..., Path]


def test_training_and_test_files(idx_folder: Maker, tmp_path: Path) -> None:
    folder = idx_folder()
    for which, size, pool in (
        ("train", 60, images.mnist(tmp_path)),
        ("t10k", 20, images.mnist(tmp_path, test=True)),
    ):
        pixels = read_idx(folder / f"{which}-images-idx3-ubyte.gz").reshape(size, -1)
        np.testing.assert_array_equal(pool.features, pixels)
        assert (len(pool), pool.features.shape[1], pool.classes) == (size, 30, 10)


def test_pixels_are_in_the_unit_interval(idx_folder: Maker, tmp_path: Path) -> None:
    folder = idx_folder()
    pool = images.mnist(tmp_path)
    rows = pool.take(np.array([3, 1])).numpy()
    raw = read_idx(folder / "train-images-idx3-ubyte.gz").reshape(60, -1)
    np.testing.assert_allclose(rows, raw[[3, 1]] / 255, rtol=1e-6)
    assert rows.dtype == np.float32


def test_uncompressed_files_are_found(idx_folder: Maker, tmp_path: Path) -> None:
    idx_folder("fashion-mnist", suffix="")
    assert len(images.fashion_mnist(tmp_path)) == 60


def test_emnist_is_put_upright_and_its_parts_are_pooled_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "emnist" / "gzip"
    folder.mkdir(parents=True)
    upright = np.zeros((2, 47, 4, 4), dtype=np.uint8)
    upright[0, :, 0, :], upright[1, :, 0, :] = 200, 100  # a bar along the top
    for pixels, part in zip(upright, ("train", "test"), strict=True):
        stem = f"emnist-balanced-{part}"
        write_idx(folder / f"{stem}-images-idx3-ubyte.gz", pixels.transpose(0, 2, 1).copy())
        write_idx(folder / f"{stem}-labels-idx1-ubyte.gz", np.arange(47, dtype=np.uint8))
    pool = images.emnist(tmp_path)
    np.testing.assert_array_equal(pool.features.reshape(2, 47, 4, 4), upright)
    assert pool.labels.tolist() == 2 * list(range(47)) and pool.classes == 47


def test_counts_that_differ(idx_folder: Maker, tmp_path: Path) -> None:
    folder = idx_folder()
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.zeros(59, dtype=np.uint8))
    with refuses("dataset-damaged: train-labels-idx1-ubyte.gz"):
        images.mnist(tmp_path)


def test_labels_out_of_range(idx_folder: Maker, tmp_path: Path) -> None:
    idx_folder(classes=12)
    with refuses("bad-labels: contain 11 … in 0"):
        images.mnist(tmp_path)


def test_labels_where_images_are_expected(idx_folder: Maker, tmp_path: Path) -> None:
    folder = idx_folder()
    write_idx(folder / "train-images-idx3-ubyte.gz", np.zeros(60, dtype=np.uint8))
    with refuses("dataset-damaged: expected 3"):
        images.mnist(tmp_path)


def test_missing_data_say_how_to_get_them(tmp_path: Path) -> None:
    with refuses("dataset-not-found: 'dpscaffold data download mnist'"):
        images.mnist(tmp_path)


def test_the_data_folder_is_chosen_then_named_then_the_platforms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DPSCAFFOLD_DATA", "/from/variable")
    assert str(catalogue.data_folder()) == "/from/variable"
    assert str(catalogue.data_folder("/chosen")) == "/chosen"
    monkeypatch.delenv("DPSCAFFOLD_DATA")
    assert catalogue.data_folder().name == "dpscaffold"


def test_real_mnist_and_emnist47_load_and_split_quickly(real_data: Path) -> None:
    """Under 3 and 8 seconds of processor time, which other work on the machine does not lengthen
    much."""
    for source, limit, expected in (
        ("mnist", 3.0, (60, 48_000, 10)),
        ("emnist47", 8.0, (40, 80_000, 47)),
    ):
        start = time.process_time()
        federation = load_federation({"source": source, "path": str(real_data), "preprocess": []})
        assert time.process_time() - start < limit
        assert (federation.users, len(federation.train), federation.classes) == expected


def test_real_emnist47_is_the_pooled_subset(real_data: Path) -> None:
    pool = images.emnist47(real_data)
    assert len(pool) == 110_677
    assert np.bincount(pool.labels, minlength=47).min() > 900
