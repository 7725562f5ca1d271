"""One round of all runs as a function of tensors: announce, take the steps, add up, move."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import (
    Algorithm,
    Broadcast,
    Cohort,
    Known,
    Participant,
    Server,
    Slots,
    Upload,
)  # fmt: skip
from dpscaffold.algorithms.base import tell_nothing
from dpscaffold.config import Run
from dpscaffold.engine.aggregate import Sums, mean_weights
from dpscaffold.engine.draws import DeviceDraws, DrawnSteps, poisson_width, rounded_up
from dpscaffold.engine.gpu import Tensors, linear_steps
from dpscaffold.engine.host import Source, drawn_on_host
from dpscaffold.engine.query import Numbers
from dpscaffold.engine.records import Records, Steps, handed_out
from dpscaffold.engine.stack import Stack
from dpscaffold.engine.state import Draw
from dpscaffold.engine.steps import Participation, local_steps
from dpscaffold.randomness.streams import Randomness


@dataclass(frozen=True)
class Members:
    """Who takes part in a round, (S, m). A run with fewer participants than others is padded with
    the first user, whose weight is then 0."""

    draws: Sequence[Draw]
    users: np.ndarray
    weights: np.ndarray
    counts: tuple[int, ...]

    @classmethod
    def of(cls, runs: Sequence[Run], draws: Sequence[Draw], own: range) -> Members:
        """From the draws of every run: those who are this process's ``own``."""
        known: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}  # runs may share a draw
        parts = []
        for run, draw in zip(runs, draws, strict=True):
            key = id(draw), 0 if run.plan.weighting == "uniform" else id(run)
            if key not in known:
                there = (draw.active >= own.start) & (draw.active < own.stop)
                known[key] = draw.active[there], mean_weights(run, draw)[there]
            parts.append(known[key])
        counts = tuple([len(mine) for mine, _ in parts])
        users = np.full((len(runs), max(1, *counts)), own.start, dtype=np.int64)
        weights = np.zeros(users.shape)
        for k, (mine, shares) in enumerate(parts):
            users[k, : counts[k]], weights[k, : counts[k]] = mine, shares
        return cls(draws, users, weights, counts)

    @property
    def real(self) -> np.ndarray:
        """Which are no padding, (S, m)."""
        there: np.ndarray = np.arange(self.users.shape[1]) < np.array(self.counts)[:, None]
        return there


class Shape(NamedTuple):
    """What decides the shapes of a round's draws: users hold at most ``most`` records, and batches
    have room for ``width``; ``even`` ones are all that wide."""

    most: int
    width: int
    even: bool


class Block(NamedTuple):
    """Some rows that are computed together: all participants of some runs, or some of one."""

    runs: slice
    members: slice
    #: m.
    among: int

    @property
    def shape(self) -> tuple[int, int]:
        """(s, c)."""
        return self.runs.stop - self.runs.start, self.members.stop - self.members.start

    @property
    def rows(self) -> slice:
        """Where they stand among all rows."""
        first = self.runs.start * self.among + self.members.start
        return slice(first, first + self.shape[0] * self.shape[1])

    def of_runs(self, value: Tensor) -> Tensor:
        """What every run has, for each of its rows."""
        size = self.shape[0] * self.shape[1]
        return value[self.runs].repeat_interleave(self.shape[1], 0, output_size=size)


