"""The paper's pseudo-code, one user and one step at a time: the oracle of the simulator.

Slow and obvious on purpose. Per-example gradients are formed one by one from the task's loss,
clipped and summed; nothing here is shared with the fast path but the algorithm's functions, the
streams and the law of aggregation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpscaffold.algorithms import Algorithm, Broadcast, Known, Local, Participant, Slots, Upload
from dpscaffold.config import Gaussian, Run
from dpscaffold.engines.aggregate import aggregate
from dpscaffold.engines.machine import Hardware
from dpscaffold.engines.memories import Memories
from dpscaffold.engines.state import Draw, RoundUploads
from dpscaffold.federation import Federation
from dpscaffold.privacy.adversary import CLIPPED_SHARE
from dpscaffold.randomness.csprng import on_grid
from dpscaffold.randomness.streams import Batches, NoiseStreams, Randomness
from dpscaffold.tasks.base import BOUNDS
from dpscaffold.tasks.ridge import RidgeSums


class Loop:
    """Algorithm 1, line by line. ``randomness`` may be replaced, e.g. to give all users the same
    noise as some published code does."""

    def __init__(
        self,
        setting: Run,
        federation: Federation,
        hardware: Hardware | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        self.setting, self.federation = setting, federation
        self.hardware = hardware or Hardware()
        self.device = self.hardware.device
        self.randomness = randomness or setting.randomness()
        self.memories = Memories(setting.algorithm.remembers, setting.task.parameters, self.device)

    def gather(self, phase: Algorithm, broadcast: Broadcast, draw: Draw) -> RoundUploads:
        """Every participant's local steps, and the mean of what they send."""

        def uploads() -> Iterator[tuple[list[int], Upload]]:
            for user in draw.active.tolist():
                if self.setting.sums is not None:
                    privacy = self.setting.privacy_of(user, len(draw.active))
                    yield [user], self.secure_upload(user, broadcast, privacy)
                    continue
                memory = {name: value[0] for name, value in self.memories.recall([user]).items()}
                upload, kept = self.participate(user, phase, broadcast, memory)
                self.memories.keep([user], _stacked(kept))
                yield [user], Upload(upload.params[None], _stacked(upload.totals))

        return aggregate(self.setting, draw, broadcast, uploads(), phase)

    def secure_upload(self, user: int, broadcast: Broadcast, privacy: Gaussian | None) -> Upload:
        """User i's integers of a secure sum: one noised query at x, rounded after the noise."""
        sums, batch = self.setting.sums, int(self.setting.batch_sizes[user])
        assert sums is not None and privacy is not None
        features, labels, batches = self.drawn(user, broadcast)
        chosen = torch.from_numpy(batches.of(0)).to(self.device)
        gradients = self.gradients(broadcast.params, features[chosen], labels[chosen])
        query, clip = self.clipped_mean(gradients, batch)
        streams = [self.randomness.normals(broadcast.round, user)]
        draws = NoiseStreams(streams, len(broadcast.params)).draw(1)[0, 0]
        noise = torch.from_numpy(draws).to(self.device).double()
        return Upload(sums.quantise([user], (query + privacy.scale(clip, batch) * noise)[None]))

    def drawn(self, user: int, broadcast: Broadcast) -> tuple[Tensor, Tensor, Batches]:
        """User i's prepared records and labels, and the numbers of those in its K batches."""
        features, labels = self.federation.train.of(user)
        features = self.setting.task.prepare(features).to(self.device)
        batches = self.randomness.batches(
            broadcast.round,
            user,
            len(labels),
            int(self.setting.batch_sizes[user]),
            self.setting.plan.local_steps,
            self.setting.sampling,
            declared=self.setting.declared(user),
        )
        return features, labels.to(self.device), batches

    def participate(
        self, user: int, algorithm: Algorithm, broadcast: Broadcast, memory: Slots
    ) -> tuple[Upload, Slots]:
        """User i's part of the round: K local steps from y = x, or from ``begin_at``."""
        plan, privacy = self.setting.plan, self.setting.privacy_of(user)
        features, labels, batches = self.drawn(user, broadcast)
        batch = int(self.setting.batch_sizes[user])
        noise = NoiseStreams(
            [self.randomness.normals(broadcast.round, user)], len(broadcast.params)
        )
        at = Participant(broadcast, memory, self.known(user, broadcast.round))

        y = algorithm.begin_at(at)
        total = torch.zeros_like(y)
        for k in range(plan.steps_of(user)):
            chosen = torch.from_numpy(batches.of(k)).to(self.device)  # S_i^k
            gradients = self.gradients(y, features[chosen], labels[chosen])  # g_ij, (b, P)
            if privacy is None:
                query = gradients.sum(0) / batch
            else:
                draws = torch.from_numpy(noise.draw(1)[0, 0]).to(self.device)
                query = self.noised(gradients, batch, draws, user)  # H̃_i^k
            gradient = query + plan.regularisation * y
            total += gradient
            y = y - at.known.step_size * algorithm.direction(gradient, y, at)
        return algorithm.finish(Local(y, total / plan.steps_of(user)), at)

    def known(self, user: int, round: int) -> Known:
        """The public numbers of one user in a round, each of shape (1,). They come from the
        setting, as at the server: with declared sizes nothing that is uploaded may depend on how
        many records there are."""
        known = self.setting.known([user], round)

        def alone(value: float | Tensor | None) -> float | Tensor | None:
            return value[0].to(self.device) if isinstance(value, Tensor) else value

        weight = alone(known.weight)
        assert weight is not None
        steps = self.setting.plan.steps_of(user)
        return replace(known, steps=steps, spread=alone(known.spread), weight=weight)

    def gradients(self, y: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Per-example gradients ∇f(y; d_j), (b, P)."""
        if len(labels) == 0:
            return torch.zeros(0, len(y), device=self.device)
        if isinstance(self.setting.task, RidgeSums):  # bounded sums, which depend on no y
            private = self.setting.privacy is not None
            return self.setting.task.contributions(features, labels, clipped=private)

        def loss(params: Tensor, a: Tensor, label: Tensor) -> Tensor:
            return self.setting.task.losses(params, a[None], label[None])[0]

        gradients: Tensor = vmap(grad(loss), in_dims=(None, 0, 0))(y, features, labels)
        return gradients

    def noised(self, gradients: Tensor, batch: int, draws: Tensor, user: int = 0) -> Tensor:
        """(1/b)Σ g_j/max(1, ‖g_j‖/C) plus the noise of the user's scale, 2Cσ_i/b."""
        privacy = self.setting.privacy_of(user)
        assert privacy is not None
        if isinstance(self.setting.task, RidgeSums):
            assert privacy.clip != "median"  # a setting refuses it with sums
            return self._with_noise(gradients.sum(0) / batch, privacy, (privacy.clip, batch), draws)
        query, clip = self.clipped_mean(gradients, batch)
        return self._with_noise(query.to(gradients.dtype), privacy, (clip, batch), draws)

    def clipped_mean(self, gradients: Tensor, batch: int) -> tuple[Tensor, float | Tensor]:
        """(1/b)Σ g_j/max(1, ‖g_j‖/C) in float64, and C. For a secure sum gradients are clipped to a
        little less than C, which leaves room for the rounding of sums."""
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
        bound = min(clip, BOUNDS[1])
        if self.setting.secure is not None and self.setting.algorithm.sums is None:
            bound = bound * CLIPPED_SHARE
        shrunk = gradients.double() * shrinkage(norms, bound)[:, None]
        clipped = torch.where(finite[:, None], shrunk, 0.0)  # not by a product: 0·NaN is NaN
        query = clipped.sum(0) / batch
        if privacy.unit == "user" and privacy.sampling == "poisson":
            query = query * shrinkage(query.norm(), clip)
        return query, clip

    def _with_noise(
        self, query: Tensor, privacy: Gaussian, scale: tuple[float | Tensor, int], draws: Tensor
    ) -> Tensor:
        """The query with noise for the clip bound and the batch of ``scale``."""
        if privacy.noise == 0:
            return query
        spread = torch.as_tensor(privacy.scale(*scale), device=query.device)
        if draws.dtype == torch.float64:  # secret noise
            return on_grid(query.double() + spread.double() * draws, spread).to(query.dtype)
        return query + spread * draws


def shrinkage(norms: Tensor, clip: float | Tensor) -> Tensor:
    """1/max(1, ‖g‖/C), also where C is 0 or infinite."""
    return torch.where(norms > clip, clip / norms, 1.0)


def _stacked(slots: Slots) -> Slots:
    """One user's slots as a stack of one."""
    return {name: value[None] for name, value in slots.items()}
