"""Every loss of the table, in every task: its values, its errors, and its clipped sums."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from refusals import refuses
from small import TASKS, assert_agree, final, module, setting
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional
from toys import explicit_clipped_sum

from dpscaffold.engine.oracle import OneByOne
from dpscaffold.federation import Federation
from dpscaffold.federation.labels import unpack
from dpscaffold.tasks import (
    LOSSES,
    Batch,
    Linear,
    Logistic,
    Loss,
    Mlp,
    ModuleTask,
    Task,
    huber,
    loss_named,
    stacked_scores,
)
from dpscaffold.training.optimum import solve

ALL = {**LOSSES, "narrow huber": huber(0.3)}
CLASSES = 3  # for softmax

#: Each loss as somebody else writes it.
ELSEWHERE = {
    "softmax": lambda z, t: functional.nll_loss(z.log_softmax(1), t, reduction="none"),
    "logistic": lambda z, t: functional.binary_cross_entropy_with_logits(
        z[:, 0], t.to(z.dtype), reduction="none"
    ),
    "squared": lambda z, t: functional.mse_loss(z[:, 0], t, reduction="none") / 2,
    "huber": lambda z, t: functional.huber_loss(z[:, 0], t, reduction="none", delta=1.0),
    "narrow huber": lambda z, t: functional.huber_loss(z[:, 0], t, reduction="none", delta=0.3),
    "labels": lambda z, t: functional.binary_cross_entropy_with_logits(
        z, torch.tensor([[(s // 2**j) % 2 for j in range(3)] for s in t.tolist()]).to(z.dtype),
        reduction="none",
    ).sum(1),
}  # fmt: skip
MAKERS = {
    "linear": Linear,
    "mlp": lambda dimension, outputs, loss: Mlp(dimension, outputs, 6, loss),
    "module": lambda dimension, outputs, loss: ModuleTask(module(dimension, outputs), loss=loss),
}
each_loss = pytest.mark.parametrize("name", ALL)
each_task = pytest.mark.parametrize("task", MAKERS)


def make(task: str, name: str, dimension: int = 4) -> Task:
    loss = ALL[name]
    return MAKERS[task](dimension, loss.outputs(CLASSES), loss)


def targets(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Classes, or numbers of which some are far from every score."""
    if ALL[name].kind == "number":
        return 2 * torch.randn(shape, generator=generator)
    values = {"softmax": CLASSES, "labels": 2**CLASSES}.get(name, 2)
    return torch.randint(0, values, shape, generator=generator)


# --- values and errors ---


@each_loss
@given(seed=st.integers(0, 10**6), size=st.sampled_from([0.1, 1.0, 30.0]))
def test_values_are_those_of_another_library(name, seed, size):
    """Against torch.nn.functional, which writes them in other ways."""
    generator = torch.Generator().manual_seed(seed)
    scores = size * torch.randn(9, ALL[name].outputs(CLASSES), generator=generator).double()
    t = targets(name, (9,), generator)
    t = t.double() if t.is_floating_point() else t
    torch.testing.assert_close(ALL[name].values(scores, t), ELSEWHERE[name](scores, t))


@each_loss
@given(seed=st.integers(0, 10**6), size=st.sampled_from([0.1, 1.0, 30.0]))
def test_errors_are_the_derivative_of_the_values(name, seed, size):
    """δ = ∂loss/∂z by automatic differentiation of the other library's loss."""
    loss, generator = ALL[name], torch.Generator().manual_seed(seed)
    scores = size * torch.randn(2, 5, loss.outputs(CLASSES), generator=generator).double()
    t = targets(name, (2, 5), generator)
    t = t.double() if t.is_floating_point() else t
    expected = grad(lambda z: ELSEWHERE[name](z.flatten(0, 1), t.flatten()).sum())(scores)
    found = loss.errors(scores.transpose(1, 2).clone(), t)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_a_confident_logistic_score_keeps_its_error():
    """σ(z) − 1 is 0 in float32 from z = 17 on; its error is exp(−z) all the same."""
    for label, sign in ((1, -1.0), (0, 1.0)):
        error = LOSSES["logistic"].errors(torch.tensor([[[-sign * 30.0]]]), torch.tensor([[label]]))
        assert float(error) == pytest.approx(sign * math.exp(-30), rel=1e-5)


