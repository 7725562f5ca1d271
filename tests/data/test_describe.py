"""Scores against direct computations and known cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpscaffold.data import describe, load_federation, synthetic
from dpscaffold.data.heterogeneity import label_counts, label_heterogeneity
from dpscaffold.federation import Federation
from dpscaffold.report.data_figures import description_figure


@pytest.fixture
def federation() -> Federation:
    return synthetic(alpha=2, beta=2, users=9, records=60, size_spread=0.8)


def test_counts_are_counted(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dpscaffold.data.blocks.BLOCK_BYTES", 16 * 17
    )  # blocks that cut through users
    counts = label_counts(federation)
    for user in range(9):
        expected = torch.bincount(federation.train.of(user)[1], minlength=10)
        assert counts[user].tolist() == expected.tolist()


def test_label_score_of_known_tables() -> None:
    assert label_heterogeneity(np.array([[5, 5], [5, 5]]))[0] == 0.0
    assert label_heterogeneity(np.eye(4, dtype=int) * 10)[0] == pytest.approx(0.75)
    assert label_heterogeneity(np.array([[3, 1], [1, 3]]))[0] == pytest.approx(0.25)


def test_the_iid_baseline_is_what_iid_users_score() -> None:
    rng = np.random.default_rng(0)
    p = np.array([0.5, 0.3, 0.15, 0.05])
    for size in (20, 500):
        found, expected = label_heterogeneity(rng.multinomial(size, p, size=2000))
        assert found == pytest.approx(expected, rel=0.05)


def test_scores_fall_with_similarity() -> None:
    scores = []
    for similarity in (0, 50, 100):
        settings = {"source": "digits", "similarity": similarity}
        scores.append(describe(load_federation(settings)).label_heterogeneity)
    assert scores[0] > 0.75 > scores[1] > 0.3 > 0.15 > scores[2]


def test_description_and_figure(federation: Federation) -> None:
    description = describe(federation)
    assert (description.users, description.train_records) == (9, len(federation.train))
    assert description.sizes["max"] == int(federation.train.sizes.max())
    assert sum(description.as_json()["labels"]) == description.train_records
    axes = description_figure(description).axes
    heat = axes[0].images[0].get_array()
    assert heat.shape == (9, 10)
    np.testing.assert_allclose(np.asarray(heat).sum(axis=1), 1.0)


def test_a_figure_of_many_users_shows_some() -> None:
    description = describe(synthetic(users=900, records=5, dimension=3))
    axes = description_figure(description).axes[0]
    assert axes.images[0].get_array().shape == (400, 10) and "400 of 900" in axes.get_ylabel()
