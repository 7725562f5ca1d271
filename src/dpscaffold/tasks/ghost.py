"""Clipped gradient sums of any module, without a per-example gradient where none is needed.

One forward and one backward pass over all records give what went into each layer and the error that
came back; from these the rules of :mod:`~dpscaffold.tasks.rules` give each record's gradient norm
(Goodfellow 2015 for linear layers; Bu, Mao and Xu 2022 for the choice between *ghost* norms and
held gradients) and the clipped sum Σ_j min(1, C/‖g_j‖)·g_j, without a second backward pass: for
most layers the sum is one more product of matrices that are there already.

Every record is run as a batch of one under ``vmap``, so that a record's gradient is its own
whatever the module does with its batch dimension, and records cannot mix. Parameters that no rule
covers get their gradients by ``torch.func``, the slower path, which is named in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vmap

from dpscaffold.tasks.base import BOUNDS, Clip, clip_factors
from dpscaffold.tasks.contributions import Contribution, Dense, Factors, joined
from dpscaffold.tasks.rules import rule_for
from dpscaffold.tasks.wiring import (
    Forward,
    Irregular,
    Parameters,
    Recorder,
    Wiring,
    all_slow,
    check_uses,
    differentiable,
    find_wiring,
    listening,
)

#: Scores (N, C) and labels (N,) to losses (N,).
RowLoss = Callable[[Tensor, Tensor], Tensor]

#: How many numbers are held at a time (2^25 floats are 128 MB), and how many times that on a GPU,
#: where a part costs its launches whatever its size.
_HELD, _ON_GPU = 1 << 25, 8

#: Up to this many outputs of layers, users with convolutions are stacked on a CPU (measured).
_STACKED = 1 << 21

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordStack:
    """Records of U users: ``features`` (U, N, D), ``labels`` (U, N) and ``weight`` (U, N) or
    None."""

    features: Tensor
    labels: Tensor
    weight: Tensor | None

    def part(self, start: int, stop: int) -> RecordStack:
        """Some of each user's records."""
        cut = slice(start, stop)
        weight = None if self.weight is None else self.weight[:, cut]
        return RecordStack(self.features[:, cut], self.labels[:, cut], weight)

    def of(self, user: int) -> RecordStack:
        """One user's records, still stacked."""
        cut = slice(user, user + 1)
        weight = None if self.weight is None else self.weight[cut]
        return RecordStack(self.features[cut], self.labels[cut], weight)


