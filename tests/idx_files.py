"""IDX files for tests."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

from dpscaffold.data.sources.idx import TYPES


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write an array of a type that IDX knows; a name that ends in ``.gz`` is compressed."""
    kinds = {np.dtype(text).newbyteorder("="): code for code, text in TYPES.items()}
    code = kinds[array.dtype.newbyteorder("=")]
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(TYPES[code]).tobytes()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
