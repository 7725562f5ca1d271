"""Clipped sums of modules from inputs and errors, against gradients taken record by record.

The oracle runs the module as it is, on one record at a time, with autograd in float64.
"""

from __future__ import annotations

import copy
import logging
import math
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nets import NETS, SLOW
from torch import Tensor, nn

from dpscaffold.tasks import Batch, ModuleTask, ghost
from dpscaffold.tasks.contributions import Dense, Factors, LookedUpRows, Outer, Outers, joined
from dpscaffold.tasks.losses import SOFTMAX

ALLOWED = 1 + 1e-6
each_net = pytest.mark.parametrize("name", NETS)


def made(name: str) -> tuple[nn.Module, ModuleTask]:
    torch.manual_seed(3)
    make, shape = NETS[name]
    net = make()
    return net, ModuleTask(net, shape)


def some(name: str, users: int = 3, records: int = 12, seed: int = 0):
    """A task, parameters of several users, and their records: as many as a sequence is long."""
    net, task = made(name)
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(users, records, 12, generator=generator)
    y = torch.randint(0, 3, (users, records), generator=generator)
    params = task.initial(0) + 0.1 * torch.randn(users, task.parameters, generator=generator)
    return net, task, params, x, y


def oracle(net: nn.Module, shape, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of one user's records, (N, P) float64, one backward pass each."""
    net = copy.deepcopy(net).double().eval()
    learnt = [value for value in net.parameters() if value.requires_grad]
    torch.nn.utils.vector_to_parameters(params.double(), learnt)
    rows = []
    for row, label in zip(x.double(), y, strict=True):
        given = row[None] if shape is None else row.view(1, *shape)
        loss = SOFTMAX.values(net(given), label[None])[0]
        found = torch.autograd.grad(loss, learnt, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).flatten()
                    for p, g in zip(learnt, found, strict=True)
                ]
            )
        )
    return torch.stack(rows)


def clipped(gradients: Tensor, weight: Tensor, bound: float) -> Tensor:
    factor = weight.double() * (bound / gradients.norm(dim=1)).clamp_max(1.0)
    return factor @ gradients


# --- agreement ---


@each_net
@pytest.mark.parametrize("bound", [0.05, 1.0, 1e9])
def test_clipped_sums_are_those_of_each_record_alone(name, bound):
    """For every module, with weights: whatever the layers, ties and layouts, the sum is that of
    gradients taken one record at a time."""
    net, task, params, x, y = some(name)
    weight = torch.ones_like(y, dtype=torch.float32)
    weight[0, 4:] = 0.0
    found = task.clipped_sum(params, Batch(x, y, weight), torch.full((3,), bound)).total
    for u in range(3):
        exact = clipped(oracle(net, task.shape, params[u], x[u], y[u]), weight[u], bound)
        assert float((found[u] - exact).norm() / exact.norm()) < 2e-5


@each_net
def test_the_median_is_that_of_the_true_norms(name):
    """The median bound of a batch is the lower median of exact norms."""
    net, task, params, x, y = some(name, users=1)
    bound = task.clipped_sum(params, Batch(x, y), "median").bound
    norms = oracle(net, task.shape, params[0], x[0], y[0]).norm(dim=1)
    assert float(bound) == pytest.approx(float(norms.median()), rel=1e-5)


