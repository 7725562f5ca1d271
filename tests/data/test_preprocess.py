"""Preprocessing against NumPy and scikit-learn; what is fitted on what; sentences and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses
from sklearn.decomposition import PCA

from dpscaffold.data import from_users, preprocess
from dpscaffold.data.preprocessing import parse_steps
from dpscaffold.federation import Federation


@pytest.fixture
def federation() -> Federation:
    """Three users with shifted, correlated features; one feature is constant."""
    rng = np.random.default_rng(3)
    mix = rng.normal(size=(8, 8))
    users = []
    for shift in (-2.0, 0.0, 5.0):
        x = rng.normal(size=(50, 8)) @ mix + shift
        x[:, 6] = 4.0
        users.append((x.astype(np.float32), rng.integers(0, 3, 50)))
    return from_users(users)


def test_standardise_pools_the_training_records_of_all_users(federation: Federation) -> None:
    done = preprocess(federation, ["standardise"])
    train = federation.train.features.double().numpy()
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    deviation[6] = 1.0
    for before, after in ((federation.train, done.train), (federation.test, done.test)):
        expected = (before.features.double().numpy() - mean) / deviation
        np.testing.assert_allclose(after.features.numpy(), expected, atol=2e-5)
    # Not per user: each user keeps its own shift.
    assert done.train.of(2)[0].mean() > 0.5 > -0.5 > done.train.of(0)[0].mean()


def test_fits_do_not_look_at_test_records(federation: Federation) -> None:
    steps = ["standardise", "pca:3", "unit-norm"]
    other = Federation.from_arrays(
        [federation.train.of(i) for i in range(3)],
        [(x * 100 + 7, y) for x, y in (federation.test.of(i) for i in range(3))],
        classes=3,
    )
    a, b = preprocess(federation, steps), preprocess(other, steps)
    assert torch.equal(a.train.features, b.train.features)
    assert not torch.equal(a.test.features, b.test.features)


def test_pca_agrees_with_scikit_learn_up_to_signs(federation: Federation) -> None:
    done = preprocess(federation, ["centre", "pca:4"])
    reference = PCA(4, svd_solver="full").fit(federation.train.features.double().numpy())
    for before, after in ((federation.train, done.train), (federation.test, done.test)):
        expected = reference.transform(before.features.double().numpy())
        found = after.features.numpy()
        signs = np.sign((found * expected).sum(axis=0))
        np.testing.assert_allclose(found, expected * signs, atol=2e-3)


def test_unit_norm_leaves_zeros(federation: Federation) -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    done = preprocess(
        Federation.from_arrays([(x, torch.tensor([0, 1]))], [(x, torch.tensor([0, 1]))]),
        ["unit-norm"],
    )
    np.testing.assert_allclose(done.train.features.numpy(), [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)
    clipped = preprocess(federation, ["clip-norm:2.5"])
    norms = federation.train.features.norm(dim=1)
    np.testing.assert_allclose(
        clipped.train.features.norm(dim=1).numpy(), norms.clamp(max=2.5).numpy(), rtol=1e-5
    )


def test_blocks_do_not_change_the_result(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ["standardise", "pca:3", "unit-norm"]
    whole = preprocess(federation, steps)
    monkeypatch.setattr("dpscaffold.data.blocks.BLOCK_BYTES", 7 * 8 * 4)
    np.testing.assert_allclose(
        preprocess(federation, steps).train.features, whole.train.features, atol=1e-4
    )


def test_large_offsets_do_not_spoil_the_deviation() -> None:
    rng = np.random.default_rng(0)
    x = (1e4 + rng.normal(size=(500, 2))).astype(np.float32)
    done = preprocess(from_users([(x, np.arange(500) % 2)]), ["standardise"])
    np.testing.assert_allclose(done.train.features.std(dim=0).numpy(), 1.0, atol=0.01)


def test_public_statistics(federation: Federation, tmp_path: Path) -> None:
    mean, deviation = np.arange(8.0), np.full(8, 2.0)
    components = np.eye(8)[:2]
    np.savez(tmp_path / "public.npz", components=components)
    done = preprocess(
        federation,
        [
            {"step": "standardise", "fit": "public", "mean": [*mean], "deviation": [*deviation]},
            {
                "step": "pca",
                "components": 2,
                "fit": "public",
                "statistics": str(tmp_path / "public.npz"),
            },
        ],
    )
    expected = ((federation.train.features.numpy() - mean) / 2)[:, :2]
    np.testing.assert_allclose(done.train.features.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert all(
        "public" in sentence and "outside" not in sentence for sentence in done.preprocessing
    )
    inline = preprocess(federation, [{"step": "centre", "fit": "public", "mean": 0.5}])
    assert torch.allclose(inline.train.features, federation.train.features - 0.5)


def test_sentences_name_what_each_step_was_fitted_on(federation: Federation) -> None:
    done = preprocess(federation, ["standardise", "unit-norm"])
    assert "all users' training records without protection" in done.preprocessing[0]
    assert done.preparation[0].protection == "unprotected"
    assert "no fit" in done.preprocessing[1] and not any(step.cost for step in done.preparation)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (
            ["standardize"],
            "unknown-step: 'standardize' … 'standardise'",
        ),
        (["pca:60"], "pca-not-centred: 'pca' … 'centre'"),
        (["centre", "pca"], "missing-key: 'pca:60'"),
        (["hog"], "missing-key: 'hog' … shape … 'hog:28x28'"),
        ([{"hog": {"shape": [28, 28]}}], "missing-key: step"),
        (["centre", "pca:many"], "not-a-number"),
        (["unit-norm:2"], "not-applicable"),
        (["centre", "pca:9"], "too-many-components"),
        ([{"step": "centre", "fit": "private", "noise": 1.0}], "missing-key: norm_bound"),
        ([{"step": "centre", "fit": "private", "norm_bound": 1.0}], "noise-or-epsilon"),
        (
            [{"step": "centre", "fit": "private", "norm_bound": 1, "epsilon": 1.0, "noise": 2.0}],
            "noise-or-epsilon",
        ),
        ([{"step": "centre", "noise": 1.0}], "not-applicable: fit = 'private'"),
        ([{"step": "centre", "mean": 0.1}], "not-applicable: fit = 'public'"),
        ([{"step": "centre", "fit": "public"}], "missing-statistic"),
        ([{"step": "centre", "fit": "public", "mean": [1.0, 2.0]}], "wrong-shape"),
        (["centre", {"step": "pca", "components": 1, "fit": "public"}], "missing-statistic"),
        (
            ["centre", {"step": "pca", "components": 1, "statistics": "a.npz"}],
            "not-applicable: fit = 'public'",
        ),
        (
            [
                "centre",
                {"step": "pca", "components": 1, "fit": "public", "statistics": "nowhere.npz"},
            ],
            "file-unreadable",
        ),
        ([{"step": "centre", "fit": "privat"}], "unknown-choice: fit"),
        ([{"step": "centre", "norm": 3}], "unknown-key: norm"),
        ([3], "not-a-table"),
    ],
)
def test_bad_steps(federation: Federation, steps: list[Any], said: str) -> None:
    with refuses(said) as caught:
        preprocess(federation, steps)
    assert "\n" not in str(caught.value)


def test_steps_survive_being_written_out() -> None:
    """A resolved configuration spells out every field; reading it back gives the same steps."""
    steps = parse_steps(
        ["standardise", "pca:5", {"step": "centre", "fit": "private", "norm_bound": 2, "noise": 3}]
    )
    assert parse_steps(step.model_dump(mode="json") for step in steps) == steps
