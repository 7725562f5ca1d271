"""Which parameters of a module have rules, found out by running it on one record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpscaffold.tasks.rules import rule_for

Parameters = Mapping[str, Tensor]

#: For each layer, its own name of a parameter ("weight") → the module's name of it.
Parts = Mapping[str, Mapping[str, str]]

#: How a module is run on one record, a batch of one: parameters by name and features → scores (C,).
Forward = Callable[[Parameters, Tensor], Tensor]


class Irregular(Exception):
    """The module called its layers otherwise than when its wiring was found."""


@dataclass(frozen=True)
class Call:
    """One use of a layer that has a rule: its name, and the shape of its output for one record."""

    layer: str
    shape: torch.Size


@dataclass(frozen=True)
class Wiring:
    """How per-example gradients of a module are found.

    ``calls`` are the uses of layers with rules, in order; ``parts`` tells for each of those layers
    which of its parameters ("weight", "bias") is which parameter of the module, among those whose
    every use is such a call. ``slow`` are the other parameters that matter: torch.func gives them
    one gradient per example.
    """

    calls: tuple[Call, ...]
    parts: Parts
    slow: tuple[str, ...]

    @property
    def shown(self) -> int:
        """How many numbers the layers with rules give for one record."""
        return sum(call.shape.numel() for call in self.calls)


@dataclass
class Recorder:
    """What the layers with rules were given, while :func:`listening`."""

    wiring: Wiring
    taps: tuple[Tensor, ...]
    inputs: list[Tensor] = field(default_factory=list)

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        """A forward hook that notes the input and adds a tap, which is zero, to the output: the
        gradient with respect to the tap is the output's error."""

        def note(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            place = len(self.inputs)
            if place == len(self.taps) or self.wiring.calls[place] != Call(name, output.shape):
                raise Irregular(name)
            self.inputs.append(args[0])
            return output + self.taps[place]

        return note


@contextmanager
def listening(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Hook the layers that have rules for the time of one forward pass."""
    layers = dict(module.named_modules())
    handles = [
        layers[name].register_forward_hook(recorder.hook(name)) for name in recorder.wiring.parts
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if len(recorder.inputs) != len(recorder.taps):
        raise Irregular("a layer was not called")


@contextmanager
def differentiable() -> Iterator[None]:
    """Record gradients, and keep attention off its shortcut for evaluation, which has none."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def all_slow(names: tuple[str, ...]) -> Wiring:
    """The wiring that uses no rule at all."""
    return Wiring((), {}, names)


def _regular(parts: Parts, uses: Sequence[_Use], nodes: Container[object]) -> Parts:
    """The layers whose every use is one that a rule understands."""
    irregular = {use.layer for use in uses if use.shape is None or use.node not in nodes}
    return {name: own for name, own in parts.items() if name not in irregular}


def _ruled(layers: Parts, counted: Counter[str], called: Counter[str]) -> Parts:
    """The parameters that are left to the rules; layers without any are dropped."""
    kept = {
        name: {part: key for part, key in own.items() if 0 < counted[key] == called[key]}
        for name, own in layers.items()
    }
    return {name: own for name, own in kept.items() if own}


def find_wiring(module: nn.Module, params: Parameters, forward: Forward, row: Tensor) -> Wiring:
    """The wiring of a module, by running it once on one record.

    A parameter is left to the rules only if the graph of the loss uses it exactly as often as
    layers with rules were called with it: a weight that is also used by other means (a decoder that
    reads an embedding's weight, say) would otherwise lose a part of its gradient, and clip too
    little. The backward pass is run too, so that a module which overwrites what a layer was given
    is refused here as autograd refuses it.
    """
    leaves = {key: value.detach().requires_grad_() for key, value in params.items()}
    parts = _parts(module, set(params))
    uses: list[_Use] = []
    with differentiable(), _noting(module, list(parts), uses):
        total = forward(leaves, row).sum()
        if total.requires_grad:
            torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
    counted, nodes = _uses_in_graph(total, leaves)
    regular = _regular(parts, uses, nodes)
    called = Counter(key for use in uses for key in regular.get(use.layer, {}).values())
    kept = _ruled(regular, counted, called)
    calls = [Call(use.layer, use.shape) for use in uses if use.shape and use.layer in kept]
    slow = [key for key in params if counted[key] not in (0, called[key])]
    return Wiring(tuple(calls), kept, tuple(slow))


def check_uses(wiring: Wiring, loss: Tensor, leaves: Parameters) -> None:
    """Refuse a forward pass that used a parameter otherwise than in the wiring's calls.

    A module may decide by its parameters, or by what it remembers, what it does: its wiring is
    therefore compared with the graph of every pass.
    """
    expected = Counter(key for call in wiring.calls for key in wiring.parts[call.layer].values())
    counted, _ = _uses_in_graph(loss, leaves)
    for key in leaves:
        if counted[key] != expected[key]:
            raise Irregular(key)


@dataclass(frozen=True)
class _Use:
    """A call of a layer: the shape of its output, None if it is not a call that rules know, and the
    output's node in the graph."""

    layer: str
    shape: torch.Size | None
    node: object


@contextmanager
def _noting(module: nn.Module, names: list[str], uses: list[_Use]) -> Iterator[None]:
    """Note every call of some layers."""

    def note(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[object, ...], kwargs: object, out: object) -> None:
            plain = isinstance(out, Tensor) and not kwargs and len(args) == 1
            shape = out.shape if plain and isinstance(out, Tensor) else None
            uses.append(_Use(name, shape, getattr(out, "grad_fn", None)))

        return hook

    layers = dict(module.named_modules())
    handles = [layers[name].register_forward_hook(note(name), with_kwargs=True) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parts(module: nn.Module, learnt: set[str]) -> dict[str, dict[str, str]]:
    """Layers with rules and the names of their learnt parameters; one that is shared goes by its
    first name."""
    names = {id(value): key for key, value in module.named_parameters()}
    parts = {}
    for name, layer in module.named_modules():
        if rule_for(layer) is None:
            continue
        held = {part: value for part, value in layer._parameters.items() if value is not None}
        own = {part: names[id(v)] for part, v in held.items() if names[id(v)] in learnt}
        if own:
            parts[name] = own
    return parts


def _uses_in_graph(root: Tensor, leaves: Parameters) -> tuple[Counter[str], set[object]]:
    """How often each leaf is used in the graph that ends in ``root``, and the graph's nodes."""
    keys = {id(value): key for key, value in leaves.items()}
    counted: Counter[str] = Counter()
    nodes: set[object] = set()
    waiting: list[object] = [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        for following, _ in node.next_functions:  # type: ignore[attr-defined]
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                counted[keys.get(id(leaf), "")] += 1
            waiting.append(following)
    return counted, nodes
