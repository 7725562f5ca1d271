"""A round of one run on several processes, with the sums of one process, bit for bit.

Each rank computes the participations of its own users (:mod:`~dpscaffold.federation.share`). What
comes of a row does not depend on the rows next to it, as long as all rows of a chunk are padded to
one width. Running sums then go from rank to rank in the order of the cohort
(:mod:`~dpscaffold.engines.fast.ordered`). Secure sums are integers, which are reduced in any order;
so are the sums of GPUs, which have no fixed order themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dpscaffold.algorithms import Algorithm, Broadcast, Slots, Upload
from dpscaffold.engines.aggregate import (
    Aggregate,
    SecureAggregate,
    mean_weights,
    new_aggregate,
    weighted_sum,
)
from dpscaffold.engines.fast.loans import Loans
from dpscaffold.engines.fast.ordered import (
    Chunks,
    OrderedSums,
    keeps_order,
    narrow_sum,
    passed_columns,
)
from dpscaffold.engines.fast.worker import CPU_RESIDENT_BYTES, Worker
from dpscaffold.engines.machine import Hardware
from dpscaffold.engines.memories import Memories
from dpscaffold.engines.participation.drawing import Indices, Row, indices
from dpscaffold.engines.participation.records import LocalRecords
from dpscaffold.engines.ranks import Handlers, Ranks, SharedMemories
from dpscaffold.engines.simulator import Simulator
from dpscaffold.engines.state import Draw, RoundUploads
from dpscaffold.engines.store import Store
from dpscaffold.federation import Federation
from dpscaffold.federation.share import UserShare, user_ranges
from dpscaffold.randomness.streams import Randomness
from dpscaffold.setting import Setting
from dpscaffold.tasks.base import apart

#: How many numbers (float32) a line of memory has: places that differ by it begin alike.
_LINE = 16

#: How many models are tried to find out whether places matter: one may agree by chance.
_TRIES = 3

#: Scores of a row's batch below which a trial would say little; there places always count.
_FEW = 1 << 12

#: Records of at most this many bytes are held by every rank, on CPUs that have read them anyway, so
#: that ranks can compute for users of each other.
HELD_BY_ALL = 1 << 28

#: The name, the type and the shape of a tensor that is sent.
Described = list[tuple[str, str, list[int]]]


@dataclass(frozen=True)
class _Part:
    """This rank's rows of a chunk, with their ``places`` among all ``count`` rows of it.

    The last bits of a product may depend on where its operands begin in a line of memory, those of
    an exponential on whether its line is full, and those of a module on whether its stack has more
    than one row. :meth:`is_anywhere` finds out. Where they do, rows get places of the stack that
    begin as in one process, in lines that are as full, and copies of a row fill the rest.
    """

    worker: Worker
    memories: Loans
    phase: Algorithm
    broadcast: Broadcast
    rows: Sequence[Row]
    records: LocalRecords
    drawn: Indices | None
    places: np.ndarray
    count: int

    def computed(self, numbers: Sequence[int], anywhere: bool) -> tuple[Upload, Slots]:
        """K steps of the rows with these numbers."""
        alone = len(numbers) == 1 < self.count and not apart(self.worker.task)
        if anywhere and not alone:
            return self.steps(numbers)
        places = self.places[numbers]
        start = places[0] // _LINE * _LINE
        end = min(self.count, (places[-1] // _LINE + 1) * _LINE)
        if end - start == 1:  # one process has more than one row
            start = max(0, start - _LINE)
        where = places - start
        stack = np.full(end - start, numbers[0])
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
        random = torch.Generator().manual_seed(0)
        drawn = self.drawn[0][:1, :1], self.drawn[1][:1, :1]
        for _ in range(_TRIES):
            params = torch.randn(self.broadcast.params.shape, generator=random) / 8
            sent = replace(self.broadcast, params=params)
            one = replace(self, broadcast=sent, rows=[first], drawn=drawn)
            alone, stack = one.steps([0]), one.steps([0] * (_LINE + 1))
            for single, several in zip(_tensors(*alone), _tensors(*stack), strict=True):
                if not torch.equal(several, single.expand_as(several)):
                    return False
        return True


def computed_share(federation: Federation, own: UserShare, device: torch.device) -> UserShare:
    """The users that a rank may have to compute: its own, or all where everybody has their
    records."""
    size = 4 * federation.train.features.numel()
    if device.type != "cpu" or federation.mapped or size > HELD_BY_ALL:
        return own
    return UserShare.of(federation, range(federation.users))


def _tensors(upload: Upload, kept: Slots) -> list[Tensor]:
    return [upload.params, *upload.totals.values(), *kept.values()]


def _chosen(slots: Slots, rows: Tensor) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in slots.items()}


class RankedSimulator(Simulator):
    """The simulator of one rank. Rank 0 gathers rounds; the others answer its requests
    (:meth:`handlers`).

    A rank computes its own users. Where its ``share`` has all users, the participants of a round
    are divided evenly instead, and ranks lend each other the slots of those who change places.
    """

    def __init__(
        self,
        setting: Setting,
        share: UserShare,
        hardware: Hardware,
        randomness: Randomness,
        ranks: Ranks,
    ) -> None:
        self.share, self.ranks, self.first_user = share, ranks, share.users.start
        super().__init__([setting], [share.federation], hardware, [randomness])
        self._at_once = self.hardware.chunk or self._fitting_chunk()
        self.shared_memories = SharedMemories(
            self.memories, ranks, setting.users, setting.algorithm.remembers
        )
        self.own_memories = self.memories
        self.memories = self.shared_memories
        self.all_memories = [self.memories]
        self._columns: dict[Algorithm, Described] = {}
        self._anywhere: dict[tuple[Algorithm, int], bool] = {}
        self._keeps_order = not any(ranks.most([not keeps_order(torch.get_num_threads())]))
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

    @property
    def _reduces(self) -> bool:
        """Whether uploads are added in the order of the network: GPUs have no fixed order."""
        return self.device.type != "cpu"

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
        self._at_once = chunk
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
        ends = [bounds.stop for bounds in user_ranges(self.share.all_users, self.ranks.count)]
        owned = Chunks(len(users), self.chunk, np.searchsorted(users, ends).tolist())
        chunks = owned
        if len(self.share.users) == self.share.all_users:
            even = user_ranges(len(users), self.ranks.count)
            chunks = Chunks(len(users), self.chunk, [bounds.stop for bounds in even])
        loans = Loans(self.ranks, self.own_memories, self._fresh(), users, owned, chunks)
        try:
            loans.lend()
            uploads = self._uploads(phase, broadcast, users, chunks, loans)
            if self.settings[0].sums is not None:
                self._add_integers(uploads, users, total)
            elif self.settings[0].plan.aggregation != "mean":  # no sum of uploads will do
                self._add_rows(phase, uploads, users, chunks, total)
            elif self._reduces:
                self._add_reduced(phase, uploads, users, weights, total)
            elif self._keeps_order:
                self._add_in_order(phase, uploads, users, weights, chunks, total)
            else:
                self._add_rows(phase, uploads, users, chunks, total)
            loans.give_back()
        finally:
            self._forget(broadcast.round)

    def _fresh(self) -> Memories:
        return self.fresh_memories(self.settings[0])

    def _uploads(
        self,
        phase: Algorithm,
        broadcast: Broadcast,
        users: np.ndarray,
        chunks: Chunks,
        memories: Loans,
    ) -> Iterator[tuple[range, Upload]]:
        """The uploads of this rank's users, piece by piece."""
        pieces = chunks.pieces(self.ranks.rank)
        ready = self._agreed(broadcast.round, pieces, users, chunks)
        for piece in pieces:
            mine = users[piece.start : piece.stop].tolist()
            rows = self._rows(broadcast.round, 0, mine, len(users))
            made = ready.pop(piece) if piece in ready else self._prepared(broadcast.round, rows)
            records, drawn = made
            places = np.arange(piece.start, piece.stop) % chunks.size
            given = (phase, broadcast, rows, records, drawn, places, chunks.length(piece.start))
            upload, kept = self._own(_Part(self.workers[0], memories, *given))
            memories.keep(mine, kept)
            yield piece, upload

    def _prepared(self, round: int, rows: Sequence[Row]) -> tuple[LocalRecords, Indices | None]:
        """The records of some rows, and their batches on a CPU; a GPU draws for itself."""
        records = self.workers[0].records_of(rows)
        return records, None if self.device.type != "cpu" else indices(round, rows)

    def _agreed(
        self, round: int, pieces: Sequence[range], users: np.ndarray, chunks: Chunks
    ) -> dict[range, tuple[LocalRecords, Indices | None]]:
        """The records and batches of those pieces whose chunk has rows of other ranks, as if all
        rows were next to each other: padded to one width, and tame where all are."""
        everyone = [piece for rank in range(self.ranks.count) for piece in chunks.pieces(rank)]
        shared = sorted({p.start // chunks.size for p in everyone if chunks.shared(p)})
        if self.device.type != "cpu" or not shared:
            return {}
        found, most = {}, np.zeros((2, len(shared)))
        for piece in pieces:
            if chunks.shared(piece):
                mine = users[piece.start : piece.stop].tolist()
                rows = self._rows(round, 0, mine, len(users))
                records, drawn = self._prepared(round, rows)
                assert drawn is not None
                found[piece] = records, drawn
                place = shared.index(piece.start // chunks.size)
                most[:, place] = drawn[0].shape[2], not records.tame
        widths, extreme = np.reshape(self._largest(most, users, shared, chunks), (2, -1))
        for piece, (records, (index, count)) in found.items():
            place = shared.index(piece.start // chunks.size)
            padded = pad(index, (0, int(widths[place]) - index.shape[2]))
            tame = records.tame and not extreme[place]
            found[piece] = replace(records, tame=tame), (padded, count)
        return dict(found)

    def _largest(
        self, own: np.ndarray, users: np.ndarray, shared: Sequence[int], chunks: Chunks
    ) -> Sequence[float] | np.ndarray:
        """The width of the batches of chunks, and whether a record is extreme, over all ranks."""
        if self.settings[0].sampling == "fixed" and self.workers[0].store.resident:
            size = chunks.size  # every rank knows without asking
            batches = [self._batches[0][users[k * size : (k + 1) * size]].max() for k in shared]
            return np.stack([batches, own[1]])
        return self.ranks.most(own.ravel().tolist())

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
        if shape[1] * max(1, part.worker.task.outputs) < _FEW:  # too few to find it out
            return False
        if shape not in self._anywhere:
            self._anywhere[shape] = part.is_anywhere()
        return self._anywhere[shape]

    def _add_integers(
        self,
        uploads: Iterable[tuple[range, Upload]],
        users: np.ndarray,
        total: Aggregate | SecureAggregate | None,
    ) -> None:
        """Add the integers of a secure sum, which are the same in any order."""
        size = self.settings[0].task.parameters
        own = torch.zeros(size, dtype=torch.int64, device=self.device)
        for _, upload in uploads:
            own += upload.params.sum(0)
        own = self.ranks.reduced(own)
        if total is not None:
            total.add(users.tolist(), Upload(own[None]))

    def _add_reduced(
        self,
        phase: Algorithm,
        uploads: Iterable[tuple[range, Upload]],
        users: np.ndarray,
        weights: np.ndarray,
        total: Aggregate | SecureAggregate | None,
    ) -> None:
        """Add in the order of the network, for devices that have no fixed order themselves."""
        own, drift, upload = None, 0.0, None
        for piece, upload in uploads:
            at = torch.tensor(weights[piece.start : piece.stop], dtype=torch.float32)
            mean = weighted_sum(at.to(self.device), upload.params)
            sums = torch.cat([mean, *[value.sum(0) for value in upload.totals.values()]])
            own = sums if own is None else own + sums
            drift = max(drift, float(upload.params.norm(dim=1).max()))
        columns = self._columns_of(phase, upload)
        sizes = [shape[0] for _, _, shape in columns]
        if own is None:
            own = torch.zeros(sum(sizes), device=self.device)
        own = self.ranks.reduced(own)
        drift = self.ranks.most([drift])[0]
        if isinstance(total, Aggregate):
            parts = dict(zip([name for name, _, _ in columns], own.split(sizes), strict=True))
            total.set(users.tolist(), Upload(parts.pop("params"), parts), torch.tensor(drift))

    def _add_in_order(
        self,
        phase: Algorithm,
        uploads: Iterable[tuple[range, Upload]],
        users: np.ndarray,
        weights: np.ndarray,
        chunks: Chunks,
        total: Aggregate | SecureAggregate | None,
    ) -> None:
        """Add as one process does, while running sums travel from rank to rank. Of each row only
        its norm and a few columns are gathered."""
        sums, rest, upload = OrderedSums(self.ranks, chunks), [], None
        for piece, upload in uploads:
            self.settings[0].algorithm.check_upload(upload)
            at = torch.tensor(weights[piece.start : piece.stop], dtype=torch.float32)
            sums.add(piece, "params", upload.params, at)
            narrow = [upload.params.norm(dim=1, keepdim=True)]
            for name, value in upload.totals.items():
                wide = passed_columns(value.shape[1])
                if wide:
                    sums.add(piece, name, value[:, :wide], None)
                narrow.append(value[:, wide:])
            rest.append(torch.cat(narrow, dim=1))
        columns = self._columns_of(phase, upload)
        sizes = {name: shape[0] for name, _, shape in columns}
        wides = {name: passed_columns(size) for name, size in sizes.items() if name != "params"}
        found = sums.totals({"params": sizes["params"], **{k: v for k, v in wides.items() if v}})
        widths = [1, *[sizes[name] - wide for name, wide in wides.items()]]
        own = torch.cat(rest) if rest else torch.zeros(0, sum(widths))
        counts = [len(chunks.own(rank)) for rank in range(self.ranks.count)]
        gathered = self.ranks.gather_rows(own, counts)
        if isinstance(total, Aggregate):
            norms, *narrows = torch.cat(gathered).split(widths, dim=1)
            totals = {}
            for (name, wide), rows in zip(wides.items(), narrows, strict=True):
                last = narrow_sum(rows.contiguous(), chunks, alone=not wide)
                totals[name] = torch.cat([found[name], last]) if wide else last
            total.set(users.tolist(), Upload(found["params"], totals), norms.max())

    def _add_rows(
        self,
        phase: Algorithm,
        uploads: Iterable[tuple[range, Upload]],
        users: np.ndarray,
        chunks: Chunks,
        total: Aggregate | SecureAggregate | None,
    ) -> None:
        """Gather all uploads at rank 0, chunk by chunk, where sums cannot be passed on."""
        upload, held = None, {}
        for piece, upload in uploads:
            held[piece.start // chunks.size] = torch.cat(
                [upload.params, *upload.totals.values()], 1
            )
        columns = self._columns_of(phase, upload)
        names, sizes = [name for name, _, _ in columns], [shape[0] for _, _, shape in columns]
        for start in range(0, chunks.count, chunks.size):
            here = range(start, min(start + chunks.size, chunks.count))
            owned = [chunks.own(rank) for rank in range(self.ranks.count)]
            counts = [max(0, min(o.stop, here.stop) - max(o.start, start)) for o in owned]
            own = held.pop(start // chunks.size, torch.zeros(0, sum(sizes)))
            parts = self.ranks.gather_rows(own, counts)
            if total is not None:
                values = dict(zip(names, torch.cat(parts).split(sizes, dim=1), strict=True))
                whole = {name: value.contiguous() for name, value in values.items()}
                total.add(users[start : here.stop].tolist(), Upload(whole.pop("params"), whole))

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