@each_net
def test_stacks_and_parts_change_nothing(name, monkeypatch):
    """Users one by one, or records a few at a time, give the same sums and bounds."""
    _, task, params, x, y = some(name)
    for clip in (torch.tensor([0.1, 0.5, 2.0]), "median"):
        whole = task.clipped_sum(params, Batch(x, y), clip)
        single = [
            task.clipped_sum(
                params[u : u + 1],
                Batch(x[u : u + 1], y[u : u + 1]),
                clip if isinstance(clip, str) else clip[u : u + 1],
            )
            for u in range(3)
        ]
        monkeypatch.setattr(ghost, "_HELD", 5 * 3 * task.parameters)
        parts = task.clipped_sum(params, Batch(x, y), clip)
        monkeypatch.setattr(ghost, "_STACKED", 0)
        looped = task.clipped_sum(params, Batch(x, y), clip)
        monkeypatch.undo()
        for other in (torch.cat([one.total for one in single]), parts.total, looped.total):
            torch.testing.assert_close(other, whole.total, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(parts.bound, whole.bound)


@settings(max_examples=60)
@given(data=st.data())
def test_convolutions_of_every_kind(data):
    """Dimensions, kernels, strides, padding, its mode, dilation, groups, bias."""
    axes = data.draw(st.integers(1, 3))
    size = data.draw(st.lists(st.integers(3, 6), min_size=axes, max_size=axes))
    groups = data.draw(st.sampled_from([1, 2]))
    each = st.lists(st.integers(1, 2), min_size=axes, max_size=axes).map(tuple)
    stride, dilation = data.draw(each), data.draw(each)
    kernel = data.draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes).map(tuple))
    padding = data.draw(st.sampled_from([0, 1, "valid", "same"]))
    mode = data.draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    assume(padding != "same" or stride == (1,) * axes)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    torch.manual_seed(0)
    layer = kind(
        2, 4, kernel, stride, padding, dilation, groups, data.draw(st.booleans()), padding_mode=mode
    )
    x = torch.randn(1, 3, 2 * math.prod(size))
    try:
        layer(x[0].view(3, 2, *size))
    except (RuntimeError, NotImplementedError):
        assume(False)
    net = nn.Sequential(layer, nn.Tanh(), nn.Flatten())
    task = ModuleTask(net, (2, *size))
    y = torch.zeros(1, 3, dtype=torch.int64)
    params = task.initial(0)[None]
    found = task.clipped_sum(params, Batch(x, y), torch.tensor([0.1])).total[0]
    exact = clipped(oracle(net, task.shape, params[0], x[0], y[0]), torch.ones(3), 0.1)
    assert float((found - exact).norm()) < 1e-5


def test_a_task_can_be_copied_and_pickled_after_use():
    """What was found out about a module travels with its task."""
    _, task, params, x, y = some("twice")
    batch, clip = Batch(x, y), torch.full((3,), 0.5)
    before = task.clipped_sum(params, batch, clip).total
    for other in (copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        assert torch.equal(other.clipped_sum(params, batch, clip).total, before)


def test_opacus_agrees():
    """The hooks of Opacus give the same clipped sum of a convolutional network."""
    opacus = pytest.importorskip("opacus")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )
    x, y = torch.randn(20, 64), torch.randint(0, 3, (20,))
    wrapped = opacus.GradSampleModule(copy.deepcopy(net), loss_reduction="sum")
    SOFTMAX.values(wrapped(x.view(20, 1, 8, 8)), y).sum().backward()
    gradients = torch.cat([p.grad_sample.flatten(1) for p in wrapped.parameters()], 1).double()
    task = ModuleTask(net, (1, 8, 8))
    found = task.clipped_sum(task.initial(0)[None], Batch(x[None], y[None]), torch.tensor([0.7]))
    torch.testing.assert_close(
        found.total[0].double(), clipped(gradients, torch.ones(20), 0.7), rtol=1e-4, atol=1e-5
    )


# --- which path ---


@each_net
def test_the_log_names_what_takes_the_slower_path_and_nothing_else(name, caplog):
    """Once, by layer and kind; modules whose every use has a rule are not mentioned."""
    _, task, params, x, y = some(name)
    with caplog.at_level(logging.WARNING, logger="dpscaffold"):
        for _ in range(2):
            task.clipped_sum(params, Batch(x, y), torch.full((3,), 0.5))
    said = [line for line in caplog.messages if "torch.func" in line]
    assert len(said) == (1 if name in SLOW else 0)
    if name in SLOW:
        assert f"covers {SLOW[name]}; " in said[0]


