"""The labels of a table: classes, numbers, or several labels that each hold or do not.

Everyone who reads labels uses :func:`read_labels`; what happens to a record without a label is for
the caller to decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpscaffold.data.tables.cells import CellReader
from dpscaffold.data.tables.missing import BLANKS
from dpscaffold.errors import BadInput
from dpscaffold.federation.labels import pack
from dpscaffold.federation.schema import Target

#: What a statement repeats where nobody said beforehand which classes there are.
LABELS_READ = "The list of labels was read from the data: outside the guarantee."
#: How a file says that one of several labels holds, or does not.
HOLDS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


@dataclass(frozen=True)
class Labels:
    """Labels (N,) as a target's numbers, and which rows (N,) bool have one; the others are 0.
    ``problem`` says what is wrong with the first of them."""

    values: np.ndarray
    known: np.ndarray
    problem: str = ""

    def require(self) -> np.ndarray:
        """The labels; refused where a row has none."""
        if self.problem:
            raise BadInput("bad-labels", self.problem)
        return self.values


def read_labels(target: Target, columns: Mapping[str, pa.Array], reader: CellReader) -> Labels:
    """The labels in these columns: one of a class or number, several of a target of labels."""
    if target.kind == "labels":
        found = [_held(name, column, reader) for name, column in columns.items()]
        values = pack(np.stack([each.values for each in found], axis=1))
        known = np.logical_and.reduce([each.known for each in found])
        problem = next((each.problem for each in found if each.problem), "")
        return Labels(np.where(known, values, 0), known, problem)
    ((name, column),) = columns.items()
    if target.kind == "number":
        values, strange = reader.numbers(name, column)
        said = ", and numbers are expected"
        missing, strange = np.isnan(values) & ~strange, strange | np.isinf(values)
        return _labels(values, missing, strange, name, column, said)
    text, wrong = reader.texts(name, column)
    codes, gone = index_of(text, target.classes)
    said = f", which is no class of the model; its classes are {', '.join(target.classes[:10])}"
    return _labels(codes, gone & ~wrong, wrong | ((codes < 0) & ~gone), name, text, said)


def _held(name: str, column: pa.Array, reader: CellReader) -> Labels:
    """Whether one of several labels holds, (N,) bool."""
    text, wrong = reader.texts(name, column)
    codes, gone = index_of(pc.utf8_lower(text), tuple(HOLDS))
    said = (
        "; where there are several labels, each column holds 1 (or true) where its label holds "
        "and else 0 (or false)"
    )
    values, strange = np.array([*HOLDS.values(), False])[codes], wrong | ((codes < 0) & ~gone)
    return _labels(values, gone & ~wrong, strange, name, text, said, "label column")


def _labels(
    values: np.ndarray,
    missing: np.ndarray,
    strange: np.ndarray,
    name: str,
    cells: pa.Array,
    said: str,
    what: str = "column",
) -> Labels:
    known, problem = ~(missing | strange), ""
    if missing.any():
        problem = f"column '{name}' lacks a value; leave such rows out"
    elif strange.any():
        cell = cells[int(np.flatnonzero(strange)[0])].as_py()
        problem = f"{what} '{name}' holds '{cell}'{said}"
    return Labels(np.where(known, values, np.zeros((), values.dtype)), known, problem)


def index_of(text: pa.Array, known: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Which of the known values each text is, -1 for none of them, (N,) int64; and where there is
    no text, (N,) bool.

    >>> [part.tolist() for part in index_of(pa.array(["m", "x", None]), ("f", "m"))]
    [[1, -1, -1], [False, False, True]]
    """
    plain = pa.array([value.strip(BLANKS) for value in known], pa.string())
    found = pc.index_in(text, plain).fill_null(-1).to_numpy(zero_copy_only=False)
    return found.astype(np.int64), text.is_null().to_numpy(zero_copy_only=False)


def by_value(text: str) -> tuple[int, float, str]:
    """The order of classes, categories and users: numbers by value, then texts by letter.

    >>> sorted(["b", "10", "9"], key=by_value)
    ['9', '10', 'b']
    """
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
