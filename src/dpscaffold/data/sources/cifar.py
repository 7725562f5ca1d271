"""CIFAR-10 from its published files: the binary or the Python version, packed or unpacked.

Reference: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dpscaffold.data.pool import Pool
from dpscaffold.data.sources.catalogue import CATALOGUE, data_folder, md5_of
from dpscaffold.data.sources.images import Part
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
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
#: MD5 of the two published archives.
_ARCHIVES = {
    "cifar-10-binary.tar.gz": CATALOGUE["cifar10"].files[0].md5,
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
}


def cifar10(data_dir: str | Path | None = None, part: Part = "train", verify: bool = True) -> Pool:
    """CIFAR-10: 50,000 train and 10,000 test photographs, rows of 3,072 bytes (red, green, blue
    planes).

    Looks in ``<data folder>/cifar10`` for ``cifar-10-batches-bin/``, ``cifar-10-batches-py/`` and
    the two archives, in this order, and reads archives without unpacking them. Python batches are
    read with an unpickler that builds arrays and nothing else.
    """
    folder = data_folder(data_dir) / "cifar10"
    if part not in ("train", "test", "both"):
        raise BadInput("unknown-choice", f"part is '{part}'; it must be 'train', 'test' or 'both'")
    names = {"train": _TRAIN, "test": ("test_batch",), "both": (*_TRAIN, "test_batch")}[part]
    batches = [_batch(content, where) for content, where in _contents(folder, names, verify)]
    pixels = np.concatenate([x for x, _ in batches])
    return Pool(
        pixels,
        np.concatenate([y for _, y in batches]),
        Target.of(CLASSES),
        "CIFAR-10",
        scale=1 / 255,
    )


def _contents(folder: Path, names: tuple[str, ...], verify: bool) -> list[tuple[bytes, str]]:
    """The bytes of each batch file and where they were found."""
    for unpacked, suffix in (("cifar-10-batches-bin", ".bin"), ("cifar-10-batches-py", "")):
        paths = [folder / unpacked / f"{name}{suffix}" for name in names]
        if all(path.is_file() for path in paths):
            return [(path.read_bytes(), str(path)) for path in paths]
    for archive, md5 in _ARCHIVES.items():
        if (folder / archive).is_file():
            if verify and md5_of(folder / archive) != md5:
                raise BadInput(
                    "dataset-damaged",
                    f"{folder / archive} is not the published file: its MD5 is not {md5}; fetch "
                    f"it again",
                )
            return _unpacked(folder / archive, names)
    raise BadInput(
        "dataset-not-found",
        f"CIFAR-10 is not in {folder}; run 'dpscaffold data download cifar10', or say where it is "
        f"with --data-dir or DPSCAFFOLD_DATA",
    )


def _unpacked(archive: Path, names: tuple[str, ...]) -> list[tuple[bytes, str]]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                stem = Path(member.name).name.removesuffix(".bin")
                if stem in names and member.isfile():
                    content = tar.extractfile(member)
                    found[stem] = content.read() if content else b""
    except (tarfile.TarError, EOFError, OSError, zlib.error) as problem:
        raise BadInput(
            "dataset-damaged", f"{archive} is a damaged archive ({problem}); fetch it again"
        ) from None
    missing = [name for name in names if name not in found]
    if missing:
        raise BadInput("dataset-damaged", f"{archive} has no {missing[0]}; fetch it again")
    return [(found[name], f"{archive}:{name}") for name in names]


def _batch(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """(n, 3072) bytes and (n,) labels of one batch file of either version."""
    if content[:1] == b"\x80" and len(content) % (PIXELS + 1):
        return _python_batch(content, where)
    if not content or len(content) % (PIXELS + 1):
        raise BadInput(
            "dataset-damaged",
            f"{where} has {len(content)} bytes, not a multiple of {PIXELS + 1}; it is truncated "
            f"or not CIFAR-10",
        )
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, PIXELS + 1)
    return rows[:, 1:], rows[:, 0].astype(np.int64)


def _python_batch(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        table = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = np.asarray(table[b"data"]), np.asarray(table[b"labels"], dtype=np.int64)
    except BadInput:
        raise
    except Exception:  # a damaged pickle may raise anything at all
        raise BadInput(
            "dataset-damaged", f"{where} is not a CIFAR-10 batch or is damaged; fetch it again"
        ) from None
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), PIXELS) or labels.ndim != 1:
        raise BadInput(
            "dataset-damaged",
            f"{where} has pixels of shape {pixels.shape} and {len(labels)} labels; expected (n, "
            f"{PIXELS}) bytes and n labels",
        )
    return pixels, labels


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that can build NumPy arrays and nothing that runs code."""

    _ALLOWED = frozenset(
        {
            ("ndarray", "numpy"),
            ("dtype", "numpy"),
            ("_reconstruct", "multiarray"),
            ("encode", "_codecs"),
        }
    )

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (name, module.split(".")[-1]) not in self._ALLOWED or module.split(".")[0] not in (
            "numpy",
            "_codecs",
        ):
            raise BadInput(
                "unsafe-pickle",
                f"a CIFAR-10 batch asks for {module}.{name}, which no published batch does; it is "
                f"not loaded",
            )
        if name == "_reconstruct":
            from numpy._core import multiarray

            made: Callable[..., Any] = multiarray._reconstruct
            return made
        found: Callable[..., Any] = super().find_class(module, name)
        return found
