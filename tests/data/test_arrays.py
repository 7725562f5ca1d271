"""Arrays per user, pooled arrays, .npz files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses

from dpscaffold.data import (
    from_pooled,
    from_users,
    load_federation,
    read_npz,
)


def users(
    count: int = 3, records: int = 10, dimension: int = 4
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        f"user {i}": (
            rng.normal(size=(records + i, dimension)).astype(np.float32),
            np.arange(records + i) % 3,
        )
        for i in range(count)
    }


def test_arrays_per_user() -> None:
    federation = from_users(users())
    assert federation.names == ("user 0", "user 1", "user 2")
    for i, (x, _) in enumerate(users().values()):
        found = torch.cat([federation.train.of(i)[0], federation.test.of(i)[0]])
        assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, x.tolist()))
    torches = from_users([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in users().values()])
    assert torch.equal(torches.train.features, federation.train.features)


def test_images_are_flattened() -> None:
    assert from_users([(np.zeros((6, 2, 5)), np.arange(6) % 2)]).dimension == 10


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([], "no-users"),
        (
            [(np.zeros((3, 2)), np.zeros(2))],
            "wrong-shape",
        ),
        (
            [(np.zeros((3, 2)), np.array([0, 1, 0])), (np.zeros((3, 1)), np.array([0, 1, 0]))],
            "users-differ",
        ),
        ([(np.zeros((3, 2)), np.array([0, 0.5, 1]))], "bad-labels"),
        ([(np.zeros((3, 2)), np.array([0, -1, 1]))], "bad-labels"),
        ([(np.array([["a", "b"]]), np.array([0]))], "not-numbers"),
        ([(np.full((3, 2), np.nan), np.array([0, 1, 0]))], "not-finite"),
        ([(np.zeros((1, 2)), np.array([0]))], "too-few-records: user 0"),
    ],
)
def test_bad_arrays(pairs: list[Any], said: str) -> None:
    with refuses(said):
        from_users(pairs)


def test_npz(tmp_path: Path) -> None:
    x = np.arange(40, dtype=np.float64).reshape(20, 2)
    owner = np.repeat(["b", "a"], 10)
    np.savez(tmp_path / "t.npz", features=x, labels=np.arange(20) % 2, users=owner)
    pool = read_npz(tmp_path / "t.npz")
    assert pool.names == ("a", "b") and pool.users is not None and pool.users[0] == 1
    settings = {"source": "npz", "path": str(tmp_path / "t.npz"), "preprocess": []}
    assert load_federation({**settings, "partition": "natural"}).names == ("a", "b")
    assert load_federation({**settings, "users": 4}).users == 4
    np.savez(tmp_path / "u.npz", feature=x, labels=np.arange(20))
    with refuses("unknown-array: 'features' … 'feature'"):
        read_npz(tmp_path / "u.npz")
    (tmp_path / "v.npz").write_bytes(b"PK\x03\x04 not a zip file")
    for name in ("v.npz", "nowhere.npz"):
        with refuses("file-unreadable"):
            read_npz(tmp_path / name)
    np.savez(tmp_path / "w.npz", features=np.array([object()]), labels=np.zeros(1))
    with refuses("not-numbers: 'features'"):
        read_npz(tmp_path / "w.npz")
    with refuses("count-differs: for 3"):
        from_pooled(x, np.arange(20) % 2, np.zeros(3))
