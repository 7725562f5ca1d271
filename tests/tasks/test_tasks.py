"""Clipping without per-example gradients against explicit ones, and what a task is refused for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from small import TASKS, module
from torch import Tensor, nn
from torch.func import grad, vmap
from toys import explicit_clipped_sum

from dpscaffold import Gaussian, Plan, fedavg, synthetic, train
from dpscaffold.tasks import Batch, Logistic, Mlp, ModuleTask, Task, ghost
from dpscaffold.tasks.base import clip_factors


def per_example(task: Task, params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """∇f of each record at its user's parameters, (U, B, P), by automatic differentiation of
    ``losses``."""
    one = grad(lambda p, x, y: task.losses(p, x[None], y[None])[0])
    return vmap(vmap(one, in_dims=(None, 0, 0)))(params, features, labels)


shapes = st.fixed_dictionaries(
    {
        "users": st.integers(1, 4),
        "records": st.integers(1, 7),
        "dimension": st.integers(1, 6),
        "classes": st.integers(2, 5),
        "seed": st.integers(0, 10**6),
    }
)
kinds = st.sampled_from(["none", "fixed", "median"])
weightings = st.sampled_from(["none", "padded", "real", "empty"])


def some(task_name: str, shape: dict) -> tuple[Task, Tensor, Tensor, Tensor, torch.Generator]:
    """A task of this shape with parameters and records."""
    task = TASKS[task_name](shape["dimension"], shape["classes"])
    generator = torch.Generator().manual_seed(shape["seed"])
    lead = shape["users"], shape["records"]
    x = task.prepare(2 * torch.randn(*lead, shape["dimension"], generator=generator))
    y = torch.randint(0, shape["classes"], lead, generator=generator)
    return task, torch.randn(lead[0], task.parameters, generator=generator), x, y, generator


def weights(kind: str, lead: tuple[int, int], generator: torch.Generator) -> Tensor | None:
    """All ones, some zeros, any numbers, or a first user with an empty batch."""
    if kind == "none":
        return None
    if kind == "real":
        return torch.rand(lead, generator=generator)
    padded = (torch.rand(lead, generator=generator) < 0.6).float()
    if kind == "empty":
        padded[0] = 0
    return padded


@pytest.mark.parametrize("task", TASKS)
@given(shape=shapes, clip=kinds, weighting=weightings, with_squares=st.booleans())
def test_clipped_sums_equal_those_of_explicit_gradients(task, shape, clip, weighting, with_squares):
    """Σ w_j·g_j/max(1, ‖g_j‖/C) for any shape, weights and clip, and the very bound that was
    used."""
    task, params, x, y, generator = some(task, shape)
    weight = weights(weighting, (shape["users"], shape["records"]), generator)
    bound = 2 * torch.rand(shape["users"], generator=generator) + 0.01
    asked = {"none": None, "fixed": bound, "median": "median"}[clip]
    squares = (x * x).sum(-1) if with_squares else None
    found = task.clipped_sum(params, Batch(x, y, weight, squares), asked)
    expected = explicit_clipped_sum(per_example(task, params, x, y), weight, asked)
    torch.testing.assert_close(found.total, expected.total, rtol=1e-3, atol=1e-4)
    if clip == "none":
        assert found.bound is None
    else:
        torch.testing.assert_close(found.bound, expected.bound, rtol=1e-4, atol=1e-5)


@given(
    shape=shapes,
    clip=st.sampled_from(["fixed", "median"]),
    held=st.integers(1, 400),
    weighting=weightings,
)
def test_chunks_of_a_module_change_nothing(shape, clip, held, weighting):
    """However few per-example gradients are held at a time, sums and bounds are the same."""
    task, params, x, y, generator = some("module", shape)
    weight = weights(weighting, (shape["users"], shape["records"]), generator)
    asked = torch.full((shape["users"],), 0.5) if clip == "fixed" else "median"
    whole = task.clipped_sum(params, Batch(x, y, weight), asked)
    before = ghost._HELD
    try:
        ghost._HELD = held
        parts = task.clipped_sum(params, Batch(x, y, weight), asked)
    finally:
        ghost._HELD = before
    torch.testing.assert_close(parts.total, whole.total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts.bound, whole.bound)


@pytest.mark.parametrize("task", TASKS)
def test_clipping_does_not_touch_its_inputs(task):
    """Parameters, records and weights are the same after the call: they are read again at the next
    step."""
    task, params, x, y, _ = some(
        task, {"users": 2, "records": 3, "dimension": 4, "classes": 3, "seed": 0}
    )
    weight = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    squares = (x * x).sum(-1)
    before = [value.clone() for value in (params, x, y, weight, squares)]
    for clip in (None, torch.tensor([0.1, 0.2]), "median"):
        task.clipped_sum(params, Batch(x, y, weight, squares), clip)
    for value, old in zip((params, x, y, weight, squares), before, strict=True):
        assert torch.equal(value, old)


@pytest.mark.parametrize("task", TASKS)
def test_each_user_has_its_own_parameters_and_records(task):
    """A stack of users gives each the sum it gets alone."""
    task, params, x, y, _ = some(
        task, {"users": 4, "records": 3, "dimension": 4, "classes": 3, "seed": 1}
    )
    clip = torch.tensor([0.1, 0.5, 1.0, 9.0])
    stacked = task.clipped_sum(params, Batch(x, y), clip).total
    for u in range(4):
        alone = task.clipped_sum(
            params[u : u + 1], Batch(x[u : u + 1], y[u : u + 1]), clip[u : u + 1]
        ).total
        torch.testing.assert_close(stacked[u], alone[0], rtol=1e-4, atol=1e-5)


def test_logistic_gradients_on_unit_rows_are_never_longer_than_two():
    """‖δ‖ ≤ √2 and ‖(a, 1)‖ = √2: a clip above 2 changes nothing on unit-norm rows."""
    task = Logistic(5, 4)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 300, 5, generator=generator)
    x = task.prepare(x / x.norm(dim=-1, keepdim=True))
    y = torch.randint(0, 4, (1, 300), generator=generator)
    for size in (0.0, 1.0, 30.0):
        params = size * torch.randn(1, task.parameters, generator=generator)
        assert float(per_example(task, params, x, y).norm(dim=2).max()) <= 2 + 1e-5


def test_logistic_scores_are_linear_with_a_bias():
    """scores = Wa + w₀, each row of the flat vector being W's row and then its bias; x⁰ = 0."""
    task = Logistic(2, 3)
    params = torch.tensor([1.0, 2, 10, 3, 4, 20, 5, 6, 30])
    scores = task.scores(params, task.prepare(torch.tensor([[1.0, -1.0]])))
    assert scores.tolist() == [[9.0, 19.0, 29.0]]
    assert not task.initial(5).any() and len(task.initial(5)) == task.parameters == 9