@dataclass(frozen=True)
class Work:
    """The round with this ``number``. ``whole`` gives Poisson batches room for all records."""

    engine: Stack
    phase: Algorithm
    number: int
    members: Members
    streams: Sequence[Randomness]
    #: What is announced to is asked of all participants, where other processes have some.
    cohort: Tensors = field(default_factory=dict)
    whole: bool = False

    @property
    def key(self) -> tuple[object, ...] | None:
        """Equal keys are equal work on tensors of equal shapes; None where nothing can be
        recorded."""
        engine = self.engine
        recorded = engine.draws_on_device and engine.store.resident and engine.comm.count == 1
        if not recorded or self.whole:
            return None
        own = self.phase, self.phase.name, self.shape, self.leads
        return *own, self.members.counts, engine.chunk

    @cached_property
    def shape(self) -> Shape:
        """Rounded up where users differ, so that few shapes suffice."""
        engine, fixed = self.engine, self.engine.run.sampling == "fixed"
        at = np.arange(len(self.members.users))[:, None], self.members.users
        records, batches = engine.records[at], engine.batches[at]
        most, width = int(records.max()), int(batches.max())
        alike = int(records.min()) == most and int(batches.min()) == width
        if not fixed:
            pairs = set(zip(records.ravel().tolist(), batches.ravel().tolist(), strict=True))
            width = max(poisson_width(*pair) for pair in pairs)
        even = fixed and int(batches.min()) == width
        if not alike:
            most = rounded_up(most)
            width = width if even else min(most, rounded_up(width))
        return Shape(most, most if self.whole else width, even)

    @cached_property
    def leads(self) -> tuple[int, ...]:
        """For every run the one whose draws it shares."""
        users, draws = self.members.users, self.members.draws
        return tuple(
            [
                first if draws[first] is draws[k] or np.array_equal(users[first], users[k]) else k
                for k, first in enumerate(self.engine.draw_alike)
            ]
        )

    def __call__(self, given: Tensors) -> Tensors:
        """Announce, take the steps of all participants, add up, and move the servers."""
        engine, runs = self.engine, len(self.members.counts)
        numbers = self._numbers(given)
        shared = self._announced({**given, **self.cohort})
        sums: Sums = {}
        drift = given["x"].new_zeros(runs)
        kept: dict[str, list[Tensor]] = {}
        cut = []
        for block in self._blocks():
            upload, slots, overflowed = self._part(block, given, numbers, shared)
            self.phase.check_upload(upload)
            upload = self._real(upload, block, given)
            weights = given["weights"][block.runs, block.members]
            for name, value in engine.law.added(upload, weights).items():
                if name not in sums:
                    sums[name] = value.new_zeros(runs, value.shape[1])
                sums[name][block.runs] += value
            lengths = upload.params.float().norm(dim=1).view(block.shape).amax(1)
            drift[block.runs] = torch.maximum(drift[block.runs], lengths)
            for name, value in slots.items():
                kept.setdefault(name, []).append(value)
            cut += overflowed
        broadcast, comm = Broadcast(self.number, given["x"]), engine.comm
        if comm.count > 1:
            drift = torch.tensor(comm.all(drift.tolist())).amax(0)
        sums = {name: comm.sum(value) for name, value in sums.items()}
        mean = engine.law.uploads(self.phase, broadcast, sums, self.members.draws)
        made = self._updated(given, mean)
        made |= {"mean": mean.params, "drift": drift}
        made |= {f"totals.{name}": value for name, value in mean.totals.items()}
        made |= {f"kept.{name}": torch.cat(values) for name, values in kept.items()}
        if cut:
            made["overflowed"] = torch.stack(cut).any()
        if cut and comm.count > 1:
            made["overflowed"] = torch.tensor(any(comm.all(bool(made["overflowed"]))))
        return made

    def _blocks(self) -> Iterator[Block]:
        """All rows, as many at a time as the chunk allows."""
        (runs, count), chunk = self.members.users.shape, self.engine.chunk
        together, wide = max(1, chunk // count), min(count, chunk)
        for run in range(0, runs, together):
            for member in range(0, count, wide):
                own = slice(member, min(count, member + wide))
                yield Block(slice(run, min(runs, run + together)), own, count)

    def _real(self, upload: Upload, block: Block, given: Tensors) -> Upload:
        """The uploads, with zeros for those of padding."""
        if min(self.members.counts) == self.members.users.shape[1]:
            return upload
        there = (given["weights"] > 0)[block.runs, block.members].reshape(-1, 1)
        totals = {name: value.where(there, 0.0) for name, value in upload.totals.items()}
        return Upload(upload.params.where(there, torch.zeros_like(upload.params)), totals)

    def _numbers(self, given: Tensors) -> Numbers:
        """The numbers of all rows."""
        tables, users = self.engine.tables, given["users"]

        def column(values: Tensor) -> Tensor:
            values = values.expand_as(users) if values.shape[1] == 1 else values.gather(1, users)
            return values.reshape(-1, 1)

        columns = {name: column(tables[name]) for name in Numbers.OF_USERS}
        steps = column(tables["steps"]) if "steps" in tables else self.engine.run.plan.local_steps
        columns["spread"] = columns["spread"] * column(given["louder"])
        return Numbers(step_size=column(given["step_size"]), steps=steps, **columns)

    def _announced(self, given: Tensors) -> Tensors:
        """What every run's participants receive, (S, ·)."""
        if self.phase.announce is tell_nothing:
            return {}
        shape, query = given["users"].shape, self.engine.query
        known = vars(query.known(self._numbers(given)))
        fixed = {name: value for name, value in known.items() if not isinstance(value, Tensor)}
        members = {name: given[name] for name in ("users", "weights", "seen")}
        for name, value in known.items():
            if isinstance(value, Tensor):
                members[f"known.{name}"] = value.view(*shape, -1)
        if self.phase.mirrored:
            for name in self.phase.shared:
                members[f"memory.{name}"] = given[f"memory.{name}"].view(*shape, -1)

        def tell(own: Tensors) -> Tensors:
            cohort = Cohort(
                own["users"],
                own["weights"].float(),
                Known(**{**fixed, **under("known.", own)}),
                under("memory.", own),
                own["seen"],
            )
            return dict(self.phase.announce(Server(own["x"], under("server.", own)), cohort))

        counts = [len(draw.active) for draw in self.members.draws]
        return over_runs(tell, _servers(given), members, counts)

    def _updated(self, given: Tensors, mean: Upload) -> Tensors:
        """Every run's server after its move."""
        own = {"mean": mean.params, **{f"totals.{k}": v for k, v in mean.totals.items()}}
        rate: Any = self.engine.run.plan.server_rate
        if "rate" in given:
            own["rate"] = given["rate"]

        def move(of: Tensors) -> Tensors:
            server = Server(of["x"], under("server.", of))
            upload = Upload(of["mean"], under("totals.", of))
            moved = self.phase.update(server, upload, of.get("rate", rate))
            return {"x": moved.params, **{f"server.{k}": v for k, v in moved.slots.items()}}

        return over_runs(move, {**_servers(given), **own})

    def _part(
        self, block: Block, given: Tensors, numbers: Numbers, shared: Tensors
    ) -> tuple[Upload, Slots, list[Tensor]]:
        """The uploads and new slots of a block's participants, and whether a batch was cut."""
        engine, phase, rows = self.engine, self.phase, block.rows
        own = Numbers(
            **{k: v[rows] if isinstance(v, Tensor) else v for k, v in vars(numbers).items()}
        )
        sent = {name: block.of_runs(value) for name, value in shared.items()}
        broadcast = Broadcast(given["round"], block.of_runs(given["x"]), sent)
        memory = {name: value[rows] for name, value in under("memory.", given).items()}
        at = Participant(broadcast, memory, engine.query.known(own))
        records, starts = self._records(block, given)
        users = {
            k: self.members.users[k, block.members].tolist()
            for k in range(block.runs.start, block.runs.stop)
        }
        part = Participation(engine.task, phase, engine.query, at, own)
        if not engine.draws_on_device:
            batches = records.batches(starts, self._host_steps(block))
            return *engine.law.participate(part, batches, users), []
        drawn = self._drawn(block, given, starts)
        cut = [] if drawn.batches.overflowed is None else [drawn.batches.overflowed]
        local = linear_steps(part, records, drawn)
        if local is None:
            steps = handed_out(drawn, drawn.places)
            local = local_steps(part, records.batches(starts, steps))
        return *phase.finish(local, at), cut

    def _records(self, block: Block, given: Tensors) -> tuple[Records, Tensor]:
        """Where the records of these rows are."""
        engine = self.engine
        if engine.store.held is None:
            runs = range(block.runs.start, block.runs.stop)
            return engine.store.of([(k, self.members.users[k, block.members]) for k in runs])
        users = given["users"][block.runs, block.members]
        starts = engine.tables["starts"][block.runs].gather(1, users)
        return engine.store.held, starts.reshape(-1, 1)

    def _leaders(self, block: Block) -> tuple[list[int], Tensor | None]:
        """The runs whose draws a block needs, and which of their rows each row has; None where each
        has its own."""
        wanted = self.leads[block.runs]
        first = list(dict.fromkeys(wanted))
        if len(first) == len(wanted):
            return first, None
        place = torch.tensor([first.index(lead) for lead in wanted])
        count = block.shape[1]
        return first, (place[:, None] * count + torch.arange(count)).view(-1)

    def _drawn(self, block: Block, given: Tensors, starts: Tensor) -> DrawnSteps:
        """Batches and noise of the device."""
        engine, shape, steps = self.engine, self.shape, self.engine.run.plan.local_steps
        leaders, places = self._constant_leaders(block)
        users = torch.stack([given["users"][k, block.members] for k in leaders])
        keys = torch.stack([engine.tables["keys"][k] for k in leaders])
        tables = [engine.tables["sizes"][k] for k in leaders]
        sizes = torch.cat([one[own] for one, own in zip(tables, users, strict=True)])
        who = users.reshape(-1, 1)
        where = [who, given["round"].expand_as(who), keys.repeat_interleave(block.shape[1], 0)]
        draws = DeviceDraws(torch.cat(where, dim=1), sizes)
        if engine.run.sampling == "poisson":
            batches = draws.poisson(steps, shape.most, shape.width)
        else:
            batches = draws.fixed(steps, *shape)
        return DrawnSteps(draws, batches, places, starts[:, 0], engine.noise)

    def _constant_leaders(self, block: Block) -> tuple[list[int], Tensor | None]:
        """The same on the device, sent there once: recorded work cannot send anything."""
        if block.rows.start not in self._sent:
            leaders, places = self._leaders(block)
            device = self.engine.device
            self._sent[block.rows.start] = leaders, None if places is None else places.to(device)
        return self._sent[block.rows.start]

    @cached_property
    def _sent(self) -> dict[int, tuple[list[int], Tensor | None]]:
        return {}

    def _host_steps(self, block: Block) -> Steps:
        """Batches and noise of the CPU's streams."""
        engine, plan, sources = self.engine, self.engine.run.plan, []
        leaders, places = self._leaders(block)
        for k in leaders:
            for user in self.members.users[k, block.members].tolist():
                sizes = int(engine.records[k, user]), int(engine.batches[k, user])
                declared = engine.runs[k].declared(user)
                sources.append(Source(self.streams[k], user, *sizes, declared))
        law = plan.local_steps, engine.run.sampling, engine.noise
        drawn = drawn_on_host(self.number, sources, *law, engine.device)
        return handed_out(drawn, None if places is None else places.to(engine.device))


_log = logging.getLogger(__name__)


def over_runs(
    function: Callable[[Tensors], Tensors],
    servers: Tensors,
    members: Tensors | None = None,
    counts: Sequence[int] = (),
) -> Tensors:
    """A function of one run, for all of them: tensors have a first axis of S. Of ``members`` each
    run has as many as it ``counts``."""
    members, runs = members or {}, len(next(iter(servers.values())))
    if runs > 1 and len(set(counts)) < 2:
        try:
            return torch.vmap(function)({**servers, **members})
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # it asks for a number: then one run after the other
            _log.debug("a function of one run cannot be taken of all at once", exc_info=True)
    made = []
    for k in range(runs):
        own = {name: value[k, : counts[k]] for name, value in members.items()}
        made.append(function({**{name: value[k] for name, value in servers.items()}, **own}))
    return {name: torch.stack([one[name] for one in made]) for name in made[0]}


def under(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors whose name begins so, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _servers(given: Tensors) -> Tensors:
    return {k: v for k, v in given.items() if k == "x" or k.startswith("server.")}
