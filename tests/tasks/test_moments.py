"""The sums that preparation is fitted on: how far a record moves them, what they give back."""

import numpy as np
import pytest
import torch

from dpscaffold.tasks import Batch
from dpscaffold.tasks.moments import MomentSums

KINDS = ["mean", "moments", "gram"]


#: What rounding of single records, and the room for rounding sums, take off: 2⁻¹⁶ and a little.
ROOM = 2.0**-15


def contribution(task, row):
    """What one record adds, in units of C."""
    batch = Batch(torch.tensor(row)[None, None], torch.zeros(1, 1, dtype=torch.long))
    clip = torch.tensor([task.bound])
    found = task.clipped_sum(torch.zeros(1, task.parameters), batch, clip).total[0]
    return -found.numpy() / task.bound


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_record_moves_the_sum_by_at_most_its_sensitivity(kind, relation):
    """2 for replacing a record, 1 for emptying it; pairs that reach it, but for the room that is
    left for rounding, are among those tried."""
    task = MomentSums(3, kind, norm_bound=2.5, relation=relation, bound=0.7)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 3)) * rng.uniform(0.1, 9, size=(60, 1))
    rows = np.concatenate([rows, 2.5 * np.eye(3), -2.5 * np.eye(3), 1e30 * np.eye(3)])
    rows = np.concatenate([rows, [[np.nan, 0, 0], [np.inf, 1, 2]]])
    found = np.array([contribution(task, row) for row in rows])
    assert not found[-2:].any()
    if relation == "zero-out":
        largest = np.linalg.norm(found, axis=1).max()
        assert 1 - ROOM < largest <= 1
        return
    apart = np.linalg.norm(found[:, None] - found[None], axis=2).max()
    assert apart <= 2
    # Both parts of "moments" are never at their worst together, so their bound is not reached.
    assert apart > (1.7 if kind == "moments" else 2 - 2 * ROOM)


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_the_sums_give_back_the_moments(relation):
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(50, 4)).astype(np.float32)
    rows /= np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True) / 3)
    batch = Batch(torch.tensor(rows)[None], torch.zeros(1, 50, dtype=torch.long))

    def fitted(kind):
        task = MomentSums(4, kind, norm_bound=3.0, relation=relation, bound=0.5)
        total = task.clipped_sum(torch.zeros(1, task.parameters), batch, torch.tensor([0.5]))
        return task, -total.total[0] / 50

    for kind in ("mean", "moments"):
        task, params = fitted(kind)
        np.testing.assert_allclose(task.mean(params), rows.mean(0), atol=1e-6)
    np.testing.assert_allclose(task.squares(params), (rows**2).mean(0), atol=1e-6)
    task, params = fitted("gram")
    np.testing.assert_allclose(task.matrix(params), rows.T @ rows / 50, atol=1e-6)