def test_the_network_is_the_one_of_torch():
    """Mlp's flat vector, copied into nn.Linear layers, gives the same scores."""
    task = Mlp(4, 3, hidden=6)
    params = task.initial(3)
    first, second = params[:30].view(6, 5), params[30:].view(3, 7)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        for layer, rows in ((net[0], first), (net[2], second)):
            layer.weight.copy_(rows[:, :-1])
            layer.bias.copy_(rows[:, -1])
        x = torch.randn(10, 4)
        torch.testing.assert_close(task.scores(params, task.prepare(x)), net(x))


def test_the_network_starts_small_and_from_its_seed():
    """x⁰ is uniform in ±1/√inputs per layer, the same for the same seed and another for another.

    200 units.
    """
    task = Mlp(25, 10)
    assert task.hidden == 200 and task.parameters == 200 * 26 + 10 * 201
    start = task.initial(1)
    assert torch.equal(start, task.initial(1)) and not torch.equal(start, task.initial(2))
    first, second = start[: 200 * 26], start[200 * 26 :]
    for part, inputs in ((first, 25), (second, 200)):
        limit = 1 / math.sqrt(inputs)
        assert 0.95 * limit < float(part.abs().max()) <= limit
        assert float(part.std()) == pytest.approx(limit / math.sqrt(3), rel=0.05)


def test_a_module_starts_from_its_own_weights_in_their_own_order():
    """The flat vector is the module's parameters one after the other, and scores are the module's
    output."""
    net = module(4, 3, seed=5)
    task = ModuleTask(net)
    flat = torch.cat([value.flatten() for value in net.parameters()])
    assert torch.equal(task.initial(0), flat)
    x = torch.randn(6, 4)
    torch.testing.assert_close(task.scores(task.initial(9), x), net(x))


