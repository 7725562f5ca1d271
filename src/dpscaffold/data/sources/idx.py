"""IDX files, the format of MNIST and its relatives: read and write, gzip or not.

An IDX file is a magic number ``00 00 type rank``, ``rank`` big-endian 32-bit sizes, then the values
in row-major order. Every defect of a file is refused with one sentence that names the file.

Reference: LeCun, Cortes and Burges, "The MNIST database of handwritten digits", section "File
formats".
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

import numpy as np

from dpscaffold.errors import BadInput

#: The type byte of the magic number and the type it represents.
TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"
#: Deflate never expands by more than 1032 to 1; a header that promises more is a lie.
_MOST_EXPANSION = 1100
_CHUNK = 1 << 22


def read_idx(path: str | Path) -> np.ndarray:
    """The array in an IDX file, gzip or not (told apart by its first bytes, not by its name).

    Values come back in the machine's byte order. A file that is missing, truncated, longer than its
    header says, not IDX or not valid gzip is refused.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "labels-idx1-ubyte"
    ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 3, 1, 4]))
    ...     read_idx(path).tolist()
    [3, 1, 4]
    """
    path = Path(path)
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == _GZIP
            size = raw.seek(0, 2)
            raw.seek(0)
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
            return _read(stream, path, size * _MOST_EXPANSION if packed else size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise BadInput(
            "dataset-damaged", f"{path} is a damaged gzip file ({problem}); fetch it again"
        ) from None
    except OSError as problem:
        raise BadInput(
            "file-unreadable", f"{path} cannot be read: {problem.strerror or problem}"
        ) from None


def _read(stream: IO[bytes], path: Path, most: int) -> np.ndarray:
    """Parse an open IDX stream that can hold no more than ``most`` bytes."""
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or magic[3] == 0:
        raise BadInput(
            "dataset-damaged",
            f"{path} is not an IDX file: it starts with {magic.hex(' ') or 'nothing'}, not 00 00, "
            f"a type and a rank",
        )
    sizes = stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise BadInput("dataset-damaged", f"{path} is truncated: it ends inside its header")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    kind = np.dtype(TYPES[magic[2]])
    expected = math.prod(shape) * kind.itemsize
    if expected > most:
        raise BadInput(
            "dataset-damaged",
            f"{path} is truncated: its header promises {shape_text(shape)} values, more than the "
            f"file can hold",
        )
    values = bytearray(expected)
    found = _fill(stream, memoryview(values))
    if found < expected:
        raise BadInput(
            "dataset-damaged",
            f"{path} is truncated: {found} of {expected} bytes of values are there",
        )
    if stream.read(1):
        raise BadInput(
            "dataset-damaged",
            f"{path} holds more bytes than the {shape_text(shape)} values its header promises",
        )
    array = np.frombuffer(values, dtype=kind).reshape(shape)
    return array.astype(kind.newbyteorder("="), copy=False)


def _fill(stream: IO[bytes], view: memoryview) -> int:
    """Read into ``view`` until it is full or the stream ends; how many bytes came."""
    found = 0
    while found < len(view):
        chunk = stream.read(min(_CHUNK, len(view) - found))
        if not chunk:
            break
        view[found : found + len(chunk)] = chunk
        found += len(chunk)
    return found


def shape_text(shape: Sequence[int]) -> str:
    """A shape as people write it.

    >>> shape_text((60000, 28, 28))
    '60000 × 28 × 28'
    """
    return " × ".join(str(n) for n in shape)
