"""All participants of all stacked runs side by side: the fast engine.

What a round computes from is put into tensors: x and its slots (S, ·), the participants' slots
(S, m, ·), their numbers. A round is a function of these alone, and does the same for one run as for
many. On a GPU it is recorded once for its shapes and replayed (:mod:`~dpscaffold.engine.gpu`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Server, Upload
from dpscaffold.config import Run
from dpscaffold.engine.aggregate import Law, law_of
from dpscaffold.engine.device import CPU, full_precision, out_of_memory, sent
from dpscaffold.engine.distributed import ALONE, Comm
from dpscaffold.engine.draws import sizes_of, stream_keys
from dpscaffold.engine.gpu import Graphs, Tensors
from dpscaffold.engine.memory import Memory
from dpscaffold.engine.query import query_of
from dpscaffold.engine.records import Store
from dpscaffold.engine.server import phase_of
from dpscaffold.engine.state import Count, Draw, Round, RoundUploads, State, count_nothing
from dpscaffold.engine.work import Members, Work, under
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.federation.share import user_ranges
from dpscaffold.randomness.streams import OneRound, Randomness

#: Bytes that a chunk of rows may take on a CPU: larger chunks gain nothing there.
CPU_CHUNK_BYTES = 256 << 20

#: Larger federations are not prepared as a whole on a CPU, where that would be a second copy.
CPU_RESIDENT_BYTES = 2 << 30

_log = logging.getLogger(__name__)


class Engine:
    """Takes rounds of one run, or of several that share task, algorithm and shapes.

    A GPU draws its own batches and noise, unless the run is secret. Rows are computed ``chunk`` at
    a time, by default as many as fit; where memory is not enough the chunk is halved for good, and
    the round is computed again: nothing of it has left, and its draws are the same.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        federations: Sequence[Federation],
        device: torch.device = CPU,
        chunk: int | None = None,
        streams: Sequence[Randomness] | None = None,
        law: Law | None = None,
        comm: Comm = ALONE,
    ) -> None:
        self.runs, self.device, self.comm = list(runs), device, comm
        first = self.run = self.runs[0]
        for other in self.runs[1:]:
            refuse_unlike(first, other)
        self.task, self.plan, self.query = first.task, first.plan, query_of(first)
        self.law = law or law_of(self.runs)
        self.streams = list(streams or [run.randomness() for run in self.runs])
        self.users = max(run.users for run in self.runs)
        #: The users of this process.
        self.own = user_ranges(self.users, comm.count)[comm.rank]
        given = (federations, self.task, device, self._resident_bytes())
        self.store = Store(*given, self.own if comm.count > 1 else None)
        self.records = self._padded([one.train.sizes for one in federations]).numpy()
        self.batches = self._padded([run.batch_sizes for run in self.runs]).numpy()
        slots = (first.algorithm.remembers, self.task.parameters, self.users, device)
        self.memories = Memory(*slots, runs=len(self.runs))
        # The least of all processes, which is stored: a run that is resumed adds in the same order.
        self.chunk = min(comm.all(chunk or self._fitting_chunk()))
        self.graphs = Graphs()
        self._sent: dict[str, tuple[Tensor, Tensor]] = {}
        if device.type == "cuda":
            full_precision()

    # --- what does not change from round to round

    def _padded(self, values: Sequence[Tensor]) -> Tensor:
        """A number of every user of every run, (S, M)."""
        rows = [value.long() if not value.is_floating_point() else value for value in values]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)

    def _resident_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0] // 2
        return CPU_RESIDENT_BYTES

    @cached_property
    def tables(self) -> Tensors:
        """Numbers of every user of every run, (S, M, ·) or (S, 1), on the device."""
        runs, steps = self.runs, self.run.plan.steps_by_user
        noisy = [run.privacy for run in runs if run.privacy is not None]
        clips = [one.clip for one in noisy if not isinstance(one.clip, str)]
        none = torch.zeros(len(runs), 1)
        made = {
            "divisor": torch.from_numpy(self.batches).float(),
            "weight": self._padded([run.weights.expand(run.users) for run in runs]).float(),
            "regularisation": torch.tensor([[run.plan.regularisation] for run in runs]),
            "noise": none,
            "clip": torch.tensor([[clip] for clip in clips]) if clips else none,
            "spread": none,
        }
        if noisy:
            noises = [torch.tensor(one.noise_by_user or (one.noise,)) for one in noisy]
            each = zip(noises, runs, strict=True)
            made["noise"] = self._padded([noise.expand(run.users) for noise, run in each])
        if clips:
            spreads = [run.spreads(dtype=torch.float32)[:, 0] for run in runs]
            made["spread"] = self._padded(spreads)
        if steps is not None:
            own = [torch.tensor(run.plan.steps_by_user, dtype=torch.float32) for run in runs]
            made["steps"] = self._padded(own)
        if self.store.resident:
            made["starts"] = self._padded([self.store.starts(k) for k in range(len(runs))])
        if self.draws_on_device:
            sizes = sizes_of(self.records.reshape(-1), self.batches.reshape(-1))
            made["sizes"] = torch.from_numpy(sizes.reshape(*self.records.shape, 4))
            made["keys"] = torch.tensor([stream_keys(one.seed) for one in self.streams])
        return {name: sent(value, self.device) for name, value in made.items()}

    @cached_property
    def draws_on_device(self) -> bool:
        """A GPU draws for itself, with streams that anyone may repeat. Secret runs keep the cipher
        of the CPU, and an experiment's own streams stay where they are."""
        own = all(type(one) is Randomness and not one.secret for one in self.streams)
        known = not self.run.roster.declared and self.run.secure is None
        return self.device.type == "cuda" and own and known

    @cached_property
    def noise(self) -> int | None:
        """How many normals a step takes; None where no run adds noise."""
        noisy = any(run.privacy is not None and run.privacy.noise > 0 for run in self.runs)
        return self.task.parameters if noisy else None

    @cached_property
    def draw_alike(self) -> list[int]:
        """For every run the first one that draws what it draws, if the same users take part: runs
        that were given one object of streams, and whose users hold as many records."""
        found: dict[tuple[object, ...], int] = {}
        return [
            found.setdefault((id(one), self.records[k].tobytes(), self.batches[k].tobytes()), k)
            for k, one in enumerate(self.streams)
        ]

    def _fitting_chunk(self) -> int:
        """How many rows fit the memory that a chunk may take."""
        first = self.run
        dimension, batch = first.roster.schema.dimension, int(self.batches.max())
        if first.sampling == "poisson":
            batch += int(6 * batch**0.5) + 6
        floats = batch * (2 * dimension + self.task.width) + 10 * self.task.parameters
        row = 4 * floats + 8 * first.plan.local_steps * batch
        if not self.store.resident:
            row += 8 * int(self.records.max()) * dimension
        budget = CPU_CHUNK_BYTES
        if self.device.type == "cuda":
            budget = torch.cuda.mem_get_info(self.device)[0] // 3
        return max(1, budget // row)

    # --- rounds

    def round(self, state: State, draws: Sequence[Draw], count: Count = count_nothing) -> Round:
        """The next round of every run, with these participants."""
        number = state.round + 1
        phase = phase_of(self.run, number)
        if not any(len(draw.active) for draw in draws):
            nothing = RoundUploads(Upload(torch.zeros_like(state.params)), ())
            return Round(state.moved(state.server, self.runs), [nothing])
        members = Members.of(self.runs, draws, self.own)
        rows = members.users + self.users * np.arange(len(self.runs))[:, None]
        there = sent(torch.from_numpy(rows.reshape(-1)), self.memories.place)
        given = self._given(state, number, members, rows, there)
        streams = [
            OneRound(one) if type(one) is Randomness and one.secret else one for one in self.streams
        ]
        cohort = self._cohort(phase, draws) if self.comm.count > 1 else {}
        made = self._made(Work(self, phase, number, members, streams, cohort), given)
        real = members.real
        if real.all():
            self.memories.put(there, under("kept.", made))
        else:
            own = torch.from_numpy(real.reshape(-1)).to(self.memories.place)
            kept = {k: v.to(self.memories.place)[own] for k, v in under("kept.", made).items()}
            self.memories.put(there[own], kept)
        self.memories.see(rows[real])
        for draw in draws if self.comm.count > 1 else ():
            self.memories.see(draw.active)
        server = Server(
            made["x"].view_as(state.params),
            {name: made[f"server.{name}"].view_as(v) for name, v in state.server.slots.items()},
        )
        return Round(state.moved(server, self.runs), partial(_uploads, made, draws))

    def _cohort(self, phase: Algorithm, draws: Sequence[Draw]) -> Tensors:
        """All participants of a single run, with the slots that each process has of its own."""
        (draw,) = draws
        everyone = Members.of(self.runs, draws, range(self.users))
        there = torch.from_numpy((draw.active >= self.own.start) & (draw.active < self.own.stop))
        held = self.memories.recall(draw.active) if phase.mirrored else {}
        made = {
            "users": torch.from_numpy(everyone.users),
            "weights": torch.from_numpy(everyone.weights),
            "seen": self.memories.seen(draw.active)[None],
        }
        made = {name: value.to(self.device) for name, value in made.items()}
        for name, value in held.items():
            own = value.where(there.to(value.device)[:, None], 0.0)
            made[f"memory.{name}"] = self.comm.sum(own)
        return made

    def acknowledge(self, round: int) -> None:
        """Nobody waits for it."""

    def memory(self) -> dict[str, Any]:
        """The slots of the users of a single run, and how the work was shared out: it decides the
        last bits of sums."""
        shared_out = {"chunk": self.chunk, "threads": torch.get_num_threads()}
        parts = self.comm.all(self.memories.to_dict(self.own if self.comm.count > 1 else None))
        users = [user for part in parts for user in part["users"]]
        slots = {
            name: torch.cat([part["slots"][name] for part in parts])
            for name in self.memories.tables
        }
        return {"memories": {"users": users, "slots": slots}, **shared_out}

    def restore(self, memory: Mapping[str, Any]) -> None:
        """Take up what :meth:`memory` gave."""
        saved = memory["memories"]
        users = torch.tensor(saved["users"], dtype=torch.int64)
        mine = (users >= self.own.start) & (users < self.own.stop)
        self.memories.forget(0)
        self.memories.keep(users[mine], {k: v[mine] for k, v in saved["slots"].items()})
        self.memories.see(users.numpy())
        self.chunk = memory["chunk"] or self.chunk
        if self.device.type == "cpu" and memory["threads"]:
            torch.set_num_threads(memory["threads"])

    def norms(self) -> dict[str, float]:
        """The largest norm of each slot of the users."""
        found = self.comm.all(self.memories.norms())
        return {name: max(own[name] for own in found) for name in found[0]}

    def _given(
        self, state: State, number: int, members: Members, rows: np.ndarray, there: Tensor
    ) -> Tensors:
        """What a round is computed from; ``there`` is where its users' slots are."""
        runs, users = len(self.runs), torch.from_numpy(members.users)
        counts = [len(draw.active) for draw in members.draws]
        rates = [run.settled.step_size_in(number) for run in self.runs]
        louder = [
            1.0 if run.sums is None else run.sums.noise_for(count, 1.0)
            for run, count in zip(self.runs, counts, strict=True)
        ]
        moves = [run.plan.server_rate for run in self.runs]
        given = {
            "weights": self._same("weights", torch.from_numpy(members.weights)),
            "step_size": self._same("step_size", torch.tensor(rates)[:, None]),
            "louder": self._same("louder", torch.tensor(louder)[:, None]),
            "x": state.params.reshape(runs, -1),
        }
        numbers = torch.cat([torch.tensor([number]), users.view(-1)])
        numbers = sent(numbers, self.device)
        given |= {"round": numbers[0], "users": numbers[1:].view(users.shape)}
        if len(set(moves)) > 1:
            given["rate"] = self._same("rate", torch.tensor(moves))
        seen = self.memories.seen(rows.reshape(-1)).view(rows.shape)
        given["seen"] = self._same("seen", seen)
        for name, value in state.server.slots.items():
            given[f"server.{name}"] = value.reshape(runs, -1)
        for name, value in self.memories.recall(there).items():
            given[f"memory.{name}"] = value
        return given

    def _same(self, name: str, value: Tensor) -> Tensor:
        """A small tensor on the device, sent there where it is not what it was last."""
        last = self._sent.get(name)
        if last is None or not torch.equal(last[0], value):
            self._sent[name] = last = (value, sent(value, self.device))
        return last[1]

    def _made(self, work: Work, given: Tensors) -> Tensors:
        """What comes of it; with smaller chunks where memory is short, and once more with room for
        every record where a Poisson batch did not fit."""
        while True:
            try:
                made = self.graphs.run(work.key, work, given) if work.key else work(given)
                overflowed = made.pop("overflowed", None)
                if overflowed is None or not bool(overflowed):
                    return made
                work = replace(work, whole=True)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            else:
                continue
            self._halve(work)  # outside the block above, whose traceback holds what was computed

    def _halve(self, work: Work) -> None:
        """Half as many rows at a time, from now on."""
        self.graphs.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        rows = min(self.chunk, work.members.users.size)
        if rows == 1:
            batch, records = int(self.batches.max()), int(self.records.max())
            raise BadInput(
                "memory-exceeded",
                f"the {self.plan.local_steps} steps of one user, with batches of {batch} of "
                f"{records} records, do not fit the memory of {self.device}; lower "
                f"plan.data_ratio, take a smaller model, or use a device with more memory",
            )
        self.chunk = rows // 2
        _log.warning("the memory of %s was not enough: %s users at a time", self.device, self.chunk)


def _uploads(made: Tensors, draws: Sequence[Draw]) -> list[RoundUploads]:
    """What every run's server moved by."""
    totals = under("totals.", made)
    return [
        RoundUploads(
            Upload(made["mean"][k], {name: value[k] for name, value in totals.items()}),
            tuple(draw.active.tolist()),
            {"largest_drift": made["drift"][k]},
        )
        for k, draw in enumerate(draws)
    ]


def refuse_unlike(first: Run, other: Run) -> None:
    """Stacked runs share shapes and structure; say which part differs."""
    theirs = other.structure
    for name, value in first.structure.items():
        if theirs[name] != value:
            raise BadInput(
                "not-stackable",
                f"runs cannot be stacked: {name} is {value} in one and {theirs[name]} in another; "
                f"run them apart",
            )
    if first.algorithm != other.algorithm:
        raise BadInput(
            "not-stackable",
            f"runs cannot be stacked: they differ in a number of {first.algorithm.name}; run them "
            f"apart",
        )
    if first.task is not other.task and first.task != other.task:
        raise BadInput(
            "not-stackable",
            f"runs cannot be stacked: each has its own task {first.task.name!r}; give both the "
            f"same",
        )