def test_a_module_sees_the_shape_it_wants():
    """``shape`` unflattens features, e.g. for a convolution, in scores and in clipped sums."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    task = ModuleTask(net, shape=(1, 4, 4))
    x, y = torch.randn(2, 5, 16), torch.randint(0, 3, (2, 5))
    torch.testing.assert_close(task.scores(task.initial(0), x[0]), net(x[0].view(5, 1, 4, 4)))
    params = task.initial(0).expand(2, -1) + 0.1 * torch.randn(2, task.parameters)
    found = task.clipped_sum(params, Batch(x, y), torch.tensor([0.2, 0.2])).total
    expected = explicit_clipped_sum(
        per_example(task, params, x, y), None, torch.tensor([0.2, 0.2])
    ).total
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_dropout_is_off_and_buffers_are_constants():
    """A module is used in evaluation mode: two calls agree, and nothing in it is updated."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    task = ModuleTask(net)
    x, y = torch.randn(1, 6, 4), torch.zeros(1, 6, dtype=torch.int64)
    sums = [
        task.clipped_sum(task.initial(0)[None], Batch(x, y), torch.tensor([1.0])).total
        for _ in range(2)
    ]
    assert torch.equal(*sums)


@pytest.mark.parametrize(
    ("layer", "instead"),
    [
        (nn.BatchNorm1d(5), "GroupNorm"),
        (nn.SyncBatchNorm(5), "GroupNorm"),
        (nn.LSTM(5, 5), "GRUCell"),
        (nn.LSTMCell(5, 5), "GRUCell"),
        (nn.GRU(5, 5), "GRUCell"),
    ],
)
def test_layers_without_a_gradient_of_each_record_are_refused(layer, instead):
    """Behind a batch normalisation, or in PyTorch's recurrent layers; the message says what to
    use."""
    with refuses(f"not-per-record: {type(layer).__name__} … {instead}"):
        ModuleTask(nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 3)))


class Masks(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        y[x[:, 0] > 0] *= 2
        return y


class Counts(nn.Linear):
    def forward(self, x):
        return super().forward(x) * int(x.abs().sum().item())


class Decides(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else 2 * x)


@pytest.mark.parametrize("kind", [Masks, Counts, Decides])
@pytest.mark.parametrize("privacy", [None, Gaussian(clip=1.0, noise=1.0)])
def test_a_module_whose_path_depends_on_a_value_is_refused_in_one_sentence(kind, privacy):
    data = synthetic(users=2, records=10, dimension=4, classes=3)
    plan = Plan(rounds=1, local_steps=1, user_ratio=1.0)
    with refuses("not-per-record: depend on the values … torch.where") as caught:
        train(data, ModuleTask(kind(4, 3)), fedavg(), plan, privacy)
    assert "vmap" not in str(caught.value)


def test_a_module_without_parameters_is_refused():
    """There is nothing to learn in it."""
    with refuses("no-parameters"):
        ModuleTask(nn.ReLU())


def test_the_median_is_the_lower_one_of_the_real_records():
    """Padding does not count, an empty batch has bound 0, and zero gradients stay zero."""
    norms = torch.tensor(
        [[4.0, 1.0, 3.0, 2.0], [9.0, 5.0, 7.0, 1.0], [1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 5.0]]
    )
    weight = torch.tensor([[1.0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    factor, bound = clip_factors(norms, weight, "median")
    assert bound.tolist() == [2.0, 5.0, 0.0, 0.0]
    assert bool(torch.isfinite(factor).all())
    np.testing.assert_allclose(factor[0], [0.5, 1.0, 2 / 3, 1.0], rtol=1e-6)
    np.testing.assert_allclose(factor[1], [0.0, 1.0, 5 / 7, 0.0], rtol=1e-6)
    assert not factor[2].any() and factor[3, 3] == 0


def test_every_task_keeps_the_protocol():
    """The attributes that engines and chunks rely on."""
    for make in TASKS.values():
        task = make(4, 3)
        assert isinstance(task, Task)
        assert len(task.initial(0)) == task.parameters and task.width >= 0
        assert task.scores(task.initial(0), task.prepare(torch.zeros(5, 4))).shape == (5, 3)
