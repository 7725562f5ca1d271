"""IDX files: what is written is read back, and a damaged file raises BadInput and nothing else."""

from __future__ import annotations

import gzip
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from idx_files import write_idx
from refusals import refuses

from dpscaffold.data.sources.idx import read_idx
from dpscaffold.errors import BadInput

KINDS = ["u1", "i1", "i2", "i4", "f4", "f8"]
arrays = st.sampled_from(KINDS).flatmap(
    lambda kind: hnp.arrays(
        np.dtype(kind),
        hnp.array_shapes(max_dims=4, max_side=5),
        elements={"allow_nan": False} if kind[0] == "f" else None,
    )
)


def idx_bytes(array: np.ndarray) -> bytes:
    """A file of unsigned bytes, put together by hand."""
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


@settings(max_examples=60, deadline=None)
@given(array=arrays, suffix=st.sampled_from(["", ".gz"]))
def test_round_trip(array: np.ndarray, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"values{suffix}"
        write_idx(path, array)
        found = read_idx(path)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_reads_the_published_layout(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(
        bytes.fromhex("00000803 00000002 00000001 00000003".replace(" ", ""))
        + bytes([1, 2, 3, 4, 5, 255])
    )
    assert read_idx(path).tolist() == [[[1, 2, 3]], [[4, 5, 255]]]


def test_big_endian_values(tmp_path: Path) -> None:
    path = tmp_path / "ints"
    path.write_bytes(bytes.fromhex("00000c01 00000001 00000102".replace(" ", "")))
    assert read_idx(path).tolist() == [258]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), packed=st.booleans())
def test_damage_is_refused_or_harmless(data: st.DataObject, packed: bool) -> None:
    """Cut or flip anywhere: BadInput, or, for a flip that leaves a valid file, an array of that
    size."""
    whole = idx_bytes(np.arange(60, dtype=np.uint8).reshape(5, 4, 3))
    content = bytearray(gzip.compress(whole, mtime=0) if packed else whole)
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
        must_fail = True
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        must_fail = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged"
        path.write_bytes(content)
        try:
            found = read_idx(path)
        except BadInput as problem:
            assert str(path) in str(problem) and "\n" not in str(problem)
        else:
            assert not must_fail
            assert found.nbytes in (60, 64 * 60, 60 * 2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "dataset-damaged"),
        (b"\x00\x00\x08", "dataset-damaged"),
        (b"\x89PNG\r\n\x1a\n", "dataset-damaged"),
        (b"\x00\x00\x07\x01\x00\x00\x00\x01a", "dataset-damaged"),
        (b"\x00\x00\x08\x02\x00\x00\x00\x01", "dataset-damaged"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x05abc", "dataset-damaged"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x02abc", "dataset-damaged"),
        (b"\x00\x00\x08\x03" + b"\xff" * 12 + b"abc", "dataset-damaged"),
        (
            gzip.compress(b"\x00\x00\x08\x03" + b"\xff" * 12 + b"abc", mtime=0),
            "dataset-damaged",
        ),
        (
            gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x03abc", mtime=0)[:-6],
            "dataset-damaged",
        ),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with refuses(said):
        read_idx(path)


def test_missing_file(tmp_path: Path) -> None:
    with refuses("file-unreadable"):
        read_idx(tmp_path / "nowhere")
