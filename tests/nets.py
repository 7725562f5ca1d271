"""Modules of every shape that clipped sums must cope with, over records of twelve numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Net = tuple[Callable[[], nn.Module], tuple[int, ...] | None]


def tokens(x: Tensor, words: int = 11) -> Tensor:
    """Records as word numbers."""
    return (x.nan_to_num(0.0, 0.0, 0.0).abs() * 10).clamp_max(1e6).long() % words


class Twice(nn.Module):
    """One layer called twice, and an embedding whose weight is the decoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(11, 6, padding_idx=3), nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.words(tokens(x))))
        return self.out(torch.tanh(self.inner(h))).mean(1)


class Borrowed(nn.Module):
    """A decoder that reads the embedding's weight without being a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(11, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.inner(self.words(tokens(x)))), self.words.weight).mean(1)


class Decoy(nn.Module):
    """A layer whose call leads nowhere while its weight is used behind its back: as many calls as
    uses, and none of them the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(torch.ones_like(x))
        return F.linear(x, self.layer.weight, self.layer.bias)


class Sequence(nn.Module):
    """Large layers over few places, with time before the batch: norms of products and of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3000, 5)
        self.first, self.second = nn.Linear(5, 120), nn.Linear(120, 130)
        self.norm, self.out = nn.LayerNorm(130), nn.Linear(130, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(tokens(x, 3000)).transpose(0, 1)  # (12, N, 5)
        h = torch.relu(self.second(torch.relu(self.first(h.flatten(0, 1)))))
        return self.out(self.norm(h).view(12, -1, 130).mean(0))


class Attention(nn.Module):
    """A layer without a rule between layers that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(3, 8), nn.Linear(8, 4)
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.view(-1, 4, 3))
        return self.out(self.heads(h, h, h)[0].mean(1))


class Centred(nn.Module):
    """Subtracts the batch's mean: what a record does alone is what counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(12, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.out(torch.tanh(h - 0.5 * h.mean(0, keepdim=True)))


class Doubled(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input) + self.weight.sum()


def hooked() -> nn.Module:
    """A layer that carries a hook of its owner's."""
    net = nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))
    net[0].register_forward_hook(lambda layer, args, output: output * layer.weight.mean())
    return net


def frozen() -> nn.Module:
    """Some parameters are constants: a whole layer, a bias, and a weight next to a learnt bias."""
    net = nn.Sequential(
        nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Dropout(0.5),
        nn.Linear(5, 3),
    )  # fmt: skip
    net[0].requires_grad_(False)
    net[2].bias.requires_grad_(False)
    net[5].weight.requires_grad_(False)
    return net


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 2, groups=2, padding="same", dilation=2, padding_mode="circular"),
        nn.InstanceNorm2d(6, affine=True), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


def one_dimensional() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.LayerNorm([4, 4]), nn.Conv1d(4, 4, 1, bias=False),
        nn.InstanceNorm1d(4, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def three_dimensional() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 2, 2, padding=1, padding_mode="replicate"), nn.RMSNorm(4), nn.ReLU(),
        nn.InstanceNorm3d(2, affine=True), nn.Flatten(), nn.Linear(72, 3),
    )  # fmt: skip


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 7), nn.ReLU(inplace=True), nn.Linear(7, 3))


def reparametrised() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(12, 5)), nn.Tanh(), nn.Linear(5, 3)
    )


#: Name → how to make it, and the shape of its records; and which layers take the slower path.
NETS: dict[str, Net] = {
    "plain": (plain, None),
    "convolutional": (convolutional, (1, 4, 3)),
    "one-dimensional": (one_dimensional, (2, 6)),
    "three-dimensional": (three_dimensional, (1, 2, 2, 3)),
    "twice": (Twice, None),
    "sequence": (Sequence, None),
    "frozen": (frozen, None),
    "centred": (Centred, None),
    "borrowed": (Borrowed, None),
    "decoy": (Decoy, None),
    "attention": (Attention, None),
    "hooked": (hooked, None),
    "reparametrised": (reparametrised, None),
    "subclass": (lambda: nn.Sequential(Doubled(12, 5), nn.Tanh(), nn.Linear(5, 3)), None),
}

SLOW = {
    "borrowed": "words (Embedding)",
    "decoy": "layer (Linear)",
    "attention": "heads (MultiheadAttention), heads.out_proj (NonDynamicallyQuantizableLinear)",
    "hooked": "0 (Linear)",
    "reparametrised": "0 (ParametrizedLinear), 0.parametrizations.weight (ParametrizationList)",
    "subclass": "0 (Doubled)",
}
