"""Small IDX datasets made on the spot, and the real ones where they are at hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from idx_files import write_idx

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def real_data() -> Path:
    """The folder of real images: $DPSCAFFOLD_DATA, or ``../shared/data`` next to the repository."""
    folder = Path(os.environ.get("DPSCAFFOLD_DATA") or _ROOT.parent / "shared" / "data")
    if not (folder / "mnist").is_dir() or not (folder / "emnist47").is_dir():
        pytest.skip(
            "MNIST and EMNIST-47 are not here; set DPSCAFFOLD_DATA to a folder with mnist/ and "
            "emnist47/"
        )
    return folder


@pytest.fixture
def idx_folder(tmp_path: Path) -> Callable[..., Path]:
    """Make ``tmp_path/<name>/`` with random images: 60 for train and 20 for test, 6 × 5 pixels."""

    def make(
        name: str = "mnist",
        classes: int = 10,
        stems: tuple[str, str] = ("train", "t10k"),
        suffix: str = ".gz",
    ) -> Path:
        rng = np.random.default_rng(7)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for stem, count in zip(stems, (60, 20), strict=True):
            images = rng.integers(0, 256, (count, 6, 5)).astype(np.uint8)
            write_idx(folder / f"{stem}-images-idx3-ubyte{suffix}", images)
            write_idx(
                folder / f"{stem}-labels-idx1-ubyte{suffix}",
                (np.arange(count) % classes).astype(np.uint8),
            )
        return folder

    return make
