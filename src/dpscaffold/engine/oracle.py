"""The paper's pseudo-code, one user and one step at a time: the oracle of the fast engine.

Slow and obvious on purpose. Per-example gradients are formed one by one from the task's loss,
clipped and summed; nothing here is shared with the fast engine but the algorithm's functions, the
query's noise, the streams and the law of aggregation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpscaffold.algorithms import Algorithm, Broadcast, Known, Local, Participant, Slots, Upload
from dpscaffold.config import Run
from dpscaffold.engine.aggregate import Summed, aggregate, law_of
from dpscaffold.engine.device import CPU
from dpscaffold.engine.memory import Memory
from dpscaffold.engine.query import Numbers, query_of
from dpscaffold.engine.server import server_round
from dpscaffold.engine.state import Count, Draw, Round, RoundUploads, State, count_nothing
from dpscaffold.engine.steps import Participation
from dpscaffold.federation import Federation
from dpscaffold.randomness.streams import NoiseStreams, Randomness
from dpscaffold.tasks import Batch, Clip, ClippedSum, Task
from dpscaffold.tasks.base import BOUNDS


class OneByOne:
    """A task whose clipped sums are made of per-example gradients, as they are defined."""

    exact = False

    def __init__(self, task: Task) -> None:
        self.task, self.name, self.parameters = task, task.name, task.parameters

    def clipped_sum(self, params: Tensor, batch: Batch, clip: Clip) -> ClippedSum:
        """Σ_j g_j/max(1, ‖g_j‖/C) of one user, (1, P), in float64, and C."""
        gradients = self.gradients(params[0], batch.features[0], batch.labels[0], clip is not None)
        if clip is None or hasattr(self.task, "contributions"):  # those are bounded already
            return ClippedSum(gradients.sum(0)[None], clip if isinstance(clip, Tensor) else None)
        # In float64, where squares of float32 numbers can neither overflow nor vanish.
        norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
        finite = norms.isfinite()
        if clip == "median":
            bound = norms[finite].median() if finite.any() else norms.new_zeros(())
        else:
            bound = clip[0].double()
        # An infinite clip still keeps the sum within float32.
        used = bound.clamp_max(BOUNDS[1])
        shrunk = gradients.double() * torch.where(norms > used, used / norms, 1.0)[:, None]
        clipped = torch.where(finite[:, None], shrunk, 0.0)  # not by a product: 0·NaN is NaN
        return ClippedSum(clipped.sum(0)[None].to(params.dtype), bound[None].to(params.dtype))

    def gradients(self, y: Tensor, features: Tensor, labels: Tensor, private: bool) -> Tensor:
        """What each record contributes: ∇f(y; d_j), (b, P)."""
        if len(labels) == 0:
            return torch.zeros(0, len(y), device=y.device)
        if hasattr(self.task, "contributions"):  # bounded sums, which depend on no y
            found: Tensor = self.task.contributions(features, labels, clipped=private)
            return found

        def loss(params: Tensor, a: Tensor, label: Tensor) -> Tensor:
            return self.task.losses(params, a[None], label[None])[0]

        gradients: Tensor = vmap(grad(loss), in_dims=(None, 0, 0))(y, features, labels)
        return gradients


class Loop:
    """Algorithm 1, line by line. ``randomness`` may be replaced, e.g. to give all users the same
    noise as some published code does."""

    def __init__(
        self,
        run: Run,
        federation: Federation,
        device: torch.device = CPU,
        randomness: Randomness | None = None,
    ) -> None:
        self.run, self.federation, self.device = run, federation, device
        self.randomness = randomness or run.randomness()
        self.query, self.law = query_of(run), law_of([run])
        self.task = cast("Task", OneByOne(run.task))
        given = (run.algorithm.remembers, run.task.parameters, run.users, device)
        self.memories = Memory(*given)

    def round(self, state: State, draws: Sequence[Draw], count: Count = count_nothing) -> Round:
        """Every participant's local steps, the mean of what they send, and the server's move."""
        return server_round(self.run, state, draws[0], self.memories, self.gather)

    def gather(self, phase: Algorithm, broadcast: Broadcast, draw: Draw) -> RoundUploads:
        """What all participants send."""

        def uploads() -> Iterator[tuple[list[int], Upload]]:
            for user in draw.active.tolist():
                upload, kept = self.participate(user, phase, broadcast, len(draw.active))
                self.memories.keep([user], {name: value[None] for name, value in kept.items()})
                yield [user], upload

        return aggregate(self.run, draw, broadcast, uploads(), phase)

    def participate(
        self, user: int, algorithm: Algorithm, broadcast: Broadcast, members: int
    ) -> tuple[Upload, Slots]:
        """User i's part of the round: K local steps from y = x, or from ``begin_at``."""
        run, plan = self.run, self.run.plan
        memory = {name: value[0] for name, value in self.memories.recall([user]).items()}
        # They come from the run, as at the server: with declared sizes nothing that is uploaded may
        # depend on how many records there are.
        size, weight = int(run.batch_sizes[user]), float(run.weights.expand(run.users)[user])
        round, release = int(broadcast.round), run.privacy_of(user, members)
        given = (run.settled, round, user, size, weight, release, self.device)
        numbers = replace(Numbers.of_one(*given), steps=plan.steps_of(user))
        steps, known = self.steps(user, round), self.query.known(numbers)
        if isinstance(self.law, Summed):
            at = Participant(Broadcast(round, broadcast.params[None]), {}, known)
            one = Participation(self.task, algorithm, self.query, at, numbers)
            return self.law.participate(one, steps, {0: [user]})
        alone = {k: v[0] if isinstance(v, Tensor) else v for k, v in vars(known).items()}
        at = Participant(broadcast, memory, Known(**alone))

        y = algorithm.begin_at(at)
        total = torch.zeros_like(y)
        for _, (batch, normals) in zip(range(plan.steps_of(user)), steps, strict=False):
            query = self.query(self.task, y[None], batch, numbers, normals)[0]  # H̃_i^k
            gradient = query + plan.regularisation * y
            total += gradient
            y = y - numbers.step_size[0] * algorithm.direction(gradient, y, at)
        upload, kept = algorithm.finish(Local(y, total / plan.steps_of(user)), at)
        totals = {name: value[None] for name, value in upload.totals.items()}
        return Upload(upload.params[None], totals), kept

    def steps(self, user: int, round: int) -> Iterator[tuple[Batch, Tensor | None]]:
        """User i's batches S_i^k and its noise, step by step."""
        run, plan = self.run, self.run.plan
        features, labels = self.federation.train.of(user)
        features, labels = run.task.prepare(features).to(self.device), labels.to(self.device)
        law = (plan.local_steps, run.sampling)
        size = int(run.batch_sizes[user])
        drawn = self.randomness.batches(
            round, user, len(labels), size, *law, declared=run.declared(user)
        )
        noise = NoiseStreams([self.randomness.normals(round, user)], run.task.parameters)
        for k in range(plan.local_steps):
            chosen = torch.from_numpy(drawn.of(k)).to(self.device)
            normals = None
            if run.privacy is not None and run.privacy.noise > 0:
                normals = torch.from_numpy(noise.draw(1)[0]).to(self.device)
            yield Batch(features[chosen][None], labels[chosen][None]), normals

    def acknowledge(self, round: int) -> None:
        """Nobody waits for it."""

    def memory(self) -> dict[str, Any]:
        """The users' slots, for a checkpoint."""
        return {"memories": self.memories.to_dict()}

    def restore(self, memory: Mapping[str, Any]) -> None:
        """Take up what :meth:`memory` gave."""
        self.memories.restore(memory["memories"])

    def norms(self) -> dict[str, float]:
        """The largest norm of each slot of the users."""
        return self.memories.norms()
