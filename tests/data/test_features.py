"""Public features: against their definition written out slowly, and wherever models go."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet
from refusals import refuses

from dpscaffold import Gaussian, Logistic, Plan, scaffold, train
from dpscaffold.data import from_users, load, save
from dpscaffold.data.features import Hog, RandomFeatures
from dpscaffold.data.loading import load_federation, preprocess_to
from dpscaffold.data.loading import prepare as store
from dpscaffold.data.preparation import fit, preprocess
from dpscaffold.data.prepared import prepare
from dpscaffold.data.preprocessing import parse_steps
from dpscaffold.data.stored import entries, steps
from dpscaffold.models.module import _stage

RNG = np.random.default_rng(7)


def slow_hog(image: np.ndarray, cell: int, orientations: int) -> np.ndarray:
    """One image (channels, height, width), pixel by pixel, in double precision."""
    channels, height, width = image.shape
    down, across = -(-height // cell), -(-width // cell)
    found = np.zeros((orientations, down, across))
    for i in range(height):
        for j in range(width):
            best = (0.0, 0.0, 0.0)
            for c in range(channels):
                dy = image[c, i + 1, j] - image[c, i - 1, j] if 0 < i < height - 1 else 0.0
                dx = image[c, i, j + 1] - image[c, i, j - 1] if 0 < j < width - 1 else 0.0
                best = max(best, (math.hypot(dy, dx), dy, dx), key=lambda one: one[0])
            size, dy, dx = best
            turn = (math.atan2(dy, dx) / (2 * math.pi) + 0.25) % 1 * orientations
            low = math.floor(turn)
            found[low % orientations, i // cell, j // cell] += size * (1 - (turn - low))
            found[(low + 1) % orientations, i // cell, j // cell] += size * (turn - low)
    for axis in (1, 2):
        edge = [(1, 1) if k == axis else (0, 0) for k in range(3)]
        wide = np.moveaxis(np.pad(found, edge), axis, 0)
        found = np.moveaxis(wide[1:-1] + 0.5 * (wide[:-2] + wide[2:]), 0, axis)
    return np.sqrt(found / np.sqrt((found**2).sum(0) + 0.5)).ravel()


@pytest.mark.parametrize("shape", [(28, 28), (3, 9, 11), (1, 5, 6), (2, 2)])
def test_histograms_are_those_of_the_definition(shape) -> None:
    step = Hog(shape)
    rows = RNG.random((3, step.width), dtype=np.float32)
    rows[0] = (rows[0] > 0.5).astype(np.float32)  # straight edges: differences of exactly 0
    image = rows.reshape(3, -1, *shape[-2:])
    expected = np.stack([slow_hog(one.astype(float), cell=4, orientations=8) for one in image])
    np.testing.assert_allclose(step(rows), expected, atol=2e-3)
    assert step(rows).shape == (3, step.outputs)


def test_a_row_does_not_depend_on_the_rows_around_it() -> None:
    rows = RNG.random((600, 784), dtype=np.float32)
    for step in (Hog((28, 28)), RandomFeatures.drawn(784, 20)):
        whole = step(rows)
        assert np.array_equal(whole[:300], step(rows[:300]))
        np.testing.assert_allclose(whole[5], step(rows[5:6])[0], rtol=0, atol=1e-5)


def test_random_features_approximate_the_kernel_and_are_the_same_for_everybody() -> None:
    rows = (RNG.standard_normal((20, 5)) / 1.5).astype(np.float32)
    step = RandomFeatures.drawn(5, 20_000)
    found = step(rows) @ step(rows).T
    apart = ((rows[:, None] - rows[None]) ** 2).sum(2)
    np.testing.assert_allclose(found, np.exp(-apart / 2), atol=0.06)
    assert step == RandomFeatures.drawn(5, 20_000)


@pytest.mark.parametrize("names", [["hog:6x5"], ["random-features:12", "unit-norm"]])
def test_stored_steps_and_modules_give_the_same_features(names, tmp_path) -> None:
    rows = RNG.random((40, 30), dtype=np.float32)
    fitted = fit(torch.from_numpy(rows), names)
    listed, arrays = entries(fitted)
    assert steps(listed, arrays, tmp_path) == fitted
    moved = torch.from_numpy(rows)
    for step in fitted:
        moved = _stage(step)(moved)
    np.testing.assert_allclose(moved.numpy(), prepare(rows, fitted), rtol=0, atol=1e-5)
    assert all(step.cost is None and step.protection != "unprotected" for step in fitted)


def test_features_of_images_are_made_by_a_configuration() -> None:
    data = {"source": "digits", "users": 4, "preprocess": ["hog:8x8", "unit-norm"]}
    federation = load_federation(data)
    assert federation.dimension == Hog((8, 8)).outputs
    assert "histograms of oriented gradients" in " ".join(federation.preprocessing)


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        ("hog", "shape"),
        ("hog:28", "shape"),
        ("hog:axb", "give the size of the images as '28x28'"),
        ("hog:0x5", "at least 2 × 2 pixels"),
        ({"step": "hog", "shape": [4, 4], "cell": 4}, "cell"),
        ("random-features", "features"),
        ({"step": "random-features", "features": 5, "scale": 1.0}, "scale"),
    ],
)
def test_steps_that_cannot_be_are_refused(step, sentence) -> None:
    with refuses(f"missing-key|unknown-key|wrong-length|wrong-shape: {sentence}"):
        parse_steps([step])


def test_a_shape_that_does_not_match_the_columns_is_refused() -> None:
    federation = load_federation({"source": "digits", "users": 4, "preprocess": ["unit-norm"]})
    with refuses("wrong-shape: [28, 28] … 784 … 64"):
        preprocess(federation, ["hog:28x28"])


@pytest.mark.parametrize("source", ["csv", "parquet", "npz"])
@pytest.mark.parametrize("step", ["hog:5x6", "random-features:7"])
def test_prepared_data_hold_the_features_and_train(step, source, tmp_path) -> None:
    """Tables are streamed to the folder and arrays loaded: the stored features are those of the
    loaded federation, small blocks give the same, and a mapped federation trains."""
    rows, labels = RNG.random((60, 30), dtype=np.float32), np.arange(60) % 3
    users, path = np.repeat(np.arange(3), 20), tmp_path / f"images.{source}"
    settings = {"source": source, "path": str(path), "partition": "natural"}
    settings |= {"preprocess": [step, "unit-norm"]}
    if source == "npz":
        np.savez(path, features=rows, labels=labels, users=users)
    else:
        columns = {f"p{k:02}": rows[:, k] for k in range(30)}
        table = pa.table(columns | {"label": labels, "site": users})
        writer = csv.write_csv if source == "csv" else parquet.write_table
        writer(table, path)
        settings |= {"label": "label", "user": "site"}
    loaded = load_federation(settings)
    folder = store(settings, tmp_path / "prepared")
    mapped = load_federation({"source": "saved", "path": str(folder)})
    torch.testing.assert_close(mapped.train.features, loaded.train.features, rtol=0, atol=1e-6)
    torch.testing.assert_close(mapped.test.features, loaded.test.features, rtol=0, atol=1e-6)
    assert [type(one) for one in mapped.preparation] == [type(one) for one in loaded.preparation]
    plan = Plan(rounds=2, local_steps=1, user_ratio=1.0, seed=1)
    task = Logistic(mapped.dimension, 3)
    result = train(mapped, task, scaffold(), plan, Gaussian(1.0, 5.0))
    again = train(loaded, task, scaffold(), plan, Gaussian(1.0, 5.0))
    torch.testing.assert_close(result.params, again.params, rtol=0, atol=1e-5)


def test_a_mapped_federation_gets_features_block_by_block(tmp_path, monkeypatch) -> None:
    rows, labels = RNG.random((40, 30), dtype=np.float32), np.arange(40) % 2
    raw = from_users({"a": (rows[:20], labels[:20]), "b": (rows[20:], labels[20:])})
    mapped = load(save(raw, tmp_path / "raw"))
    monkeypatch.setattr("dpscaffold.data.blocks.BLOCK_BYTES", 30 * 4 * 3)  # three rows at a time
    steps = ["hog:5x6", "random-features:9", "unit-norm"]
    found = load(preprocess_to(mapped, steps, tmp_path / "features"))
    expected = preprocess(raw, steps)
    torch.testing.assert_close(found.train.features, expected.train.features, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.test.features, expected.test.features, rtol=0, atol=1e-6)
