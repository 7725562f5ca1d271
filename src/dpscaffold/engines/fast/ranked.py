"""A round of one run on several processes.

Each rank computes the participations of its own users (:mod:`~dpscaffold.federation.share`) and
adds them up; the sums of the ranks are reduced in float64. So a run differs from that of one
process in the last bits, and the same number of ranks makes the same bits. Secure sums are
integers, which any order adds alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Broadcast, Slots, Upload
from dpscaffold.config import Run
from dpscaffold.engines.aggregate import (
    Aggregate,
    SecureAggregate,
    mean_weights,
    new_aggregate,
    weighted_sum,
)
from dpscaffold.engines.fast.stacking import StackedBroadcast
from dpscaffold.engines.fast.worker import Worker
from dpscaffold.engines.machine import Hardware
from dpscaffold.engines.participation.drawing import Row
from dpscaffold.engines.ranks import Handlers, Ranks, SharedMemories
from dpscaffold.engines.simulator import Simulator
from dpscaffold.engines.state import Draw, RoundUploads
from dpscaffold.federation.share import UserShare
from dpscaffold.randomness.streams import Randomness

#: The name, the type and the shape of a tensor that is sent.
Described = list[tuple[str, str, list[int]]]

#: Some of this rank's participants, and their uploads, (U, ·).
Uploads = Iterator[tuple[list[int], Upload]]


class RankedSimulator(Simulator):
    """The simulator of one rank, which computes its own users. Rank 0 gathers rounds; the others
    answer its requests (:meth:`handlers`)."""

    def __init__(
        self,
        setting: Run,
        share: UserShare,
        hardware: Hardware,
        randomness: Randomness,
        ranks: Ranks,
    ) -> None:
        self.share, self.ranks, self.first_user = share, ranks, share.users.start
        super().__init__([setting], [share.federation], hardware, [randomness])
        # The least of all ranks, which rank 0 stores: a run that is resumed adds in the same order.
        self._shards.chunk = int(-ranks.most([-self._shards.chunk])[0])
        self.shared_memories = SharedMemories(
            self.memories, ranks, setting.users, setting.algorithm.remembers
        )
        self.own_memories = self.memories
        self.memories = self.shared_memories
        self.all_memories = [self.memories]
        self._columns: dict[Algorithm, Described] = {}

    def _make_worker(self) -> Worker:
        given = (self.settings, self.federations, self.device, self.hardware.cores)
        return Worker(*given, self.share)

    def handlers(self) -> Handlers:
        """What the other ranks do for rank 0."""
        return {**self.shared_memories.handlers(), "gather": self._answer_gather}

    def gather(self, phase: Algorithm, broadcast: Broadcast, draw: Draw) -> RoundUploads:
        """One round of all users, at rank 0."""
        users = np.ascontiguousarray(draw.active, dtype=np.int64)
        weights = mean_weights(self.settings[0], draw)
        sent = {"params": broadcast.params, **broadcast.shared}
        self.ranks.ask(
            "gather",
            round=broadcast.round,
            users=len(users),
            chunk=self.chunk,
            tensors=_described(sent),
        )
        self.ranks.broadcast(torch.from_numpy(np.stack([users, weights])))
        for value in sent.values():
            self.ranks.broadcast(value.contiguous())

        total = new_aggregate(self.settings[0], draw, broadcast, phase)
        if len(users):
            self._add_up(phase, broadcast, users, weights, total)
        self.shared_memories.took_part(users)
        return total.gathered()

    def _answer_gather(self, round: int, users: int, chunk: int, tensors: Described) -> None:
        """The same round at another rank."""
        self._shards.chunk = chunk
        drawn = self.ranks.broadcast(torch.empty(2, users, dtype=torch.float64)).numpy()
        received = {
            name: self.ranks.broadcast(
                torch.empty(shape, dtype=getattr(torch, kind), device=self.device)
            )
            for name, kind, shape in tensors
        }
        broadcast = Broadcast(round, received.pop("params"), received)
        setting = self.settings[0]
        phase = setting.algorithm.phase(round, setting.warm_rounds)
        if users:
            self._add_up(phase, broadcast, drawn[0].astype(np.int64), drawn[1], None)

    def cut_short(self) -> bool:
        """Whether the last round is to be gathered again: batches that do not fit are computed
        again within the round."""
        return False

    def gather_all(
        self, phase: Algorithm, broadcasts: Sequence[Broadcast], draws: Sequence[Draw]
    ) -> list[RoundUploads]:
        """The round of the only run."""
        return [self.gather(phase, broadcasts[0], draws[0])]

    def _add_up(
        self,
        phase: Algorithm,
        broadcast: Broadcast,
        users: np.ndarray,
        weights: np.ndarray,
        total: Aggregate | SecureAggregate | None,
    ) -> None:
        """Compute this rank's participations; rank 0 adds those of all ranks to ``total``."""
        own, setting = self.share.users, self.settings[0]
        mine = users[(users >= own.start) & (users < own.stop)].tolist()
        rows = self._rows(broadcast.round, 0, mine, len(users))
        uploads = self._uploads(phase, broadcast, rows)
        try:
            if setting.sums is not None:
                self._add_integers(uploads, users, total)
            else:
                by_user = dict(zip(users.tolist(), weights.tolist(), strict=True))
                self._add_sums(phase, uploads, users, by_user, total)
        finally:
            self._forget(broadcast.round)

    def _uploads(self, phase: Algorithm, broadcast: Broadcast, rows: Sequence[Row]) -> Uploads:
        """The uploads of this rank's users, a chunk at a time."""
        sent = StackedBroadcast([broadcast])

        def work(shard: Sequence[Row]) -> tuple[Upload, Slots]:
            return _whole(self.worker, lambda: self._participate(phase, shard, sent))

        for shard, (upload, kept) in self._shards.answers(rows, work):
            users = [row.user for row in shard]
            self.own_memories.keep(users, kept)
            yield users, upload

    def _recalled(self, rows: Sequence[Row]) -> Slots:
        """The slots of some rows, all of which this rank holds."""
        return self.own_memories.recall([row.user for row in rows])

    def _add_integers(
        self, uploads: Uploads, users: np.ndarray, total: Aggregate | SecureAggregate | None
    ) -> None:
        """Add the integers of a secure sum, which are the same in any order."""
        size = self.settings[0].task.parameters
        own = torch.zeros(size, dtype=torch.int64, device=self.device)
        for _, upload in uploads:
            own += upload.params.sum(0)
        own = self.ranks.reduced(own)
        if total is not None:
            total.add(users.tolist(), Upload(own[None]))

    def _add_sums(
        self,
        phase: Algorithm,
        uploads: Uploads,
        users: np.ndarray,
        weights: Mapping[int, float],
        total: Aggregate | SecureAggregate | None,
    ) -> None:
        """Add the weighted moves and the totals of this rank, then those of all ranks."""
        own, drift, upload = None, 0.0, None
        for mine, upload in uploads:
            at = torch.tensor([weights[user] for user in mine]).to(self.device)
            mean = weighted_sum(at, upload.params)
            sums = torch.cat([mean, *[value.sum(0) for value in upload.totals.values()]]).double()
            own = sums if own is None else own + sums
            drift = max(drift, float(upload.params.norm(dim=1).max()))

        columns = self._columns_of(phase, upload)
        sizes = [shape[0] for _, _, shape in columns]
        if own is None:
            own = torch.zeros(sum(sizes), dtype=torch.float64, device=self.device)
        own = self.ranks.reduced(own).float()
        drift = self.ranks.most([drift])[0]
        if isinstance(total, Aggregate):
            parts = dict(zip([name for name, _, _ in columns], own.split(sizes), strict=True))
            total.set(users.tolist(), Upload(parts.pop("params"), parts), torch.tensor(drift))

    def _columns_of(self, phase: Algorithm, upload: Upload | None) -> Described:
        """What an upload of this phase is made of; ranks without a row learn it from the others."""
        if phase not in self._columns:
            own = None
            if upload is not None:
                self.settings[0].algorithm.check_upload(upload)
                firsts = {name: value[0] for name, value in upload.totals.items()}
                own = _described({"params": upload.params[0], **firsts})
            self._columns[phase] = next(filter(None, self.ranks.gather_values(own)))
        return self._columns[phase]


def _described(tensors: Mapping[str, Tensor]) -> Described:
    """The names, types and shapes of tensors."""
    return [(k, str(v.dtype).removeprefix("torch."), list(v.shape)) for k, v in tensors.items()]


def _whole(worker: Worker, work: Callable[[], tuple[Upload, Slots]]) -> tuple[Upload, Slots]:
    """What the work makes, once more where a Poisson batch did not fit its place on a GPU."""
    worker.cut.flags.clear()
    made = work()
    if not worker.cut.happened():
        return made
    worker.cut.whole = True
    try:
        return work()
    finally:
        worker.cut.whole = False