# --- the fast path ---


@each_task
@each_loss
@given(
    seed=st.integers(0, 10**6),
    clip=st.sampled_from(["none", "fixed", "median"]),
    records=st.integers(1, 6),
)
def test_clipped_sums_equal_those_of_the_loop_engines_gradients(task, name, seed, clip, records):
    """Only ∂loss/∂scores is swapped: the sums are those of clipped autograd."""
    made, generator = make(task, name), torch.Generator().manual_seed(seed)
    x = made.prepare(2 * torch.randn(2, records, 4, generator=generator))
    t = targets(name, (2, records), generator)
    params = torch.randn(2, made.parameters, generator=generator)
    asked = {"none": None, "fixed": torch.tensor([0.3, 2.0]), "median": "median"}[clip]
    loop = OneByOne(made)
    gradients = torch.stack([loop.gradients(params[u], x[u], t[u], True) for u in range(2)])
    found = made.clipped_sum(params, Batch(x, t), asked)
    expected = explicit_clipped_sum(gradients, None, asked)
    torch.testing.assert_close(found.total, expected.total, rtol=1e-3, atol=1e-4)
    if clip != "none":
        torch.testing.assert_close(found.bound, expected.bound, rtol=1e-4, atol=1e-5)


def test_squared_loss_is_least_squares():
    """The sum of gradients vanishes at the solution that numpy finds, and nowhere near it."""
    stream = np.random.default_rng(2)
    x, t = stream.standard_normal((40, 3)), stream.standard_normal(40)
    solution = np.linalg.lstsq(np.c_[x, np.ones(40)], t, rcond=None)[0]
    task = Linear(3, 1, LOSSES["squared"])
    batch = Batch(task.prepare(torch.from_numpy(x))[None], torch.from_numpy(t)[None])
    at = torch.from_numpy(solution)[None]
    assert float(task.clipped_sum(at, batch, None).total.norm()) < 1e-12
    assert float(task.clipped_sum(at + 0.1, batch, None).total.norm()) > 1


def test_logistic_regression_is_the_linear_model_with_softmax_bit_for_bit():
    """The special case adds a name and nothing else."""
    generator = torch.Generator().manual_seed(4)
    special, general = Logistic(4, 3), Linear(4, 3, LOSSES["softmax"])
    x = special.prepare(torch.randn(2, 9, 4, generator=generator))
    y = torch.randint(0, 3, (2, 9), generator=generator)
    params = torch.randn(2, special.parameters, generator=generator)
    for clip in (None, torch.tensor([0.3, 2.0]), "median"):
        sums = [task.clipped_sum(params, Batch(x, y), clip).total for task in (special, general)]
        assert torch.equal(*sums)
    assert special.name == "logistic" and special.classes == general.outputs


def test_two_classes_by_one_score_are_half_a_softmax():
    """Softmax over (0, z) is the logistic loss of z: an independent path to the same numbers."""
    z, y = torch.linspace(-20, 20, 9).double(), torch.arange(9) % 2
    pair = torch.stack([torch.zeros_like(z), z], dim=1)
    torch.testing.assert_close(
        LOSSES["logistic"].values(z[:, None], y), LOSSES["softmax"].values(pair, y)
    )
    torch.testing.assert_close(
        LOSSES["logistic"].probabilities(z[:, None]), LOSSES["softmax"].probabilities(pair)
    )


anything = st.one_of(
    st.sampled_from([0.0, 1.0, 1e-30, 1e15, 1e20, -3e38, math.inf, math.nan]), st.floats(width=32)
)


