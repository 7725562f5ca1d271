"""Which published files a dataset consists of, where they are had, and how they are recognised.

A dataset lives in ``<data folder>/<dataset>/``. Checksums are MD5, as their publishers give them:
they guard against damage and mix-ups, not against forgery.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from dpscaffold.errors import BadInput, nearest

#: The environment variable that names the data folder.
VARIABLE = "DPSCAFFOLD_DATA"


@dataclass(frozen=True)
class Published:
    """One file: its name, its size in bytes and its MD5, each None where the publisher gives
    none."""

    name: str
    size: int | None = None
    md5: str | None = None


@dataclass(frozen=True)
class Dataset:
    """A dataset: its files, the places they are published at (tried in order), and one line about
    it.

    ``unpack`` says that the one file is an archive whose ``.gz`` members are put next to it.
    """

    name: str
    about: str
    files: tuple[Published, ...]
    places: tuple[str, ...] = ()
    unpack: bool = False


CATALOGUE = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            "mnist",
            "MNIST: 60,000 + 10,000 handwritten digits, 28 × 28, 10 classes",
            (
                Published(
                    "train-images-idx3-ubyte.gz", 9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"
                ),
                Published("train-labels-idx1-ubyte.gz", 28881, "d53e105ee54ea40749a09fcbcd1e9432"),
                Published("t10k-images-idx3-ubyte.gz", 1648877, "9fb629c4189551a2d022fa330f9573f3"),
                Published("t10k-labels-idx1-ubyte.gz", 4542, "ec29112dd5afa0611ce80d1b7f02629c"),
            ),
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        ),
        Dataset(
            "fashion-mnist",
            "Fashion-MNIST: 60,000 + 10,000 pictures of clothes, 28 × 28, 10 classes",
            (
                Published(
                    "train-images-idx3-ubyte.gz",
                    None,
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                ),
                Published(
                    "train-labels-idx1-ubyte.gz",
                    None,
                    "25c81989df183df01b3e8a0aad5dffbe",
                ),
                Published(
                    "t10k-images-idx3-ubyte.gz",
                    None,
                    "bef4ecab320f06d8554ea6380940ec79",
                ),
                Published(
                    "t10k-labels-idx1-ubyte.gz",
                    None,
                    "bb300cfdad3c16e7a12a480ee83cd310",
                ),
            ),
            ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        ),
        Dataset(
            "emnist",
            "EMNIST: handwritten letters and digits in six splits, 28 × 28, up to 62 classes",
            (Published("gzip.zip", None, "58c8d27c78d21e728a6bc7b3cc06412e"),),
            (
                "https://biometrics.nist.gov/cs_links/EMNIST/",
                "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/",
            ),
            unpack=True,
        ),
        Dataset(
            "emnist47",
            "EMNIST-47 subset: 94,874 + 15,803 upright letters and digits, 28 × 28, 47 classes",
            (
                Published(
                    "train-images-idx3-ubyte.gz", 23621971, "e8c2e612c3d4c0d1fcdf1034105eb631"
                ),
                Published("train-labels-idx1-ubyte.gz", 67229, "1d2600af043e23718350f1f3fe7e4cfa"),
                Published("test-images-idx3-ubyte.gz", 3942487, "e4897e850fdc37057e8ef0174882aa55"),
                Published("test-labels-idx1-ubyte.gz", 11194, "b7be9c33f6cc1a66831240070391b91b"),
            ),
        ),
        Dataset(
            "cifar10",
            "CIFAR-10: 50,000 + 10,000 colour photographs, 32 × 32 × 3, 10 classes",
            (Published("cifar-10-binary.tar.gz", None, "c32a1d4ab5d03f1284b67883e8d87530"),),
            ("https://www.cs.toronto.edu/~kriz/",),
        ),
    )
}


def dataset(name: str) -> Dataset:
    """The catalogue's entry of that name.

    >>> dataset("mnist").files[0].name
    'train-images-idx3-ubyte.gz'
    """
    if name not in CATALOGUE:
        raise BadInput(
            "unknown-dataset",
            f"no dataset is called '{name}'{nearest(name, CATALOGUE)}; there are "
            f"{', '.join(CATALOGUE)}",
        )
    return CATALOGUE[name]


def data_folder(chosen: str | Path | None = None) -> Path:
    """Where datasets live: ``chosen``, else $DPSCAFFOLD_DATA, else the platform's folder for user
    data.

    >>> data_folder("somewhere").name
    'somewhere'
    """
    if chosen is not None:
        return Path(chosen).expanduser()
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser()
    return Path(platformdirs.user_data_dir("dpscaffold", appauthor=False))


def md5_of(path: Path) -> str:
    """The MD5 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
