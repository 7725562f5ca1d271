"""Prepared federations on disk: a folder of ``.npy`` files and a small ``federation.json``.

Loaded with ``mapped=True`` the tables stay in their files and are paged in as they are read, so a federation
may exceed memory; a :class:`FederationWriter` builds one user by user, never holding more than one. A folder
appears under its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from dpscaffold.data.pool import blocks
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation, PreprocessingCost, Records

FORMAT = 1
_INDEX = "federation.json"
_TYPES = {"features": np.dtype("<f4"), "labels": np.dtype("<i8"), "offsets": np.dtype("<i8")}
_HEADER = 128

Arrays = tuple[torch.Tensor | np.ndarray, torch.Tensor | np.ndarray]


class _Column:
    """One ``.npy`` file written from front to back; its header is filled in at the end."""

    def __init__(self, path: Path, kind: np.dtype[Any]):
        self.path, self.kind = path, kind
        self.file = open(path, "wb")
        self.file.write(bytes(_HEADER))
        self.hash = hashlib.blake2b(digest_size=16)

    def append(self, array: np.ndarray) -> None:
        content = np.ascontiguousarray(array, dtype=self.kind)
        self.hash.update(content)
        self.file.write(content.data)

    def finish(self, shape: tuple[int, ...]) -> dict[str, Any]:
        entry = repr({"descr": self.kind.str, "fortran_order": False, "shape": shape}).encode()
        room = _HEADER - 10
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\x01\x00" + room.to_bytes(2, "little") + entry.ljust(room - 1) + b"\n")
        self.file.close()
        return {"bytes": self.path.stat().st_size, "blake2b": self.hash.hexdigest()}


class _Table:
    """The three files of a train or test table."""

    def __init__(self, folder: Path, part: str):
        self.columns = {name: _Column(folder / f"{part}-{name}.npy", kind) for name, kind in _TYPES.items()}
        self.columns["offsets"].append(np.zeros(1, dtype=np.int64))
        self.rows = 0
        self.users = 0

    def append(self, features: np.ndarray, labels: np.ndarray) -> None:
        self.columns["features"].append(features)
        self.columns["labels"].append(labels)

    def end_user(self, records: int) -> None:
        self.rows += records
        self.users += 1
        self.columns["offsets"].append(np.array([self.rows]))

    def finish(self, dimension: int) -> dict[str, Any]:
        shapes = {"features": (self.rows, dimension), "labels": (self.rows,), "offsets": (self.users + 1,)}
        return {column.path.name: column.finish(shapes[name]) for name, column in self.columns.items()}

    def close(self) -> None:
        for column in self.columns.values():
            column.file.close()


class FederationWriter:
    """Build a stored federation one user at a time.

    Use it as a context manager: the folder appears when the block ends without an error, and nothing stays
    behind when it does not.

    >>> with tempfile.TemporaryDirectory() as place:
    ...     with FederationWriter(Path(place) / "small", classes=2) as writer:
    ...         for _ in range(3):
    ...             writer.append((np.zeros((4, 2)), np.array([0, 1, 0, 1])), (np.ones((1, 2)), np.array([0])))
    ...     load(Path(place) / "small", mapped=True).train.sizes.tolist()
    [4, 4, 4]
    """

    def __init__(
        self,
        folder: str | Path,
        classes: int,
        title: str = "federation",
        preprocessing: Sequence[str] = (),
        preprocessing_costs: Sequence[PreprocessingCost] = (),
        overwrite: bool = False,
    ):
        self.folder = Path(folder)
        _require_free(self.folder, overwrite)
        if classes < 2:
            raise BadInput(f"classes is {classes}; a classifier needs at least 2")
        self.classes = classes
        self.about = {
            "title": title,
            "preprocessing": list(preprocessing),
            "preprocessing_costs": [asdict(cost) for cost in preprocessing_costs],
        }
        self.names: list[str] = []
        self.dimension: int | None = None
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.draft = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}-", dir=self.folder.parent))
        except OSError as problem:
            raise BadInput(f"{self.folder} cannot be written: {problem.strerror}") from None
        self.tables = {part: _Table(self.draft, part) for part in ("train", "test")}

    def append(self, train: Arrays, test: Arrays, name: str | None = None) -> None:
        """Add a user; its arrays are checked here, so that a loaded folder need not be read through."""
        name = str(self.tables["train"].users) if name is None else name
        for part, (features, labels) in (("train", train), ("test", test)):
            x, y = np.asarray(features, dtype=np.float32), np.asarray(labels, dtype=np.int64)
            self._check(x, y, name, part)
            self.tables[part].append(x, y)
            self.tables[part].end_user(len(y))
        self.names.append(name)

    def _check(self, x: np.ndarray, y: np.ndarray, name: str, part: str) -> None:
        if x.ndim != 2 or len(x) != len(y) or not len(y):
            raise BadInput(f"user {name}: {part} features of shape {x.shape} and {len(y)} labels; expected (records, features), at least one record")
        if self.dimension is None:
            self.dimension = x.shape[1]
        if x.shape[1] != self.dimension:
            raise BadInput(f"user {name} has {x.shape[1]} features, and the users before it {self.dimension}")
        if y.min() < 0 or y.max() >= self.classes:
            raise BadInput(f"user {name}: {part} labels run from {y.min()} to {y.max()}; they must lie in 0 to {self.classes - 1}")
        if not np.isfinite(x).all():
            raise BadInput(f"user {name}: {part} features contain NaN or infinity; clean or impute them first")

    def close(self) -> Path:
        """Finish the files and give the folder its name."""
        if self.dimension is None:
            self.abandon()
            raise BadInput(f"{self.folder} would hold no user; append at least one")
        files = {name: entry for table in self.tables.values() for name, entry in table.finish(self.dimension).items()}
        numbered = all(name == str(i) for i, name in enumerate(self.names))
        index = {
            "format": FORMAT,
            "users": len(self.names),
            "dimension": self.dimension,
            "classes": self.classes,
            **self.about,
            "names": None if numbered else self.names,
            "files": files,
        }
        (self.draft / _INDEX).write_text(json.dumps(index, indent=1, ensure_ascii=False), encoding="utf-8")
        os.chmod(self.draft, 0o755)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        os.replace(self.draft, self.folder)
        return self.folder

    def abandon(self) -> None:
        """Remove what was written so far."""
        for table in self.tables.values():
            table.close()
        shutil.rmtree(self.draft, ignore_errors=True)

    def __enter__(self) -> FederationWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def save(federation: Federation, folder: str | Path, overwrite: bool = False) -> Path:
    """Write a federation to a folder, in blocks: a mapped one is copied without being loaded."""
    writer = FederationWriter(
        folder, federation.classes, federation.title, federation.preprocessing, federation.preprocessing_costs, overwrite
    )
    with writer:
        writer.names, writer.dimension = list(federation.names), federation.dimension
        for part, table in (("train", federation.train), ("test", federation.test)):
            for block in blocks(*table.features.shape):
                writer.tables[part].append(table.features[block].numpy(), table.labels[block].numpy())
            for size in table.sizes.tolist():
                writer.tables[part].end_user(size)
    return Path(folder)


def load(folder: str | Path, mapped: bool = True, verify: bool = False) -> Federation:
    """Read a stored federation.

    ``mapped`` leaves the tables in their files (read-only; writing into them is an error the operating
    system punishes); otherwise they are read into memory. Names, shapes and sizes are always checked;
    ``verify`` also reads everything and compares checksums.
    """
    folder = Path(folder)
    index = _read_index(folder)
    tables = []
    for part in ("train", "test"):
        columns = {name: _read_column(folder, f"{part}-{name}.npy", kind, index, mapped, verify) for name, kind in _TYPES.items()}
        tables.append(Records(**columns))
    try:
        names = tuple(index["names"] or ())
        costs = tuple(PreprocessingCost(**cost) for cost in index["preprocessing_costs"])
        federation = Federation(
            tables[0], tables[1], int(index["classes"]), names, index["title"], tuple(index["preprocessing"]), costs, mapped
        )
    except (KeyError, TypeError) as problem:
        raise BadInput(f"{folder / _INDEX} is damaged ({problem}); prepare the federation again") from None
    for table in tables:
        if len(table.features) != len(table.labels) or int(table.offsets[-1]) != len(table.labels) or bool((table.sizes < 1).any()):
            raise BadInput(f"{folder} is damaged: its features, labels and offsets do not fit together; prepare it again")
    return federation


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    if not path.is_file():
        raise BadInput(f"{folder} holds no prepared federation ({_INDEX} is missing); make one with 'dpscaffold data prepare'")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        found = index["format"]
        index["files"].keys()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{path} is damaged; prepare the federation again") from None
    if found != FORMAT:
        raise BadInput(f"{path} has format {found}, and this version reads format {FORMAT}; prepare the federation again")
    return index  # type: ignore[no-any-return]


def _read_column(
    folder: Path, name: str, kind: np.dtype[Any], index: dict[str, Any], mapped: bool, verify: bool
) -> torch.Tensor:
    path, entry = folder / name, index["files"].get(name, {})
    size = path.stat().st_size if path.is_file() else None
    if size is None or size != entry.get("bytes"):
        found = "is missing" if size is None else f"has {size} bytes and should have {entry.get('bytes')}"
        raise BadInput(f"{path} {found}; the folder is damaged, prepare the federation again")
    try:
        array = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as problem:
        raise BadInput(f"{path} is not a readable .npy file ({problem}); prepare the federation again") from None
    if array.dtype != kind or array.ndim != (2 if name.endswith("features.npy") else 1):
        raise BadInput(f"{path} holds {array.dtype} of rank {array.ndim}; expected {kind}; prepare the federation again")
    if verify:
        state = hashlib.blake2b(digest_size=16)
        for block in blocks(len(array), math.prod(array.shape[1:])):
            state.update(np.ascontiguousarray(array[block]))
        if state.hexdigest() != entry.get("blake2b"):
            raise BadInput(f"{path} has changed since it was written (its checksum differs); prepare the federation again")
    with warnings.catch_warnings():
        # Torch warns that the mapping is read-only; that is what it is for.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.asarray(array))


def _require_free(folder: Path, overwrite: bool) -> None:
    """A folder that exists is replaced only when asked, and only if it is a stored federation."""
    if folder.exists() and not (overwrite and (folder / _INDEX).is_file()):
        hint = "choose another name" if not (folder / _INDEX).is_file() else "choose another name or overwrite it"
        raise BadInput(f"{folder} exists already; {hint}")