class Ghost:
    """The clipped sums of one module.

    ``shapes`` are the learnt parameters in the order of the flat vector, ``forward`` runs the
    module on one record (parameters by name, features (D,) → scores (C,)) and ``loss`` maps scores
    and labels to losses, row by row.
    """

    def __init__(
        self,
        module: nn.Module,
        shapes: Mapping[str, torch.Size],
        forward: Forward,
        loss: RowLoss,
    ) -> None:
        self.module, self.shapes, self.forward, self.loss = module, dict(shapes), forward, loss
        #: What was said of parameters that take the slower path; nothing where none does.
        self.said = ""
        self._layers = dict(module.named_modules())
        self._wirings: dict[tuple[torch.Size, torch.dtype], tuple[Wiring, int]] = {}
        self._convolves = any(
            isinstance(layer, nn.modules.conv._ConvNd) for layer in module.modules()
        )

    def clipped_sum(
        self, params: Tensor, rows: RecordStack, clip: Tensor | str
    ) -> tuple[Tensor, Tensor]:
        """Σ_j w_j·min(1, C/‖g_j‖)·g_j, (U, P), and the bounds C, (U,).

        A record whose gradient is not finite adds exactly zero.
        """
        if self._loops(params, rows):
            bounds = [clip] * len(params) if isinstance(clip, str) else clip.split(1)
            found = [
                self.clipped_sum(params[u : u + 1], rows.of(u), bound)
                for u, bound in enumerate(bounds)
            ]
            return torch.cat([total for total, _ in found]), torch.cat([c for _, c in found])
        for wired in (self._wired, self._wired_anew):
            try:
                return self._in_parts(*wired(params, rows), params, rows, clip)
            except Irregular:  # the module does otherwise than when it was looked at
                continue
        every = self._remember(rows, all_slow(tuple(self.shapes)))
        return self._in_parts(*every, params, rows, clip)

    def _loops(self, params: Tensor, rows: RecordStack) -> bool:
        """Whether to take one user after the other: on a CPU, convolutions with a kernel a user are
        slow, and launching several small ones is slower still."""
        if len(params) == 1 or params.device.type != "cpu" or not self._convolves:
            return False
        try:
            wiring, _ = self._wired(params, rows)
        except Irregular:
            return False
        return rows.labels.numel() * wiring.shown > _STACKED

    def _in_parts(
        self, wiring: Wiring, numbers: int, params: Tensor, rows: RecordStack, clip: Tensor | str
    ) -> tuple[Tensor, Tensor]:
        """A part of the records at a time, so that memory stays bounded."""
        users, records = rows.labels.shape
        held = _HELD * (_ON_GPU if params.is_cuda else 1)
        step = max(1, held // (users * numbers))
        parts = [rows.part(start, start + step) for start in range(0, records, step)]
        if isinstance(clip, str) and len(parts) != 1:
            # The median needs every norm before the first gradient can be clipped.
            every = torch.cat([self._norms(wiring, params, part) for part in parts], 1)
            bound = clip_factors(every, rows.weight, "median")[1]
            assert bound is not None
            clip = bound.to(params.dtype)
        total = torch.zeros_like(params)
        for part in parts:
            added, clip = self._clipped(wiring, params, part, clip)
            total += added
        assert isinstance(clip, Tensor)
        return total, clip

    def _clipped(
        self, wiring: Wiring, params: Tensor, rows: RecordStack, clip: Tensor | str
    ) -> tuple[Tensor, Tensor]:
        by_name = self._contributions(wiring, params, rows)
        if not by_name:  # nothing that is learnt matters
            by_name = {"": Dense(params.new_zeros(*rows.labels.shape, 1))}
        norms = _norms(by_name)
        used: Clip = "median" if isinstance(clip, str) else clip.clamp_max(BOUNDS[1])
        factor, bound = clip_factors(norms, rows.weight, used)
        assert factor is not None and bound is not None
        sound = norms.isfinite()
        if norms.device.type == "cpu" and bool(sound.all()):
            scale = Factors(factor)
        else:
            scale = Factors(torch.where(sound, factor, 0.0), sound)
        parts = [
            by_name[key].total(scale)
            if key in by_name
            else params.new_zeros(len(params), shape.numel())
            for key, shape in self.shapes.items()
        ]
        return torch.cat(parts, 1), bound.to(params.dtype) if isinstance(clip, str) else clip

    def _norms(self, wiring: Wiring, params: Tensor, rows: RecordStack) -> Tensor:
        """The norms of the records' gradients, (U, N)."""
        return _norms(self._contributions(wiring, params, rows))

    def _contributions(
        self, wiring: Wiring, params: Tensor, rows: RecordStack
    ) -> dict[str, Contribution]:
        """What each record's gradient is made of, by parameter."""
        inputs, errors, slow = self._both_passes(wiring, params, rows)
        parts: dict[str, list[Contribution]] = {}
        for call, given, error in zip(wiring.calls, inputs, errors, strict=True):
            layer = self._layers[call.layer]
            rule = rule_for(layer)
            assert rule is not None
            found = rule(layer, given, error)
            for part, key in wiring.parts[call.layer].items():
                parts.setdefault(key, []).append(found[part])
        for key, gradient in zip(wiring.slow, slow, strict=True):
            parts[key] = [Dense(gradient.flatten(2))]
        return {key: joined(several) for key, several in parts.items()}

    def _both_passes(
        self, wiring: Wiring, params: Tensor, rows: RecordStack
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Inputs (U, N, …) and errors (U, N, …) of each call, and gradients (U, N, …) of the slow
        parameters."""
        single = len(params) == 1  # without a dimension of users, which would cost time
        lead = rows.labels.shape[1:] if single else rows.labels.shape
        features = rows.features[0] if single else rows.features
        zero = params.new_zeros((), requires_grad=True)
        with differentiable():
            leaves = self._leaves(params, single)
            slow = self._per_record(wiring.slow, leaves, lead)
            taps = tuple(zero.expand(*lead, *call.shape) for call in wiring.calls)
            records = vmap(partial(self._one, wiring), in_dims=(None, 0, 0, 0))
            run = records if single else vmap(records)
            scores, inputs = run(leaves, slow, taps, features)
            scores = scores.view(rows.labels.numel(), -1)
            loss = self.loss(scores, rows.labels.flatten()).sum()
            check_uses(wiring, loss, leaves)
            wanted = [*taps, *slow.values()]
            found = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
        filled = _filled(found, wanted, len(taps))
        if single:
            filled, inputs = [value[None] for value in filled], [given[None] for given in inputs]
        return [given.detach() for given in inputs], filled[: len(taps)], filled[len(taps) :]

    def _per_record(
        self, keys: Sequence[str], leaves: dict[str, Tensor], lead: torch.Size
    ) -> dict[str, Tensor]:
        """Take these leaves out, and repeat them for each record."""
        return {
            key: leaves.pop(key).unsqueeze(len(lead) - 1).expand(*lead, *self.shapes[key])
            for key in keys
        }

    def _leaves(self, params: Tensor, single: bool) -> dict[str, Tensor]:
        """The parameters by name, detached, with gradients."""
        return {
            key: (value[0] if single else value).detach().requires_grad_()
            for key, value in self._named(params).items()
        }

    def _one(
        self,
        wiring: Wiring,
        shared: Parameters,
        own: Parameters,
        taps: tuple[Tensor, ...],
        row: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """Scores of one record, and what each layer with a rule was given."""
        recorder = Recorder(wiring, taps)
        with listening(self.module, recorder):
            scores = self.forward({**shared, **own}, row)
        return scores, recorder.inputs

    def _named(self, params: Tensor) -> dict[str, Tensor]:
        """(U, P) as parameters by name, (U, *shape) each."""
        parts = params.split([shape.numel() for shape in self.shapes.values()], dim=1)
        return {
            key: part.unflatten(1, shape) if shape else part[:, 0]
            for (key, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def _wired(self, params: Tensor, rows: RecordStack) -> tuple[Wiring, int]:
        """The wiring for records of this shape, and how many numbers it holds per record."""
        known = self._wirings.get((rows.features.shape[2:], rows.features.dtype))
        return known or self._wired_anew(params, rows)

    def _wired_anew(self, params: Tensor, rows: RecordStack) -> tuple[Wiring, int]:
        """Look at what the module does with a record, and measure what that holds."""
        row = rows.features[0, 0]
        first = {name: value[0] for name, value in self._named(params.detach()).items()}
        wiring = find_wiring(self.module, first, self.forward, row)
        one = RecordStack(row[None, None], rows.labels.new_zeros(1, 1), None)
        held = self._contributions(wiring, params[:1], one).values()
        return self._remember(rows, wiring, sum(part.held for part in held) + 2 * wiring.shown)

    def _remember(self, rows: RecordStack, wiring: Wiring, numbers: int = 0) -> tuple[Wiring, int]:
        """Keep a wiring, and say in the log which parameters take the slower path."""
        numbers = numbers or sum(shape.numel() for shape in self.shapes.values())
        self._wirings[rows.features.shape[2:], rows.features.dtype] = wiring, numbers
        if wiring.slow:
            self.said = slower_path(self.module, wiring.slow)
            _log.warning(self.said)
        return wiring, numbers


def slower_path(module: nn.Module, slow: tuple[str, ...]) -> str:
    """The sentence for the log about parameters that no rule covers."""
    owners: dict[str, str] = {}
    for key in slow:
        owner = key.rpartition(".")[0]
        owners[owner or "the module"] = type(module.get_submodule(owner)).__name__
    named = ", ".join(f"{owner} ({kind})" for owner, kind in owners.items())
    return (
        f"no rule for per-example gradients covers {named}; they are taken by torch.func, which is "
        f"slower"
    )


def _norms(by_name: Mapping[str, Contribution]) -> Tensor:
    """‖g_j‖ over all parameters, (U, N) float64; NaN where it is not finite."""
    squares = torch.stack([part.squares() for part in by_name.values()]).sum(0)
    return torch.where(squares.isfinite(), squares, float("nan")).sqrt_()


def _filled(found: Sequence[Tensor | None], wanted: Sequence[Tensor], needed: int) -> list[Tensor]:
    """Gradients as autograd found them, with zeros where it found none; the first ``needed`` must
    have been found."""
    if any(error is None for error in found[:needed]):
        raise Irregular("a layer's output is not used")
    return [
        torch.zeros_like(like) if value is None else value
        for value, like in zip(found, wanted, strict=True)
    ]
