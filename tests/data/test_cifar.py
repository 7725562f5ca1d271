"""CIFAR-10 in both published formats, packed and unpacked, with small files made here."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

from dpscaffold.data import cifar10

NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (4, 3072)).astype(np.uint8), rng.integers(0, 10, 4)


def binary(number: int) -> bytes:
    pixels, labels = batch(number)
    return np.concatenate([labels.astype(np.uint8)[:, None], pixels], axis=1).tobytes()


def pickled(number: int) -> bytes:
    pixels, labels = batch(number)
    return pickle.dumps(
        {b"data": pixels, b"labels": labels.tolist(), b"batch_label": b"x"}, protocol=2
    )


def pack(path: Path, contents: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in contents.items():
            entry = tarfile.TarInfo(f"cifar-10-batches/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def place(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    make = binary if "bin" in how else pickled
    suffix = ".bin" if "bin" in how else ""
    contents = {f"{name}{suffix}": make(i) for i, name in enumerate(NAMES)}
    if how.startswith("packed"):
        pack(
            folder / ("cifar-10-binary.tar.gz" if "bin" in how else "cifar-10-python.tar.gz"),
            contents,
        )
        return
    inside = folder / ("cifar-10-batches-bin" if "bin" in how else "cifar-10-batches-py")
    inside.mkdir()
    for name, content in contents.items():
        (inside / name).write_bytes(content)


@pytest.mark.parametrize("how", ["bin", "py", "packed bin", "packed py"])
def test_every_published_form_gives_the_same_pool(tmp_path: Path, how: str) -> None:
    place(tmp_path, how)
    pool = cifar10(tmp_path, part="both", verify=False)
    np.testing.assert_array_equal(pool.features, np.concatenate([batch(i)[0] for i in range(6)]))
    np.testing.assert_array_equal(pool.labels, np.concatenate([batch(i)[1] for i in range(6)]))
    assert len(cifar10(tmp_path, part="test", verify=False)) == 4


def test_python_2_pickles_are_read(tmp_path: Path) -> None:
    """The published batches name NumPy's old module; the unpickler maps it."""
    place(tmp_path, "py")
    for path in (tmp_path / "cifar10" / "cifar-10-batches-py").iterdir():
        path.write_bytes(
            path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        )
    assert len(cifar10(tmp_path, verify=False)) == 20


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("this must never be printed",)

    place(tmp_path, "py")
    path = tmp_path / "cifar10" / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Evil(), b"labels": []}, protocol=2))
    with refuses("unsafe-pickle"):
        cifar10(tmp_path, verify=False)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("data_batch_1.bin", b"short", "dataset-damaged: 3073"),
        ("data_batch_1.bin", b"", "dataset-damaged: 3073"),
        ("data_batch_1.bin", bytes([10]) + bytes(3072), "bad-labels: contain 10"),
    ],
)
def test_damaged_binary_batches(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    place(tmp_path, "bin")
    (tmp_path / "cifar10" / "cifar-10-batches-bin" / name).write_bytes(content)
    with refuses(said):
        cifar10(tmp_path, verify=False)


def test_damaged_archives_and_pickles(tmp_path: Path) -> None:
    place(tmp_path, "packed py")
    archive = tmp_path / "cifar10" / "cifar-10-python.tar.gz"
    with refuses("dataset-damaged"):
        cifar10(tmp_path)
    archive.write_bytes(archive.read_bytes()[:2000])
    with refuses("dataset-damaged"):
        cifar10(tmp_path, verify=False)
    pack(archive, {"data_batch_1": b"\x80\x02garbage"})
    with refuses("dataset-damaged: data_batch_2"):
        cifar10(tmp_path, verify=False)
    pack(archive, dict.fromkeys(NAMES, b"\x80\x02garbage"))
    with refuses("dataset-damaged: 10 batch"):
        cifar10(tmp_path, verify=False)


def test_absent(tmp_path: Path) -> None:
    with refuses("dataset-not-found"):
        cifar10(tmp_path)
