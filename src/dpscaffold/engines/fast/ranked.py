"""A round of one run on several processes, with the sums of one process, bit for bit.

Each rank computes the participations of its own users (:mod:`~dpscaffold.federation.share`). What
comes of a row does not depend on the rows next to it, as long as all rows of a chunk are padded to
one width. Rank 0 gathers the uploads of a chunk in the order of the cohort and adds them as a
single process does. Secure sums are integers, which each rank adds up before it sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dpscaffold.algorithms import Algorithm, Broadcast, Slots, Upload
from dpscaffold.engines.aggregate import new_aggregate
from dpscaffold.engines.fast.worker import CPU_RESIDENT_BYTES, Worker
from dpscaffold.engines.hardware import Hardware
from dpscaffold.engines.memories import Memories
from dpscaffold.engines.participation.drawing import Indices, Row, indices
from dpscaffold.engines.participation.records import LocalRecords
from dpscaffold.engines.ranks import Handlers, Ranks, SharedMemories
from dpscaffold.engines.simulator import Simulator
from dpscaffold.engines.state import Draw, RoundUploads
from dpscaffold.engines.store import Store
from dpscaffold.federation.share import UserShare
from dpscaffold.randomness.streams import Randomness
from dpscaffold.setting import Setting

#: How many numbers (float32) a line of memory has: places that differ by it begin alike.
_LINE = 16

#: The name, the type and the shape of a tensor that is sent.
Described = list[tuple[str, str, list[int]]]


@dataclass(frozen=True)
class _Part:
    """This rank's rows of a chunk, with their ``places`` among all ``count`` rows of it.

    The last bits of a product may depend on where its operands begin in a line of memory, and those
    of a module on whether its stack has more than one row. :meth:`is_anywhere` finds out. Where
    they do, rows get places of the stack that begin as in one process, and copies of a row fill
    the gaps.
    """

    worker: Worker
    memories: Memories
    phase: Algorithm
    broadcast: Broadcast
    rows: Sequence[Row]
    records: LocalRecords
    drawn: Indices | None
    places: np.ndarray
    count: int

    def computed(self, numbers: Sequence[int], anywhere: bool) -> tuple[Upload, Slots]:
        """K steps of the rows with these numbers."""
        if anywhere:
            return self.steps(numbers)
        places = self.places[numbers]
        where = places - places[0] // _LINE * _LINE
        stack = np.full(max(min(2, self.count), int(where[-1]) + 1), numbers[0])
        stack[where] = numbers
        upload, kept = self.steps(stack.tolist())
        mine = torch.from_numpy(where)
        return Upload(upload.params[mine], _chosen(upload.totals, mine)), _chosen(kept, mine)

    def steps(self, numbers: Sequence[int]) -> tuple[Upload, Slots]:
        """K steps of a stack of these rows, which may repeat."""
        rows = [self.rows[number] for number in numbers]
        firsts = list(dict.fromkeys(numbers))
        drawn = None if self.drawn is None else (self.drawn[0][firsts], self.drawn[1][firsts])
        records = replace(self.records, starts=[self.records.starts[k] for k in numbers])
        memory = self.memories.recall([row.user for row in rows])
        sent = _repeated(self.broadcast, len(rows))
        given = (self.phase, rows, sent, memory, drawn, records)
        return _whole(self.worker, lambda: self.worker.participate(*given))

    def is_anywhere(self) -> bool:
        """Whether one step of a row makes the same bits alone and at every place of a stack."""
        assert self.drawn is not None
        first = replace(self.rows[0], plan=replace(self.rows[0].plan, local_steps=1))
        start = torch.Generator().manual_seed(0)
        params = torch.randn(self.broadcast.params.shape, generator=start) / 8
        one = replace(
            self,
            broadcast=replace(self.broadcast, params=params),
            rows=[first],
            drawn=(self.drawn[0][:1, :1], self.drawn[1][:1, :1]),
        )
        alone, stack = one.steps([0]), one.steps([0] * (_LINE + 1))
        return all(
            torch.equal(several, single.expand_as(several))
            for single, several in zip(_tensors(*alone), _tensors(*stack), strict=True)
        )


def _tensors(upload: Upload, kept: Slots) -> list[Tensor]:
    return [upload.params, *upload.totals.values(), *kept.values()]


def _chosen(slots: Slots, rows: Tensor) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in slots.items()}


class RankedSimulator(Simulator):
    """The simulator of one rank. Rank 0 gathers rounds; the others answer its requests
    (:meth:`handlers`)."""

    def __init__(
        self,
        setting: Setting,
        share: UserShare,
        hardware: Hardware,
        randomness: Randomness,
        ranks: Ranks,
    ) -> None:
        self.share, self.ranks, self.first_user = share, ranks, share.users.start
        super().__init__([setting], [share.federation], hardware, [randomness], ahead=False)
        self._at_once = self.hardware.chunk or self._fitting_chunk()
        self.shared_memories = SharedMemories(
            self.memories, ranks, setting.users, setting.algorithm.remembers
        )
        self.own_memories = self.memories
        self.memories = self.shared_memories
        self.all_memories = [self.memories]
        self._columns: dict[Algorithm, Described] = {}
        self._anywhere: dict[tuple[Algorithm, int], bool] = {}
        store = self.workers[0].store
        if store.resident:
            store.tame = not any(ranks.most([not store.tame]))

    def _make_workers(self) -> list[Worker]:
        """One worker; whether records stay on a CPU is decided by all records, as it also decides
        which rows are computed together."""
        federation, task = self.federations[0], self.settings[0].task
        store = None
        if self.device.type == "cpu":
            fits = 4 * self.share.values <= CPU_RESIDENT_BYTES
            store = Store([federation], task, self.device, None if fits else -1)
        given = (self.device, store, self.hardware.cores(self.device), task, self.share)
        return [Worker(self.settings, self.federations, *given)]

    @property
    def chunk(self) -> int:
        """How many uploads are added together; the same in one process."""
        return self._at_once

    def handlers(self) -> Handlers:
        """What the other ranks do for rank 0."""
        return {**self.shared_memories.handlers(), "gather": self._answer_gather}

    def gather(self, phase: Algorithm, broadcast: Broadcast, draw: Draw) -> RoundUploads:
        """One round of all users, at rank 0."""
        users = np.ascontiguousarray(draw.active, dtype=np.int64)
        sent = {"params": broadcast.params, **broadcast.shared}
        self.ranks.ask(
            "gather",
            round=broadcast.round,
            users=len(users),
            chunk=self.chunk,
            tensors=_described(sent),
        )
        self.ranks.broadcast(torch.from_numpy(users))
        for value in sent.values():
            self.ranks.broadcast(value.contiguous())
        total = new_aggregate(self.settings[0], draw, broadcast, phase)
        for members, upload in self._uploads(phase, broadcast, users):
            total.add(members, upload)
        self.shared_memories.took_part(users)
        return total.gathered()

    def _answer_gather(self, round: int, users: int, chunk: int, tensors: Described) -> None:
        """The same round at another rank."""
        self._at_once = chunk
        active = self.ranks.broadcast(torch.empty(users, dtype=torch.int64)).numpy()
        received = {
            name: self.ranks.broadcast(
                torch.empty(shape, dtype=getattr(torch, kind), device=self.device)
            )
            for name, kind, shape in tensors
        }
        broadcast = Broadcast(round, received.pop("params"), received)
        setting = self.settings[0]
        phase = setting.algorithm.phase(round, setting.warm_rounds)
        for _ in self._uploads(phase, broadcast, active):
            pass

    def cut_short(self) -> bool:
        """Whether the last round is to be gathered again: batches that do not fit are computed
        again within the round."""
        return False

    def gather_all(
        self, phase: Algorithm, broadcasts: Sequence[Broadcast], draws: Sequence[Draw]
    ) -> list[RoundUploads]:
        """The round of the only run."""
        return [self.gather(phase, broadcasts[0], draws[0])]

    def _uploads(
        self, phase: Algorithm, broadcast: Broadcast, users: np.ndarray
    ) -> Iterator[tuple[list[int], Upload]]:
        """The uploads of all ranks, chunk by chunk; at other ranks than 0 there are none."""
        try:
            for start in range(0, len(users), self.chunk):
                yield from self._chunk(
                    phase, broadcast, users[start : start + self.chunk], len(users)
                )
        finally:
            self._forget(broadcast.round)

    def _chunk(
        self, phase: Algorithm, broadcast: Broadcast, users: np.ndarray, members: int
    ) -> Iterator[tuple[list[int], Upload]]:
        """One chunk of users: this rank's part is computed, and all parts go to rank 0."""
        places = self.shared_memories.places_by_rank(users)
        mine = users[places[self.ranks.rank]].tolist()
        rows = self._rows(broadcast.round, 0, mine, members)
        records, drawn = self._agreed(broadcast.round, rows, users)
        upload = None
        if records is not None:
            given = (phase, broadcast, rows, records, drawn, places[self.ranks.rank], len(users))
            upload, kept = self._own(_Part(self.workers[0], self.own_memories, *given))
            self.own_memories.keep(mine, kept)
        if self.settings[0].sums is not None:
            yield from self._integer_sums(upload, users, places)
        else:
            yield from self._rows_of_all(phase, upload, users, places)

    def _agreed(
        self, round: int, rows: Sequence[Row], users: np.ndarray
    ) -> tuple[LocalRecords | None, Indices | None]:
        """The records of this rank's rows, and their batches on a CPU, as if they were next to the
        rows of all ranks: padded to one width, and tame where all are."""
        worker = self.workers[0]
        if self.device.type != "cpu":  # a GPU draws for itself
            return (worker.records_of(rows) if rows else None), None
        if not rows:
            self._all_agree(users)
            return None, None
        records, (index, count) = worker.records_of(rows), indices(round, rows)
        width, extreme = self._all_agree(users, index.shape[2], not records.tame)
        padded = pad(index, (0, width - index.shape[2]))
        return replace(records, tame=records.tame and not extreme), (padded, count)

    def _all_agree(
        self, users: np.ndarray, width: int = 0, extreme: bool = False
    ) -> tuple[int, bool]:
        """The width of all batches of a chunk, and whether a record is extreme, over all ranks."""
        fixed = self.settings[0].sampling == "fixed"
        if fixed and self.workers[0].store.resident:  # every rank knows without asking
            return int(self._batches[0][users].max()), extreme
        found = self.ranks.most([width, extreme])
        return int(found[0]), bool(found[1])

    def _own(self, part: _Part) -> tuple[Upload, Slots]:
        """K steps of this rank's rows: fewer at a time from when memory was not enough."""
        anywhere = self._is_anywhere(part)
        numbers = {row.user: k for k, row in enumerate(part.rows)}

        def work(_: Worker, shard: Sequence[Row]) -> tuple[Upload, Slots]:
            return part.computed([numbers[row.user] for row in shard], anywhere)

        answers = [answer for _, answer in self._shards.answers(part.rows, work)]
        uploads, kept = zip(*answers, strict=True)
        totals = _joined([upload.totals for upload in uploads])
        return Upload(torch.cat([upload.params for upload in uploads]), totals), _joined(kept)

    def _is_anywhere(self, part: _Part) -> bool:
        """Whether rows of these shapes come out the same at every place of a stack. A GPU adds in
        no fixed order, so there it does not matter."""
        if part.drawn is None:
            return True
        shape = (part.phase, part.drawn[0].shape[2])
        if shape not in self._anywhere:
            self._anywhere[shape] = part.is_anywhere()
        return self._anywhere[shape]

    def _integer_sums(
        self, upload: Upload | None, users: np.ndarray, places: Sequence[np.ndarray]
    ) -> Iterator[tuple[list[int], Upload]]:
        """Rank 0: the sum of each rank's integers."""
        size = self.settings[0].task.parameters
        own = torch.zeros(size, dtype=torch.int64, device=self.device)
        if upload is not None:
            own = upload.params.sum(0)
        for part, place in zip(self.ranks.gather(own), places, strict=False):
            if len(place):
                yield users[place].tolist(), Upload(part[None])

    def _rows_of_all(
        self,
        phase: Algorithm,
        upload: Upload | None,
        users: np.ndarray,
        places: Sequence[np.ndarray],
    ) -> Iterator[tuple[list[int], Upload]]:
        """Rank 0: the uploads of a chunk's users in their order."""
        columns = self._columns_of(phase, upload)
        width = sum(shape[0] for _, _, shape in columns)
        own = torch.zeros(0, width, dtype=getattr(torch, columns[0][1]), device=self.device)
        if upload is not None:
            own = torch.cat([upload.params, *upload.totals.values()], dim=1)
        parts = self.ranks.gather_rows(own, [len(place) for place in places])
        if parts:
            order = torch.from_numpy(np.concatenate(places).argsort()).to(self.device)
            names = [name for name, _, _ in columns]
            sizes = [shape[0] for _, _, shape in columns]
            values = dict(zip(names, torch.cat(parts)[order].split(sizes, dim=1), strict=True))
            params = values.pop("params").contiguous()
            totals = {name: value.contiguous() for name, value in values.items()}
            yield users.tolist(), Upload(params, totals)

    def _columns_of(self, phase: Algorithm, upload: Upload | None) -> Described:
        """What an upload of this phase is made of; ranks without a row learn it from the others."""
        if phase not in self._columns:
            own = None
            if upload is not None:
                self.settings[0].algorithm.check_upload(upload)
                own = _described({"params": upload.params[0], **_firsts(upload.totals)})
            self._columns[phase] = next(filter(None, self.ranks.gather_values(own)))
        return self._columns[phase]


def _firsts(slots: Slots) -> dict[str, Tensor]:
    return {name: value[0] for name, value in slots.items()}


def _described(tensors: Mapping[str, Tensor]) -> Described:
    """The names, types and shapes of tensors."""
    return [(k, str(v.dtype).removeprefix("torch."), list(v.shape)) for k, v in tensors.items()]


def _joined(parts: Sequence[Slots]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _repeated(broadcast: Broadcast, count: int) -> Broadcast:
    """What the server sent, once for each row, (U, ·)."""

    def rows(value: Tensor) -> Tensor:
        return value[None].repeat(count, *[1] * value.ndim)

    shared = {name: rows(value) for name, value in broadcast.shared.items()}
    return Broadcast(broadcast.round, rows(broadcast.params), shared)


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
