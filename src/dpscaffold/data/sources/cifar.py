"""CIFAR-10 from its published binary archive.

Reference: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path

import numpy as np

from dpscaffold.data.pool import Pool
from dpscaffold.data.sources.catalogue import CATALOGUE, data_folder
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Target

PIXELS = 3 * 32 * 32
#: What the classes are called, in order.
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))


def cifar10(data_dir: str | Path | None = None) -> Pool:
    """CIFAR-10: its 50,000 training photographs, rows of 3,072 bytes (red, green, blue planes).

    Reads ``<data folder>/cifar10/cifar-10-binary.tar.gz``, without unpacking it.
    """
    folder = data_folder(data_dir) / "cifar10"
    batches = [_batch(content, where) for content, where in _contents(folder)]
    return Pool(
        np.concatenate([x for x, _ in batches]),
        np.concatenate([y for _, y in batches]),
        Target.of(CLASSES),
        "CIFAR-10",
        scale=1 / 255,
    )


def _contents(folder: Path) -> list[tuple[bytes, str]]:
    """The bytes of each batch file and where they were found."""
    archive = folder / CATALOGUE["cifar10"].files[0].name
    if not archive.is_file():
        raise BadInput(
            "dataset-not-found",
            f"{archive.name} is not in {folder}; run 'dpscaffold data download cifar10', or say "
            f"where it is with --data-dir or DPSCAFFOLD_DATA",
        )
    return _unpacked(archive)


def _unpacked(archive: Path) -> list[tuple[bytes, str]]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                stem = Path(member.name).name.removesuffix(".bin")
                if stem in BATCHES and member.isfile():
                    content = tar.extractfile(member)
                    found[stem] = content.read() if content else b""
    except (tarfile.TarError, EOFError, OSError, zlib.error) as problem:
        raise BadInput(
            "dataset-damaged", f"{archive} is a damaged archive ({problem}); fetch it again"
        ) from None
    missing = [name for name in BATCHES if name not in found]
    if missing:
        raise BadInput("dataset-damaged", f"{archive} has no {missing[0]}; fetch it again")
    return [(found[name], f"{archive}:{name}") for name in BATCHES]


def _batch(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """(n, 3072) bytes and (n,) labels of one batch file."""
    if not content or len(content) % (PIXELS + 1):
        raise BadInput(
            "dataset-damaged",
            f"{where} has {len(content)} bytes, not a multiple of {PIXELS + 1}; it is truncated "
            f"or not CIFAR-10",
        )
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, PIXELS + 1)
    return rows[:, 1:], rows[:, 0].astype(np.int64)
