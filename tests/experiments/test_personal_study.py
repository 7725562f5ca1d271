"""The experiments on personal models: their data, their page, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from refusals import refuses
from typed import done_here

from dpscaffold.data.sources.idx import write_idx
from dpscaffold.paper import personal
from dpscaffold.paper.personal import STUDIES, reproduce_personal, rotated_mnist, school


def small_school(folder: Path) -> None:
    """Three schools with the columns of the School data."""
    stream = np.random.default_rng(0)
    features, scores = np.empty((1, 3), object), np.empty((1, 3), object)
    for k in range(3):
        x = stream.integers(0, 2, (20, 28))
        x[:, 3:5], x[:, 27] = stream.integers(5, 60, (20, 2)), 1
        features[0, k], scores[0, k] = x, stream.integers(1, 71, (20, 1))
    (folder / "school").mkdir()
    scipy.io.savemat(folder / "school" / "school.mat", {"X": features, "Y": scores})


def test_schools_are_split_and_scaled_by_public_ranges(tmp_path: Path) -> None:
    small_school(tmp_path)
    data = school(tmp_path, 0)
    assert data.users == 3 and data.train.sizes.tolist() == [14] * 3
    assert data.test.sizes.tolist() == [6] * 3 and data.dimension == 27
    assert float(data.train.labels.abs().max()) <= 1
    whole = scipy.io.loadmat(tmp_path / "school" / "school.mat")["X"][0][0]
    pool = np.r_[data.train.of(0)[0], data.test.of(0)[0]]
    expected = whole[:, :-1].sum(0) / np.where(np.isin(np.arange(27), (3, 4)), 100, 1) / 8**0.5
    np.testing.assert_allclose(pool.sum(0), expected, rtol=1e-4)


def test_digits_are_turned_by_site(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    image = np.zeros((28, 28), np.uint8)
    image[0, 1] = 200  # near the top left corner
    for part, count in (("train", 80), ("t10k", 40)):
        place = tmp_path / "mnist"
        write_idx(place / f"{part}-images-idx3-ubyte.gz", np.stack([image] * count))
        write_idx(place / f"{part}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8) % 10)
    data = rotated_mnist(tmp_path, 0)
    assert data.users == 40 and data.train.sizes.tolist() == [2] * 40
    spots = [int(data.train.of(10 * k)[0][0].argmax()) for k in range(4)]
    assert spots == [1, 28 * 26, 28 * 27 + 26, 28 * 1 + 27]
    assert float(data.train.of(0)[0][0].norm()) == pytest.approx(1.0)


def test_a_study_writes_its_numbers_figure_and_page(tmp_path: Path, monkeypatch) -> None:
    small_school(tmp_path)
    study = STUDIES["school"]
    plan = replace(study.plan, rounds=2, local_steps=1, evaluate_every=2)
    small = replace(study, plan=plan, epsilons=(float("inf"), 50.0))
    monkeypatch.setitem(personal.STUDIES, "school", small)
    files = reproduce_personal("school", tmp_path, tmp_path / "out", seeds=1)
    assert files == ["results.csv", "figure.png", "RESULT.md"]
    page = (tmp_path / "out" / "school" / "RESULT.md").read_text()
    for said in ("| local |", "| ridge, fine-tuned |", "FedAvg, mean-regularised", "0.02394"):
        assert said in page
    lines = (tmp_path / "out" / "school" / "results.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 9
    values = [float(line.rsplit(",", 1)[1]) for line in lines[1:]]
    assert all(0 < value < 2 for value in values)


def test_missing_data_and_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with refuses("dataset-not-found: school.mat … --data-dir"):
        school(tmp_path, 0)
    done = done_here("reproduce", "rotated-mnist", "--data-dir", tmp_path, "--out", tmp_path / "o")
    assert done.returncode == 2 and "--data-dir" in done.stderr and not (tmp_path / "o").exists()
    done = done_here("reproduce", "school", "--scale", "0.5")
    assert done.returncode == 2 and "--scale" in done.stderr
    done = done_here("reproduce", "table1", "--data-dir", tmp_path)
    assert done.returncode == 2 and "--data-dir" in done.stderr
