"""The paper's pseudo-code, one user and one step at a time: the oracle of the simulator.

Slow and obvious on purpose. Per-example gradients are formed one by one from the task's loss,
clipped and summed; nothing here is shared with the fast path but the algorithm's three functions
and the streams.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpscaffold.algorithms import Broadcast, Local, Memory, Server, Upload
from dpscaffold.cipher import on_grid
from dpscaffold.engines.state import Draw, RoundReport, State, mean_weights
from dpscaffold.randomness import NoiseStreams, Randomness
from dpscaffold.setting import Setting
from dpscaffold.tasks.base import BOUNDS


class Loop:
    """Algorithm 1, line by line. ``randomness`` may be replaced, e.g. to give all users the same
    noise as some published code does."""

    def __init__(
        self, setting: Setting, device: torch.device, randomness: Randomness | None = None
    ) -> None:
        self.setting = setting
        self.device = device
        self.randomness = randomness or setting.randomness()
        self.state = State.initial(setting, device)

    def round(self, round: int, draw: Draw) -> RoundReport:
        """One round: broadcast, every participant's local steps, aggregation."""
        setting, state = self.setting, self.state
        algorithm = setting.algorithm.phase(round, setting.warm_rounds)
        broadcast = Broadcast(round, state.params, state.control)
        mean_move = torch.zeros_like(state.params)
        sum_control = torch.zeros_like(state.params)
        drift = 0.0
        for user, weight in zip(draw.active.tolist(), mean_weights(setting, draw), strict=True):
            memory = Memory(None if state.memory is None else state.memory[user].clone())
            upload, memory = self.participate(user, algorithm, broadcast, memory)
            mean_move += float(weight) * upload.params
            drift = max(drift, float(upload.params.norm()))
            if (
                state.memory is not None
                and upload.control is not None
                and memory.control is not None
            ):
                state.memory[user] = memory.control
                sum_control += upload.control
        mean = Upload(mean_move, sum_control / setting.users)
        server = algorithm.update(
            Server(state.params, state.control), mean, setting.plan.server_rate
        )
        state.advance(round, server.params, server.control, setting)
        return RoundReport(round, tuple(draw.active.tolist()), {"largest_drift": drift})

    def participate(self, user, algorithm, broadcast, memory):  # type: ignore[no-untyped-def]
        """User i's part of the round: K local steps from y = x."""
        plan, privacy = self.setting.plan, self.setting.privacy
        features, labels = self.setting.federation.train.of(user)
        features = self.setting.task.prepare(features).to(self.device)
        labels = labels.to(self.device)
        batch = int(self.setting.batches[user])
        batches = self.randomness.batches(
            broadcast.round, user, len(labels), batch, plan.local_steps, self.setting.sampling
        )
        noise = NoiseStreams([self.randomness.noise(broadcast.round, user)], len(broadcast.params))

        y = broadcast.params
        total = torch.zeros_like(y)
        for k in range(plan.local_steps):
            chosen = torch.from_numpy(batches.of(k)).to(self.device)  # S_i^k
            gradients = self.gradients(y, features[chosen], labels[chosen])  # g_ij, (b, P)
            if privacy is None:
                query = gradients.sum(0) / batch
            else:
                draws = torch.from_numpy(noise.draw(1)[0, 0]).to(self.device)
                query = self.noised(gradients, batch, draws)  # H̃_i^k
            gradient = query + plan.regularisation * y
            total += gradient
            y = y - plan.step_size * algorithm.direction(gradient, y, broadcast, memory)
        local = Local(y, total / plan.local_steps, plan.local_steps * plan.step_size)
        return algorithm.finish(local, broadcast, memory)

    def gradients(self, y: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Per-example gradients ∇f(y; d_j), (b, P)."""
        if len(labels) == 0:
            return torch.zeros(0, len(y), device=self.device)

        def loss(params: Tensor, a: Tensor, label: Tensor) -> Tensor:
            return self.setting.task.losses(params, a[None], label[None])[0]

        return vmap(grad(loss), in_dims=(None, 0, 0))(y, features, labels)

    def noised(self, gradients: Tensor, batch: int, draws: Tensor) -> Tensor:
        """(1/b)Σ g_j/max(1, ‖g_j‖/C) plus the noise of the stated scale."""
        privacy = self.setting.privacy
        assert privacy is not None
        # In float64, where squares of float32 numbers can neither overflow nor vanish.
        norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
        finite = norms.isfinite()
        clip: float | Tensor
        if privacy.clip == "median":
            clip = norms[finite].median() if finite.any() else norms.new_zeros(())
        else:
            clip = float(privacy.clip)
        # An infinite clip still keeps the sum within float32.
        shrunk = gradients.double() * shrinkage(norms, min(clip, BOUNDS[1]))[:, None]
        clipped = torch.where(finite[:, None], shrunk, 0.0)  # not by a product: 0·NaN is NaN
        query = clipped.sum(0) / batch
        if privacy.unit == "user" and privacy.sampling == "poisson":
            query = query * shrinkage(query.norm(), clip)
        query = query.to(gradients.dtype)
        if privacy.noise == 0:
            return query
        spread = torch.as_tensor(privacy.scale(clip, batch), device=query.device)
        if draws.dtype == torch.float64:  # secret noise
            return on_grid(query.double() + spread.double() * draws, spread).to(query.dtype)
        return query + spread * draws


def shrinkage(norms: Tensor, clip: float | Tensor) -> Tensor:
    """1/max(1, ‖g‖/C), also where C is 0 or infinite."""
    return torch.where(norms > clip, clip / norms, 1.0)
