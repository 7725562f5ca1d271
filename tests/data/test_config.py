"""The [data] table: defaults, every source, refusals, and reading back what was resolved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from refusals import refuses

from dpscaffold.data import load_federation, parse_data, save, synthetic
from dpscaffold.data.config import SOURCES, DataSettings, Synthetic


def test_no_source_is_the_papers_synthetic_federation() -> None:
    assert parse_data({}) == Synthetic()
    small = {"users": 4, "records": 30, "alpha": 2.0, "seed": 3}
    made = load_federation(small)
    assert torch.equal(
        made.train.features, synthetic(alpha=2.0, users=4, records=30, seed=3).train.features
    )


def test_the_papers_settings_are_the_defaults() -> None:
    mnist, femnist = parse_data({"source": "mnist"}), parse_data({"source": "emnist47"})
    assert (mnist.users, mnist.records) == (60, 1000)
    assert (femnist.users, femnist.records) == (40, 2500)
    assert [step.step for step in mnist.preprocess] == ["standardise", "unit-norm"]
    assert mnist.test_ratio == 0.2


MINIMAL: dict[str, dict[str, Any]] = {
    "csv": {"path": "a.csv", "label": "y", "user": "u"},
    "parquet": {"path": "a.parquet", "label": "y", "users": 3},
    "npz": {"path": "a.npz", "users": 3},
    "saved": {"path": "folder"},
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_survives_being_written_out(source: str) -> None:
    settings = parse_data({"source": source, **MINIMAL.get(source, {})})
    tables = settings.model_dump(mode="json", exclude_none=True)
    assert parse_data(tables) == settings
    assert TypeAdapter(DataSettings).validate_python(tables) == settings


@pytest.mark.parametrize("partition", ["similarity", "dirichlet"])
def test_partitions_by_name(partition: str) -> None:
    federation = load_federation(
        {"source": "digits", "users": 6, "partition": partition, "preprocess": []}
    )
    sizes = (federation.train.sizes + federation.test.sizes).tolist()
    assert federation.users == 6 and sum(sizes) == 1794
    assert len(set(sizes)) == 1
    assert (
        partition.split("y")[0][:4].lower() in federation.title.lower()
        or "similar" in federation.title
    )


def test_uneven_sizes_with_label_skew() -> None:
    federation = load_federation(
        {"source": "digits", "users": 8, "size_spread": 1.0, "similarity": 0}
    )
    sizes = federation.train.sizes
    assert int(sizes.max()) > 2 * int(sizes.min())


def test_images_from_a_folder(idx_folder: Callable[..., Path], tmp_path: Path) -> None:
    idx_folder()
    settings = {
        "source": "mnist",
        "path": str(tmp_path),
        "users": 4,
        "records": 10,
    }
    federation = load_federation(settings)
    assert federation.users == 4 and federation.dimension == 30
    norms = federation.train.features.norm(dim=1)
    assert torch.allclose(norms, torch.ones_like(norms), atol=1e-5)


def test_saved_federations(tmp_path: Path) -> None:
    made = synthetic(users=3, records=20)
    save(made, tmp_path / "kept")
    settings = {"source": "saved", "path": str(tmp_path / "kept")}
    assert load_federation(settings).mapped


def test_the_seed_decides_everything() -> None:
    settings = {"source": "digits", "users": 5}
    a, b, c = (load_federation({**settings, "seed": seed}).train.features for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"source": "minst"}, "unknown-source: 'minst' … 'mnist'"),
        ({"source": "zzz"}, "unknown-source"),
        ({"source": 3}, "unknown-source: '3'"),
        ({"sorce": "mnist"}, "unknown-key: 'sorce' … 'source'"),
        (
            {"source": "digits", "similarty": 3},
            "unknown-key: 'similarty' … 'similarity'",
        ),
        ({"source": "digits", "similarity": 110}, "out-of-range: similarity is 110 … 100"),
        ({"source": "digits", "users": 0}, "out-of-range: users is 0"),
        ({"source": "digits", "users": "many"}, "not-a-whole-number: users is 'many'"),
        ({"source": "digits", "test_ratio": 1.0}, "out-of-range: test_ratio is 1.0"),
        (
            {"source": "digits", "partition": "dirichlet", "alpha": float("nan")},
            "not-a-number: alpha",
        ),
        ({"source": "digits", "partition": "natural"}, "no-user-column"),
        (
            {"source": "digits", "partition": "dirichlet", "similarity": 3},
            "not-applicable: partition = 'similarity'",
        ),
        ({"source": "digits", "alpha": 3.0}, "not-applicable: partition = 'dirichlet'"),
        ({"source": "digits", "preprocess": ["pca:3"]}, "pca-not-centred: 'pca' … 'centre'"),
        (
            {"source": "digits", "preprocess": ["center"]},
            "unknown-step: 'center' … 'centre'",
        ),
        ({"source": "csv", "path": "x", "label": "y"}, "missing-key: users"),
        ({"source": "csv", "label": "y"}, "missing-key: path"),
        ({"alpha": -1}, "out-of-range: alpha"),
    ],
)
def test_refusals(table: dict[str, Any], said: str) -> None:
    with refuses(said) as caught:
        parse_data(table)
    assert "\n" not in str(caught.value) and "Value error" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"users": 40, "records": 2500},
            "too-few-records: 2500 … 100000 … 1797",
        ),
        ({"users": 1000}, "too-few-records: minimum_records is 2"),
        (
            {"users": 100, "minimum_records": 20},
            "too-few-records: minimum_records is 20",
        ),
    ],
)
def test_requests_that_the_data_cannot_meet(table: dict[str, Any], said: str) -> None:
    with refuses(said):
        load_federation({"source": "digits", **table})


def test_a_single_class_in_the_training_split(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", features=np.eye(10), labels=np.zeros(10))
    with refuses("single-class"):
        load_federation({"source": "npz", "path": str(tmp_path / "t.npz"), "users": 2})