@each_task
@pytest.mark.parametrize("name", ["logistic", "squared", "huber"])
@settings(max_examples=25)
@given(
    x=arrays(np.float32, (3, 4), elements=anything),
    t=arrays(np.float32, 3, elements=anything),
    at=st.sampled_from([0.0, 1.0, 1e20, 3e38]),
    clip=st.sampled_from([1e-5, 1.0, 1e6]),
)
def test_no_record_adds_more_than_c_whatever_its_target(task, name, x, t, at, clip):
    """Errors of these losses are unbounded: hostile targets and parameters are clipped as well."""
    made = make(task, name)
    goal = torch.from_numpy(t) if ALL[name].kind == "number" else torch.tensor([0, 1, 1])
    params = at * torch.randn(1, made.parameters, generator=torch.Generator().manual_seed(1)).sign()
    rows = made.prepare(torch.from_numpy(x))
    for weight in (*torch.eye(3), torch.ones(3)):
        batch = Batch(rows[None], goal[None], weight[None])
        total = made.clipped_sum(params, batch, torch.tensor([clip])).total.double()
        assert bool(total.isfinite().all())
        assert float(total.norm()) <= float(np.float32(clip)) * float(weight.sum()) * (1 + 1e-6)


# --- whole runs ---


def a_federation(name: str) -> Federation:
    """Users of equal size with targets of the loss's kind."""
    generator = torch.Generator().manual_seed(5)
    kind = ALL[name].kind
    classes = {"softmax": CLASSES, "logistic": 2}.get(name)

    def part(records: int) -> list[tuple[Tensor, Tensor]]:
        rows = [torch.randn(records, 4, generator=generator) for _ in range(4)]
        found = [(x, targets(name, (records,), generator)) for x in rows]
        return [(x, unpack(t, CLASSES)) for x, t in found] if kind == "labels" else found

    return Federation.from_arrays(part(12), part(5), classes=classes, target=kind)


@pytest.mark.parametrize("task", ["linear", "mlp"])
@pytest.mark.parametrize("privacy", ["fixed", "poisson", "user-poisson"])
@each_loss
def test_both_engines_train_every_loss_alike(draws_of_the_cpu, task, privacy, name):
    """Loop and simulator end at the same parameters, memories and averages."""
    run = setting("scaffold", make(task, name), privacy, a_federation(name), user_ratio=1.0)
    assert_agree(final("simulator", run), final("loop", run))


def test_the_optimum_of_squared_loss_is_ridge_regression():
    """Equal users: x* solves (AᵀA/n + λI)x = Aᵀt/n, bias and all, whatever the solver did."""
    data, task = a_federation("squared"), Linear(4, 1, LOSSES["squared"])
    rows = task.prepare(data.train.features).double().numpy()
    goal = data.train.labels.double().numpy()
    n, ridge = len(goal), 0.05
    exact = np.linalg.solve(rows.T @ rows / n + ridge * np.eye(5), rows.T @ goal / n)
    found = solve(data, task, ridge)
    np.testing.assert_allclose(found.params.numpy(), exact, atol=1e-6)


# --- what surrounds them ---


@each_task
@each_loss
def test_many_models_at_once_score_as_one_by_one(task, name):
    """``scores_of`` is ``scores`` of each model, and ``outputs`` tells how many a record has."""
    made = make(task, name)
    models, x = torch.randn(3, made.parameters), made.prepare(torch.randn(5, 4))
    found = made.scores_of(models, x)
    assert found.shape == (3, 5, made.outputs)
    torch.testing.assert_close(found, stacked_scores(made, models, x))


