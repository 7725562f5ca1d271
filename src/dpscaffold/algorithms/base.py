"""The central type: an algorithm is three pure functions on flat vectors.

Everything here works alike on one user's vectors of length P (as the loop engine calls it) and on a
stack of users, (U, P) (as the simulator does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Broadcast:
    """Server → user at the start of a round: x^{t−1} and, for SCAFFOLD, c^{t−1}."""

    round: int
    params: Tensor
    control: Tensor | None = None


@dataclass(frozen=True)
class Memory:
    """What stays with a user between rounds: SCAFFOLD's c_i, or nothing."""

    control: Tensor | None = None


@dataclass(frozen=True)
class Upload:
    """User → server at the end of a round: the differences Δy_i and, for SCAFFOLD, Δc_i."""

    params: Tensor
    control: Tensor | None = None


@dataclass(frozen=True)
class Local:
    """What K local steps leave behind: the last y_i^K, the mean of the K noised and regularised
    gradients H + λy, and Kη_l (a float, or (U, 1) for a stack)."""

    params: Tensor
    mean_gradient: Tensor
    travelled: float | Tensor


@dataclass(frozen=True)
class Server:
    """The server's state: x^t and, for SCAFFOLD, c^t."""

    params: Tensor
    control: Tensor | None = None


Direction = Callable[[Tensor, Tensor, Broadcast, Memory], Tensor]
Finish = Callable[[Local, Broadcast, Memory], tuple[Upload, Memory]]
Update = Callable[[Server, Upload, float], Server]


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm as three pure functions.

    - ``direction(gradient, y, broadcast, memory)``: where a local step goes, given the *noised*
      gradient H + λy at y. Whatever is added here stands outside clipping and noise.
    - ``finish(local, broadcast, memory)``: the upload and the new memory after K steps.
    - ``update(server, mean, rate)``: the server's move, given ``mean``: the mean of Δy_i over the
      participants and (1/M)ΣΔc_i.

    ``memory`` says that users keep a control variate; ``warm_up`` is the algorithm of the
    warm-start rounds, itself an ordinary :class:`Algorithm`. A variant is the base with one
    function replaced:

    >>> import torch
    >>> from dpscaffold import fedavg
    >>> def signs(gradient, y, broadcast, memory):
    ...     return gradient.sign()
    >>> signed = fedavg().replace(name="signed", direction=signs)
    >>> signed.direction(torch.tensor([-3.0, 2.0]), None, None, None).tolist()
    [-1.0, 1.0]
    """

    name: str
    direction: Direction
    finish: Finish
    update: Update
    memory: bool = False
    warm_up: Algorithm | None = None
    full_pass: bool = False  # FedSGD: K·s must be 1

    def replace(self, **changes: object) -> Algorithm:
        """This algorithm with some parts replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def phase(self, round: int, warm_rounds: int) -> Algorithm:
        """The algorithm of this round (rounds count from 1): the warm-up first, then the real
        one."""
        return self.warm_up if self.warm_up is not None and round <= warm_rounds else self
