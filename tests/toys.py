"""Tasks whose optima and gradients are known in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from dpscaffold.federation import Federation
from dpscaffold.tasks import Batch, Clip, ClippedSum, stacked_scores


def explicit_clipped_sum(gradients: Tensor, weight: Tensor | None, clip: Clip) -> ClippedSum:
    """Σ_j w_j·g_j/max(1, ‖g_j‖/C) from per-example gradients (U, B, P), as the paper writes it."""
    totals, bounds = [], []
    for u in range(len(gradients)):
        chosen = torch.ones(gradients.shape[1]) if weight is None else weight[u]
        total = torch.zeros_like(gradients[u, 0])
        norms = [float(torch.linalg.vector_norm(g.double())) for g in gradients[u]]
        bound = None
        if clip is not None:
            real = sorted(n for n, w in zip(norms, chosen, strict=True) if w != 0)
            bound = (
                (real[(len(real) - 1) // 2] if real else 0.0)
                if isinstance(clip, str)
                else float(clip[u])
            )
        for g, norm, w in zip(gradients[u], norms, chosen, strict=True):
            shrink = 1.0 if bound is None or norm <= bound else bound / norm
            total = total + float(w) * shrink * g
        totals.append(total)
        bounds.append(bound)
    return ClippedSum(torch.stack(totals), None if clip is None else gradients.new_tensor(bounds))


class Toy:
    """What the toy tasks share: no scores to speak of, features as they are, a start at zero."""

    convex = True
    width = 0
    outputs = 2
    parameters: int
    scores_of = stacked_scores

    def prepare(self, features: Tensor) -> Tensor:
        return features

    def initial(self, seed: int) -> Tensor:
        return torch.zeros(self.parameters)

    def scores(self, params: Tensor, features: Tensor) -> Tensor:
        return torch.zeros(len(features), 2)

    def gradients(self, params: Tensor, features: Tensor) -> Tensor:
        raise NotImplementedError

    def clipped_sum(self, params: Tensor, batch: Batch, clip: Clip) -> ClippedSum:
        return explicit_clipped_sum(self.gradients(params, batch.features), batch.weight, clip)


class Linear(Toy):
    """f(x; a) = ⟨a, x⟩: the gradient of a record is the record itself, wherever the model
    stands."""

    name = "linear"

    def __init__(self, dimension: int) -> None:
        self.parameters = dimension

    def losses(self, params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        return features @ params

    def gradients(self, params: Tensor, features: Tensor) -> Tensor:
        return features


class Quadratic(Toy):
    """f(x; (h, a)) = ½Σ_p h_p(x_p − a_p)²: a record holds curvatures h and a centre a, each of
    length P."""

    name = "quadratic"

    def __init__(self, dimension: int) -> None:
        self.parameters = dimension

    def losses(self, params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        h, a = features.chunk(2, dim=-1)
        return 0.5 * (h * (params - a) ** 2).sum(-1)

    def gradients(self, params: Tensor, features: Tensor) -> Tensor:
        h, a = features.chunk(2, dim=-1)
        return h * (params[:, None, :] - a)


def quadratics(
    users: int, dimension: int, records: int = 4, seed: int = 0
) -> tuple[Federation, Tensor]:
    """Users whose records are all their own (h_i, a_i), and the exact optimum Σh_i·a_i/Σh_i."""
    generator = torch.Generator().manual_seed(seed)
    h = 0.2 + 2 * torch.rand(users, dimension, generator=generator)
    a = 3 * torch.randn(users, dimension, generator=generator)
    rows = [torch.cat([h[i], a[i]]).expand(records, -1) for i in range(users)]
    table = [(x, torch.zeros(records, dtype=torch.int64)) for x in rows]
    return Federation.from_arrays(table, table, classes=2), (h * a).sum(0) / h.sum(0)


def vectors(tables: list[Tensor]) -> Federation:
    """A federation for :class:`Linear`: one table of gradients per user, all labels 0."""
    table = [(x, torch.zeros(len(x), dtype=torch.int64)) for x in tables]
    return Federation.from_arrays(table, table, classes=2)