def test_equal_losses_and_tasks_compare_equal_and_others_do_not():
    """Stacks of runs rely on it; a copy, as a worker process makes it, is equal too."""
    assert huber(0.3) == ALL["narrow huber"] != huber(1.0) == LOSSES["huber"]
    for name, loss in LOSSES.items():
        assert loss.name == name and copy.deepcopy(loss) == loss and hash(loss) == hash(loss)
    squared, other = LOSSES["squared"], LOSSES["huber"]
    for task in (Linear, Mlp):
        assert task(4, 1, loss=squared) == task(4, 1, loss=squared) != task(5, 1, loss=squared)
        assert task(4, 1, loss=squared) != task(4, 1, loss=other)
        with pytest.raises(AttributeError):
            task(4, 1, loss=squared).features = 5
    assert Logistic(4, 3) == Logistic(4, 3) != Logistic(4, 2)
    assert Linear(4, 1, huber(0.3)) != Linear(4, 1, huber(0.5))
    assert Linear(4, 1, squared).convex and not Mlp(4, 1, loss=squared).convex


def test_no_two_losses_share_a_tasks_name():
    """The cache of optima and a resumed run know a task by its name and size."""
    losses = [*LOSSES.values(), huber(0.3), huber(0.5)]
    for task in MAKERS.values():
        names = {task(4, loss.outputs(CLASSES), loss).name for loss in losses}
        assert len(names) == len(losses)
    for loss in losses:
        assert loss_named(loss.name) == loss
    assert Mlp(4, 3).name == "mlp" and ModuleTask(module(4, 3), name="net").name == "net"
    for wrong in ("hinge", "huber:x", "huber:-1", "", "squared:1"):
        with refuses("out-of-range|unknown-loss"):
            loss_named(wrong)


def test_scores_become_probabilities():
    """Most likely is the largest score's class, or what the sign of one score says."""
    scores = torch.tensor([[0.5, 2.0], [-1.0, -3.0]])
    for name in ("softmax", "logistic"):
        chances = LOSSES[name].probabilities(scores[:, : LOSSES[name].outputs(2)])
        torch.testing.assert_close(chances.sum(-1), torch.ones(2))
        assert chances.argmax(-1).tolist() == [1, 0]
    with refuses("wrong-target: 'squared'"):
        LOSSES["squared"].probabilities(scores)


@pytest.mark.parametrize(
    ("name", "kind", "classes", "sentence"),
    [
        (
            "softmax",
            "number",
            0,
            "wrong-loss: 'softmax'",
        ),
        ("logistic", "number", 0, "wrong-loss: 'logistic'"),
        ("logistic", "class", 5, "wrong-loss: 'logistic'"),
        ("squared", "class", 2, "wrong-loss: 'squared'"),
        ("huber", "class", 9, "wrong-loss: 'huber'"),
    ],
)
def test_a_target_of_another_kind_is_refused_in_a_sentence(name, kind, classes, sentence):
    with refuses(sentence):
        LOSSES[name].fits(kind, classes)


def test_targets_that_fit_pass():
    LOSSES["softmax"].fits("class", 10)
    LOSSES["logistic"].fits("class", 2)
    LOSSES["squared"].fits("number")
    LOSSES["huber"].fits("number")


def test_a_wrong_number_of_scores_is_refused():
    """One score a record for these losses, and a Huber width that is a length."""
    for build in (Linear, Mlp):
        with refuses("wrong-scores: 'squared'"):
            build(4, 3, loss=LOSSES["squared"])
    for delta in (0.0, -1.0, math.nan):
        with refuses("not-a-number|out-of-range: delta is"):
            huber(delta)


def test_the_table_holds_losses_and_the_tasks_of_the_suite_their_own():
    """Every task of the suite has a loss, softmax unless told otherwise."""
    assert all(isinstance(loss, Loss) and loss.convex for loss in LOSSES.values())
    for build in TASKS.values():
        task = build(4, 3)
        assert task.loss == LOSSES["softmax"] and task.outputs == 3
    one = vmap(lambda z: LOSSES["huber"].values(z[None], torch.zeros(1))[0])
    assert one(torch.tensor([[0.5], [3.0]])).tolist() == [0.125, 2.5]
