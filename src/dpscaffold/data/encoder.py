"""A frozen network from an ONNX file as a preprocessing step.

The network is public: it was trained on other records, so its outputs cost no ε. Its file travels
inside the model, with its digest. onnxruntime executes it; no Python code of anybody is run.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpscaffold.data.prepared import same_fields
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from dpscaffold.privacy import Cost, Protection

#: Rows that are encoded together.
_ROWS = 256
#: Networks that are ready to run, by digest.
_SESSIONS: dict[str, Any] = {}


@dataclass(frozen=True, eq=False)
class Encoder:
    """Rows through a frozen network. ``network`` is the ONNX file as bytes (uint8), ``digest`` its
    SHA-256, ``shape`` what one row is reshaped to, and ``outputs`` the number of features."""

    network: np.ndarray
    digest: str
    shape: tuple[int, ...]
    outputs: int
    name: str
    protection: ClassVar[Protection] = "public"
    cost: ClassVar[Cost | None] = None
    __eq__ = same_fields
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if hashlib.sha256(self.network.tobytes()).hexdigest() != self.digest:
            raise ValueError("the encoder's file does not have its digest")

    @classmethod
    def read(cls, path: str, digest: str | None = None) -> Encoder:
        """From an ONNX file; a ``digest`` that is given must be the file's."""
        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as problem:
            raise BadInput(
                "file-unreadable",
                f"encoder: path is {path}, which cannot be read ({problem.strerror}); name an "
                f"ONNX file",
            ) from None
        found = hashlib.sha256(content).hexdigest()
        if digest is not None and digest.lower() != found:
            raise BadInput(
                "encoder-changed",
                f"encoder: {path} has the SHA-256 {found}, and sha256 is {digest}; restore the "
                f"file that was meant, or change sha256 and train again",
            )
        session = _session(content, path)
        shape = _input_shape(session, path)
        return cls(
            np.frombuffer(content, np.uint8),
            found,
            shape,
            _outputs(session, shape, path),
            Path(path).name,
        )

    @property
    def width(self) -> int:
        """d, the number of columns that it takes."""
        return math.prod(self.shape)

    @property
    def sentence(self) -> str:
        """What was done, for people."""
        return (
            f"Rows went through the frozen network {self.name} (SHA-256 {self.digest[:32]}…), "
            f"record by record, which gave {self.outputs} features. The network must not have been "
            f"trained on these records: nothing here can check that."
        )

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        if rows.shape[1] != self.width:
            raise BadInput(
                "wrong-shape",
                f"encoder: {self.name} takes {list(self.shape)}, which is {self.width} numbers, "
                f"and the rows have {rows.shape[1]} columns; give the rows that it was made for",
            )
        out = np.empty((len(rows), self.outputs), np.float32)
        for start in range(0, len(rows), _ROWS):
            block = slice(start, start + _ROWS)
            out[block] = _encoded(self._session, rows[block], self.shape)
        return out

    @property
    def _session(self) -> Any:
        """One session for each network in a process; a step itself can be copied and pickled."""
        if self.digest not in _SESSIONS:
            _SESSIONS[self.digest] = _session(self.network.tobytes(), self.name)
        return _SESSIONS[self.digest]


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise BadInput(
            "package-missing",
            "encoder: an ONNX network needs onnxruntime; install it with: pip install "
            "'dpscaffold[onnx]'",
        ) from None
    return onnxruntime


@cache
def _options() -> Any:
    """One thread and deterministic sums, so that a row gives the same features again."""
    runtime = _runtime()
    options = runtime.SessionOptions()
    options.use_deterministic_compute = True
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return options


def _session(content: bytes, path: str) -> Any:
    runtime, options = _runtime(), _options()
    try:
        return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as problem:  # onnxruntime's errors share no base class
        first = str(problem).strip().splitlines()[0]
        raise BadInput(
            "encoder-unreadable",
            f"encoder: {path} is no network that onnxruntime can run ({first}); export it as one "
            f"ONNX file, with its weights inside",
        ) from None


def _input_shape(session: Any, path: str) -> tuple[int, ...]:
    """The shape of one row, from the network's only input."""
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type != "tensor(float)":
        raise BadInput(
            "encoder-unfit",
            f"encoder: {path} has {len(inputs)} input(s), the first of type {inputs[0].type}; it "
            f"needs one input of type tensor(float)",
        )
    batch, *shape = inputs[0].shape
    if isinstance(batch, int) or not shape or not all(isinstance(n, int) for n in shape):
        raise BadInput(
            "encoder-unfit",
            f"encoder: the input of {path} has the shape {inputs[0].shape}; export it with a free "
            f"first dimension (the rows) and fixed ones after it",
        )
    return tuple(shape)


def _outputs(session: Any, shape: tuple[int, ...], path: str) -> int:
    """The number of features, from a row of zeros."""
    if len(session.get_outputs()) != 1:
        raise BadInput(
            "encoder-unfit",
            f"encoder: {path} has {len(session.get_outputs())} outputs; export it with one",
        )
    found = _encoded(session, np.zeros((2, math.prod(shape)), np.float32), shape)
    if found.dtype != np.float32 or found.shape[0] != 2 or not found.shape[1]:
        raise BadInput(
            "encoder-unfit",
            f"encoder: {path} gives {found.dtype} of shape {list(found.shape)} for two rows; it "
            f"must give float32 numbers, one row for each row",
        )
    return int(found.shape[1])


def _encoded(session: Any, rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """(N, d) → (N, outputs)."""
    given = np.ascontiguousarray(rows, np.float32).reshape(len(rows), *shape)
    answers = np.asarray(session.run(None, {session.get_inputs()[0].name: given})[0])
    return answers.reshape(len(answers), -1)
