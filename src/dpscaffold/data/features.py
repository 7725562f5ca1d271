"""Steps that make features without looking at any record: they cost no ε.

Each is a function of public constants, applied to every row by itself, so it belongs to the model
and not to the mechanism. A privacy budget is spent per unit of row norm: features that carry more
of the class per unit of norm give a better model at the same ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpscaffold.data.prepared import same_fields
from dpscaffold.data.preprocessing import CELL, ORIENTATIONS, hog_width
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from dpscaffold.privacy import Cost, Protection

_PUBLIC = "record by record, by public constants (no private record was read)"
#: The public seed of all random directions: no record depends on it, and every site has the same.
_DIRECTIONS = 0
#: Images that are worked on together, so that they fit into a processor's cache.
_IMAGES = 256


@dataclass(frozen=True)
class Hog:
    """Images as histograms of oriented gradients (Dalal and Triggs, 2005), cell by cell.

    ``shape`` is (height, width), or (channels, height, width) as in PyTorch; of several channels
    the one with the largest gradient counts at each pixel. Every 4 × 4 pixels give one histogram of
    8 bins over a full turn. Pixels are expected in [0, 1].

    >>> Hog((28, 28))(np.zeros((2, 784), np.float32)).shape
    (2, 392)
    """

    shape: tuple[int, ...]
    protection: ClassVar[Protection] = "public"
    cost: ClassVar[Cost | None] = None

    @property
    def width(self) -> int:
        """d, the number of pixels that it takes."""
        return math.prod(self.shape)

    @property
    def outputs(self) -> int:
        """The number of features that it gives."""
        return hog_width(self.shape)

    @property
    def sentence(self) -> str:
        """What was done, for people."""
        size = " × ".join(map(str, self.shape))
        return (
            f"Images of {size} pixels became histograms of oriented gradients (cells of "
            f"{CELL} × {CELL}, {ORIENTATIONS} orientations), {_PUBLIC}."
        )

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        if rows.shape[1] != self.width:
            raise BadInput(
                "wrong-shape",
                f"hog: shape is {list(self.shape)}, which is {self.width} pixels, and the rows "
                f"have {rows.shape[1]} columns; set shape to the size of the images",
            )
        import torch

        out = np.empty((len(rows), self.outputs), np.float32)
        for start in range(0, len(rows), _IMAGES):
            block = slice(start, start + _IMAGES)
            part = np.ascontiguousarray(rows[block], np.float32)
            out[block] = self.features(torch.from_numpy(part)).numpy()
        return out

    def features(self, rows: Tensor) -> Tensor:
        """(N, pixels) → (N, outputs), as torch operations without parameters."""
        down, across = self._gradients(rows)
        found = self._histograms(down, across)
        found = _blurred(_blurred(found, 2), 3)
        energy = found.square().sum(1, keepdim=True)
        return (found / (energy + 0.5).sqrt()).sqrt().flatten(1)

    def _gradients(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Central differences, (N, height, width) each; zero at the border."""
        from torch.nn.functional import pad

        height, width = self.shape[-2:]
        images = rows.reshape(-1, math.prod(self.shape[:-2]), height, width)
        down = pad(images[:, :, 2:] - images[:, :, :-2], (0, 0, 1, 1))
        across = pad(images[..., 2:] - images[..., :-2], (1, 1))
        if images.shape[1] == 1:
            return down[:, 0], across[:, 0]
        strongest = (down.square() + across.square()).argmax(1, keepdim=True)
        return down.gather(1, strongest)[:, 0], across.gather(1, strongest)[:, 0]

    def _histograms(self, down: Tensor, across: Tensor) -> Tensor:
        """(N, orientations, cells down, cells across): magnitudes by orientation, each shared
        between the two nearest bins."""
        import torch
        from torch.nn.functional import pad

        height, width = self.shape[-2:]
        margin = (0, -width % CELL, 0, -height % CELL)
        down, across = pad(down, margin), pad(across, margin)
        magnitude = (down.square() + across.square()).sqrt()
        steep = down / torch.where(across == 0, torch.full_like(across, 1e-12), across)
        turn = steep.atan() / (2 * math.pi) + 0.25 + 0.5 * (across < 0)
        place = turn * ORIENTATIONS
        return torch.cat([self._bin(place, magnitude, at) for at in range(ORIENTATIONS)], 1)

    def _bin(self, place: Tensor, magnitude: Tensor, at: int) -> Tensor:
        """(N, 1, cells down, cells across): what one bin receives, summed over each cell."""
        import torch
        from torch.nn.functional import avg_pool2d

        apart = (place - at).abs()
        if at == 0:  # a full turn ends where it began
            apart = torch.minimum(apart, ORIENTATIONS - apart)
        shares = magnitude * (1 - apart).clamp_min(0)
        return avg_pool2d(shares[:, None], CELL) * CELL**2


def _blurred(found: Tensor, axis: int) -> Tensor:
    """Each cell with half of its two neighbours along an axis."""
    from torch.nn.functional import pad

    many = found.shape[axis]
    margin = (0, 0, 1, 1) if axis == 2 else (1, 1)
    padded = pad(found, margin)
    before, after = padded.narrow(axis, 0, many), padded.narrow(axis, 2, many)
    return found + 0.5 * (before + after)


@dataclass(frozen=True, eq=False)
class RandomFeatures:
    """x ↦ √(2/D)·cos(xW + b): random Fourier features (Rahimi and Recht, 2007), whose inner
    products approximate a Gaussian kernel. ``weights`` are (d, D) and ``phases`` (D,), float32.

    >>> step = RandomFeatures.drawn(columns=3, features=1000)
    >>> a, b = step(np.float32([[0, 0, 0], [0.5, 1, 1]]))
    >>> abs(float(a @ b) - math.exp(-2.25 / 2)) < 0.1  # exp(−‖x − y‖²/2)
    True
    """

    weights: np.ndarray
    phases: np.ndarray
    protection: ClassVar[Protection] = "public"
    cost: ClassVar[Cost | None] = None
    __eq__ = same_fields
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def drawn(cls, columns: int, features: int) -> RandomFeatures:
        """Weights and phases, the same for everybody, for a kernel of width 1."""
        rng = np.random.Generator(np.random.Philox(_DIRECTIONS))
        weights = rng.standard_normal((columns, features))
        phases = rng.uniform(0, 2 * math.pi, features)
        return cls(weights.astype(np.float32), phases.astype(np.float32))

    @property
    def width(self) -> int:
        """d, the number of columns that it takes."""
        return len(self.weights)

    @property
    def sentence(self) -> str:
        """What was done, for people."""
        return f"Rows became {len(self.phases)} random Fourier features, {_PUBLIC}."

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        if rows.shape[1] != self.width:
            raise BadInput(
                "wrong-shape",
                f"random-features: the step takes {self.width} columns, and the rows have "
                f"{rows.shape[1]}; give the rows that it was made for",
            )
        angles = rows.astype(np.float32, copy=False) @ self.weights + self.phases
        return np.asarray(np.cos(angles) * np.float32(math.sqrt(2 / len(self.phases))))