def test_a_module_that_changes_its_calls_is_still_exact(caplog):
    """A layer that is called more often than when it was first seen: everything takes the slower
    path rather than losing a part of the gradient."""

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out, self.calls = nn.Linear(12, 12), nn.Linear(12, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            for _ in range(1 if self.calls < 3 else 2):
                x = torch.tanh(self.layer(x))
            return self.out(x)

    torch.manual_seed(0)
    task = ModuleTask(Moody())
    x, y = torch.randn(1, 4, 12), torch.zeros(1, 4, dtype=torch.int64)
    params = task.initial(0)[None]
    found = task.clipped_sum(params, Batch(x, y), torch.tensor([0.1])).total[0]
    later = Moody()
    later.load_state_dict(task.module.state_dict())
    later.calls = 3
    exact = clipped(oracle(later, None, params[0], x[0], y[0]), torch.ones(4), 0.1)
    assert float((found - exact).norm()) < 1e-6


def test_a_module_that_uses_a_weight_more_often_later_is_still_exact():
    """A use that is no call, and that only some parameters bring about."""

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.spare = nn.Linear(12, 3), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.layer(x)
            if float(self.layer.bias.sum()) > 100:
                scores = scores + nn.functional.linear(x, self.layer.weight.square())
            return scores

    torch.manual_seed(0)
    net = Fickle()
    task = ModuleTask(net)
    x, y = torch.randn(1, 4, 12), torch.zeros(1, 4, dtype=torch.int64)
    for shift in (0.0, 100.0, 0.0):
        params = task.initial(0)[None].clone()
        params[0, 36:39] += shift
        found = task.clipped_sum(params, Batch(x, y), torch.tensor([0.1])).total[0]
        exact = clipped(oracle(net, None, params[0], x[0], y[0]), torch.ones(4), 0.1)
        assert float((found - exact).norm()) < 1e-6


def test_parameters_that_do_not_matter_have_no_gradient():
    """Next to others, or all of them."""

    class Idle(nn.Module):
        def __init__(self, share: float) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(12, 3, bias=share > 0), nn.Linear(12, 3)
            self.share = share

        def forward(self, x: Tensor) -> Tensor:
            return self.share * self.used(x) if self.share else x[:, :3]

    x, y = torch.randn(1, 4, 12), torch.zeros(1, 4, dtype=torch.int64)
    for share in (0.0, 1.0):
        task = ModuleTask(Idle(share))
        for clip in (torch.tensor([0.1]), "median"):
            found = task.clipped_sum(task.initial(0)[None], Batch(x, y), clip).total[0]
            assert bool((found[-39:] == 0).all())
            assert bool(found.any()) == (share > 0)


def test_the_cheaper_form_is_chosen():
    """One place: two vectors. Few places in a large layer: ghost norms. Many: gradients held."""

    def form(rows: int, columns: int, places: int) -> type:
        part = Outers(torch.ones(1, 1, rows, places), torch.ones(1, 1, columns, places))
        return type(joined([part]))

    assert form(500, 400, 1) is Outer
    assert form(500, 400, 8) is Outers
    assert form(16, 25, 144) is Dense
    table = LookedUpRows(torch.zeros(1, 1, 3, dtype=torch.int64), torch.ones(1, 1, 3, 4), 10_000)
    assert joined([table]) is table
    assert type(joined([table, Dense(torch.ones(1, 1, 40_000))])) is Dense


# --- norms that are never too small ---

exponents = st.floats(-44, 38)


def factors(draw, *shape: int) -> Tensor:
    """Numbers of any magnitude that float32 has."""
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    spread = draw(st.sampled_from([0.0, 3.0, 30.0]))
    powers = draw(exponents) + spread * torch.randn(*shape, generator=generator)
    signs = torch.randn(*shape, generator=generator).sign()
    return (signs * 10.0 ** powers.clamp(-45, 38.4).double()).float()


def forms(draw) -> tuple[Dense | Outer | Outers | LookedUpRows, Tensor]:
    """A contribution of any form, and its gradients (U, N, p) in float64."""
    kind = draw(st.sampled_from(["dense", "outer", "outers", "rows", "cancelling"]))
    rows, columns, places = (draw(st.integers(1, 6)) for _ in range(3))
    if kind == "dense":
        values = factors(draw, 1, 3, rows * columns)
        return Dense(values), values.double()
    if kind == "rows":
        index = torch.randint(0, rows, (1, 3, places))
        part = LookedUpRows(index, factors(draw, 1, 3, places, columns), rows)
        chosen = torch.nn.functional.one_hot(index, rows).double()
        return part, (chosen.transpose(2, 3) @ part.values.double()).flatten(2)
    left, right = factors(draw, 1, 3, rows, places), factors(draw, 1, 3, columns, places)
    if kind == "outer":
        left, right = left[..., 0], right[..., 0]
        product = left.double()[..., :, None] * right.double()[..., None, :]
        return Outer(left, right), product.flatten(2)
    if kind == "cancelling":  # the same places again with the opposite sign, but for a trace
        trace = 1 + 1e-6 * draw(st.integers(0, 3))
        left, right = torch.cat([left, -left * trace], -1), torch.cat([right, right], -1)
    return Outers(left, right), (left.double() @ right.double().transpose(2, 3)).flatten(2)


@settings(max_examples=400)
@given(data=st.data(), bound=st.sampled_from([1e-20, 1e-9, 1e-3, 1.0, 1e20]))
def test_every_form_measures_and_clips_every_magnitude(data, bound):
    """Over the whole range of float32, places that cancel included: no norm is below the true one,
    and what a record adds when clipped by it is at most C(1 + 1e-6), in its own direction."""
    part, exact = forms(data.draw)
    norms = part.squares().sqrt()
    true = exact.norm(dim=2)
    assert bool((norms.clamp_min(1e-12) >= true * (1 - 1e-6)).all())
    factor = (bound / norms.clamp_min(1e-12)).clamp_max(1.0)
    for j in range(3):
        only = torch.zeros_like(factor)
        only[0, j] = factor[0, j]
        added = part.total(Factors(only)).double()[0]
        assert float(added.norm()) <= bound * ALLOWED
        wanted = only[0, j] * exact[0, j]
        # Held sums of places are float32's: where places cancel, so are their digits.
        assert float((added - wanted).norm()) <= 1e-6 * bound + 1e-38


def test_faint_errors_of_long_rows_are_clipped_in_full_precision():
    """Float32 keeps few digits of 10⁻⁴³; a factor must not be rounded away on it."""
    left = torch.tensor([[[1e-43, 7e-44]]])
    right = torch.tensor([[[3e37, 1e30]]])
    part = Outer(left, right)
    norm = part.squares().sqrt()
    assert float(norm) == pytest.approx(math.hypot(*left.double()[0, 0].tolist()) * 3e37, rel=1e-6)
    for bound in (0.7 * float(norm), 0.001 * float(norm)):
        added = part.total(Factors(bound / norm)).double()
        assert float(added.norm()) == pytest.approx(bound, rel=1e-6)


@settings(max_examples=200)
@given(data=st.data())
def test_gradients_that_are_not_finite_add_exactly_nothing(data):
    """By selection: the others' sum is the same to the last bit as with an empty record instead."""
    part, _ = forms(data.draw)
    bad = data.draw(st.sampled_from([math.inf, -math.inf, math.nan]))
    names = {Dense: ["gradients"], LookedUpRows: ["values"]}.get(type(part), ["left", "right"])
    for name in names:
        getattr(part, name)[0, 1] = bad
    norms = part.squares().sqrt()
    assert not bool(norms[0, 1].isfinite())
    factor = (1e-3 / norms.clamp_min(1e-12)).clamp_max(1.0)
    factor[0, 1] = 0.0
    sound = torch.tensor([[True, False, True]])
    found = part.total(Factors(factor, sound))
    for name in names:
        getattr(part, name)[0, 1] = 0.0
    assert torch.equal(found, part.total(Factors(factor)))


@pytest.mark.parametrize("name", ["convolutional", "one-dimensional", "twice", "sequence"])
@settings(max_examples=25)
@given(data=st.data(), bound=st.sampled_from([1e-5, 1.0, 1e4]))
def test_no_record_of_any_module_adds_more_than_c(name, data, bound):
    """Hostile records and hostile parameters: finite, at most C(1 + 1e-6), and apart."""
    _, task, params, x, y = some(name, users=1, records=3)
    params = params * 10.0 ** data.draw(st.sampled_from([0.0, 0.0, 4.0, 18.0, 37.0]))
    x[0, 1] = factors(data.draw, 12)
    wild = st.sampled_from([math.nan, math.inf, -math.inf, 3e38, 0.0, 1e-45])
    x[0, 1, data.draw(st.integers(0, 11))] = data.draw(wild)
    clip = torch.tensor([bound])
    alone = task.clipped_sum(params, Batch(x[:, 1:2], y[:, 1:2]), clip).total
    assert bool(alone.isfinite().all()) and float(alone.double().norm()) <= bound * ALLOWED
    others = torch.tensor([[1.0, 0.0, 1.0]])
    alone = task.clipped_sum(params, Batch(x, y, others), clip).total
    tame = torch.where(others[..., None] == 1, x, 0.0)
    assert torch.equal(alone, task.clipped_sum(params, Batch(tame, y, others), clip).total)
