"""Images in IDX files (MNIST and its relatives) and the digits that come with scikit-learn, as
pools.

Pixels stay bytes until they are assigned to users; then they are float32 in [0, 1], one flat row
per image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpscaffold.data.pool import Pool
from dpscaffold.data.sources.catalogue import CATALOGUE, data_folder
from dpscaffold.data.sources.idx import read_idx, shape_text
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Target

#: What the classes of images are called, in order. EMNIST's merged classes hold both cases of the
#: letters whose cases look alike.
DIGITS = "0123456789"
MERGED = DIGITS + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + "abdefghnqrt"
CLOTHES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


def mnist(data_dir: str | Path | None = None, test: bool = False) -> Pool:
    """MNIST: its 60,000 training digits, or its 10,000 test digits."""
    return _published("mnist", "MNIST", data_dir, (test,), DIGITS)


def fashion_mnist(data_dir: str | Path | None = None) -> Pool:
    """Fashion-MNIST: its 60,000 training pictures of clothes."""
    return _published("fashion-mnist", "Fashion-MNIST", data_dir, (False,), CLOTHES)


def emnist47(data_dir: str | Path | None = None) -> Pool:
    """The EMNIST-47 subset: 110,677 upright letters and digits in the classes of EMNIST 'balanced'.

    It is not EMNIST 'balanced' (131,600 images): results on it carry its own name.
    """
    return _published("emnist47", "EMNIST-47 subset", data_dir, (False, True), MERGED)


def emnist(data_dir: str | Path | None = None) -> Pool:
    """EMNIST 'balanced', its images (published transposed) put upright."""
    folder = data_folder(data_dir) / "emnist"
    pairs = [_pair(folder, f"emnist-balanced-{name}", "emnist") for name in ("train", "test")]
    images = [pixels.transpose(0, 2, 1) for pixels, _ in pairs]
    return _pool(images, [kinds.astype(np.int64) for _, kinds in pairs], MERGED, "EMNIST balanced")


def digits() -> Pool:
    """1,797 handwritten digits of 8 × 8 pixels, bundled with scikit-learn: real images with no
    download.

    >>> pool = digits()
    >>> len(pool), pool.features.shape[1], pool.classes
    (1797, 64, 10)

    Reference: Alpaydin and Kaynak, "Optical recognition of handwritten digits", UCI repository,
    1998.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return Pool(
        bunch.data.astype(np.uint8),
        bunch.target.astype(np.int64),
        Target.of(DIGITS),
        "digits",
        scale=1 / 16,
    )


def _published(
    name: str,
    title: str,
    data_dir: str | Path | None,
    tests: Sequence[bool],
    classes: Sequence[str],
) -> Pool:
    """The pool of a dataset whose files are ``train-…`` and ``t10k-…`` or ``test-…``; ``tests``
    says of each part that is pooled whether it is that of the test images."""
    files = CATALOGUE[name].files
    stems = [files[2 if test else 0].name.split("-")[0] for test in tests]
    pairs = [_pair(data_folder(data_dir) / name, stem, name) for stem in stems]
    return _pool([x for x, _ in pairs], [y.astype(np.int64) for _, y in pairs], classes, title)


def _pair(folder: Path, stem: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The (n, h, w) images and (n,) labels whose files start with ``stem``."""
    paths = [
        _find(folder, f"{stem}-images-idx3-ubyte", name),
        _find(folder, f"{stem}-labels-idx1-ubyte", name),
    ]
    images, labels = (read_idx(path) for path in paths)
    for array, rank, path in ((images, 3, paths[0]), (labels, 1, paths[1])):
        if array.ndim != rank or array.dtype != np.uint8:
            raise BadInput(
                "dataset-damaged",
                f"{path} has {shape_text(array.shape)} values of type {array.dtype}; expected "
                f"{rank} dimensions of bytes",
            )
    if len(images) != len(labels):
        raise BadInput(
            "dataset-damaged",
            f"{paths[0]} has {len(images)} images and {paths[1].name} {len(labels)} labels; the "
            f"counts must agree",
        )
    return images, labels


def _find(folder: Path, stem: str, name: str) -> Path:
    """The file, gzip or not, in the folder or its ``gzip`` subfolder (as EMNIST's archive
    unpacks)."""
    for path in (folder / f"{stem}.gz", folder / stem, folder / "gzip" / f"{stem}.gz"):
        if path.is_file():
            return path
    raise BadInput(
        "dataset-not-found",
        f"{stem}.gz is not in {folder}; run 'dpscaffold data download {name}', or say where it is "
        f"with --data-dir or DPSCAFFOLD_DATA",
    )


def _pool(
    images: list[np.ndarray], labels: list[np.ndarray], classes: Sequence[str], title: str
) -> Pool:
    shapes = {x.shape[1:] for x in images}
    if len(shapes) > 1:
        raise BadInput(
            "dataset-damaged",
            f"{title}: train and test images differ in size: "
            f"{' and '.join(map(shape_text, sorted(shapes)))}",
        )
    flat = [x.reshape(len(x), -1) for x in images]
    pixels = flat[0] if len(flat) == 1 else np.concatenate(flat)
    return Pool(pixels, np.concatenate(labels), Target.of(classes), title, scale=1 / 255)
