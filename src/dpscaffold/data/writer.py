"""Write a federation to a folder, user by user: a federation larger than memory is built here.

The folder holds three ``.npy`` files for train, three for test (features, labels, offsets),
``preparation.npz`` with the arrays of the steps that made the features, and ``federation.json``
with everything else, sizes and checksums included.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from dpscaffold.atomic import draft_of, put_in_place
from dpscaffold.data.stored import ARRAYS, entries
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Prepared, Target

#: 3 is written where the target is a number with a range: its labels are stored as training uses
#: them.
FORMAT, RANGED = 2, 3
INDEX = "federation.json"
_HEADER = 128

Arrays = tuple[Any, Any]


def column_types(target: Target) -> dict[str, np.dtype[Any]]:
    """The columns of a table and what is stored in each."""
    return {
        "features": np.dtype("<f4"),
        "labels": target.dtype.newbyteorder("<"),
        "offsets": np.dtype("<i8"),
    }


class _Column:
    """One ``.npy`` file written from front to back; its header is filled in at the end."""

    def __init__(self, path: Path, kind: np.dtype[Any]):
        self.path, self.kind = path, kind
        self.file = open(path, "wb")  # noqa: SIM115 (open until the last user is appended)
        self.file.write(bytes(_HEADER))
        self.hash = hashlib.blake2b(digest_size=16)

    def append(self, array: np.ndarray) -> None:
        content = np.ascontiguousarray(array, dtype=self.kind)
        self.hash.update(content.data)
        self.file.write(content.data)

    def finish(self, shape: tuple[int, ...]) -> dict[str, Any]:
        entry = repr({"descr": self.kind.str, "fortran_order": False, "shape": shape}).encode()
        room = _HEADER - 10
        self.file.seek(0)
        self.file.write(
            b"\x93NUMPY\x01\x00" + room.to_bytes(2, "little") + entry.ljust(room - 1) + b"\n"
        )
        self.file.close()
        return {"bytes": self.path.stat().st_size, "blake2b": self.hash.hexdigest()}


class _TableFiles:
    """The three files of a train or test table."""

    def __init__(self, folder: Path, part: str, types: dict[str, np.dtype[Any]]):
        self.columns = {
            name: _Column(folder / f"{part}-{name}.npy", kind) for name, kind in types.items()
        }
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
        shapes = {
            "features": (self.rows, dimension),
            "labels": (self.rows,),
            "offsets": (self.users + 1,),
        }
        return {
            column.path.name: column.finish(shapes[name]) for name, column in self.columns.items()
        }

    def close(self) -> None:
        for column in self.columns.values():
            column.file.close()


class FederationWriter:
    """Build a stored federation one user at a time.

    Use it as a context manager: the folder appears when the block ends without an error, and
    nothing stays behind if it does not.

    Args:
        folder: The folder to write.
        classes: The number of classes, their names, or a
            :class:`~dpscaffold.federation.schema.Target`.
        title: One line for tables and figures.
        preparation: The steps that made the features of raw rows.
        overwrite: Replace a federation that is there.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from dpscaffold.data.storage import load
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with FederationWriter(Path(place) / "small", classes=2) as writer:
    ...         for _ in range(3):
    ...             writer.append((np.zeros((4, 2)), [0, 1, 0, 1]), (np.ones((1, 2)), [0]))
    ...     load(Path(place) / "small").train.sizes.tolist()
    [4, 4, 4]
    """

    def __init__(
        self,
        folder: str | Path,
        classes: int | Sequence[str] | Target,
        title: str = "federation",
        preparation: Sequence[Prepared] = (),
        overwrite: bool = False,
    ):
        self.folder = Path(folder)
        require_free(self.folder, overwrite)
        self.target = Target.of(classes)
        self.title = title
        self.steps, self.arrays = entries(preparation)
        self.names: list[str] = []
        self.dimension: int | None = None
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.draft = draft_of(self.folder)
        except OSError as problem:
            raise BadInput(
                "cannot-write", f"{self.folder} cannot be written: {problem.strerror}"
            ) from None
        self.tables = {
            part: _TableFiles(self.draft, part, column_types(self.target))
            for part in ("train", "test")
        }

    def append(self, train: Arrays, test: Arrays, name: str | None = None) -> None:
        """Add a user; its arrays are checked here, so that a loaded folder need not be read
        through. Numbers to predict are given in their own units."""
        name = str(self.tables["train"].users) if name is None else name
        for part, (features, labels) in (("train", train), ("test", test)):
            x, y = np.asarray(features, dtype=np.float32), np.asarray(labels, self.target.dtype)
            self._check(x, y, name, part)
            self.tables[part].append(x, self.target.scaled(y, clip=part == "train"))
            self.tables[part].end_user(len(y))
        self.names.append(name)

    def append_table(
        self, part: str, rows: Iterable[np.ndarray], labels: torch.Tensor, sizes: torch.Tensor
    ) -> None:
        """Write a complete train or test table.

        Args:
            part: ``"train"`` or ``"test"``.
            rows: Blocks of feature rows.
            labels: The labels of all rows, as a federation stores them.
            sizes: The number of rows of each user.
        """
        table, start = self.tables[part], 0
        for block in rows:
            if not np.isfinite(block).all():
                raise BadInput(
                    "not-finite",
                    f"{part} features contain NaN or infinity; clean or impute them first",
                )
            table.append(block, labels[start : start + len(block)].numpy())
            start += len(block)
            self.dimension = block.shape[1]
        for size in sizes.tolist():
            table.end_user(size)

    def _check(self, x: np.ndarray, y: np.ndarray, name: str, part: str) -> None:
        if x.ndim != 2 or len(x) != len(y) or not len(y):
            raise BadInput(
                "wrong-shape",
                f"user {name}: {part} features of shape {x.shape} and {len(y)} labels; expected "
                f"(records, features), at least one record",
            )
        if self.dimension is None:
            self.dimension = x.shape[1]
        if x.shape[1] != self.dimension:
            raise BadInput(
                "users-differ",
                f"user {name} has {x.shape[1]} features, and the users before it {self.dimension}",
            )
        complaint = self.target.complaint(y)
        if complaint:
            raise BadInput("bad-labels", f"user {name}: {part} labels {complaint}")
        if not np.isfinite(x).all():
            raise BadInput(
                "not-finite",
                f"user {name}: {part} features contain NaN or infinity; clean or impute them first",
            )

    def close(self) -> Path:
        """Finish the files and give the folder its name."""
        if self.dimension is None:
            self.abandon()
            raise BadInput("no-users", f"{self.folder} would hold no user; append at least one")
        files = {
            name: entry
            for table in self.tables.values()
            for name, entry in table.finish(self.dimension).items()
        }
        if self.arrays:
            path = self.draft / ARRAYS
            np.savez(path, **self.arrays)  # type: ignore[arg-type]
            checksum = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
            files[ARRAYS] = {"bytes": path.stat().st_size, "blake2b": checksum}
        numbered = all(name == str(i) for i, name in enumerate(self.names))
        index = {
            "format": FORMAT if self.target.low is None else RANGED,
            "users": len(self.names),
            "dimension": self.dimension,
            "target": self.target.to_dict(),
            "title": self.title,
            "preparation": self.steps,
            "names": None if numbered else self.names,
            "files": files,
        }
        (self.draft / INDEX).write_text(
            json.dumps(index, indent=1, ensure_ascii=False), encoding="utf-8"
        )
        put_in_place(self.draft, self.folder)
        return self.folder

    def abandon(self) -> None:
        """Remove what was written so far."""
        for table in self.tables.values():
            table.close()
        shutil.rmtree(self.draft, ignore_errors=True)

    def __enter__(self) -> FederationWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def require_free(folder: Path, overwrite: bool) -> None:
    """A folder that exists is replaced only when asked, and only if it is a stored federation."""
    if folder.exists() and not (overwrite and (folder / INDEX).is_file()):
        hint = (
            "choose another name"
            if not (folder / INDEX).is_file()
            else "choose another name or overwrite it"
        )
        raise BadInput("file-exists", f"{folder} exists already; {hint}")
    if folder.exists() and (name := _released(folder / INDEX)):
        raise BadInput(
            "repeated-release",
            f"{folder} holds the private {name}, released with noise of the operating system: "
            f"preparing it again would be a second release of the same records, which nothing "
            f"counts; keep it, or prepare under another name and count both",
        )


def _released(index: Path) -> str:
    """What a stored federation has spent with noise that nobody can draw again, or ""."""
    try:
        said = json.loads(index.read_text(encoding="utf-8"))
        costs = [step.get("cost") for step in said["preparation"]]
        spent = [cost["name"] for cost in costs if cost and not cost["seeded"]]
        return str(spent[0]) if spent else ""
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return "statistics"  # an index that cannot be read may have named any
