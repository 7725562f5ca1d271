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
from dpscaffold.engine.device import out_of_memory, sent
from dpscaffold.engine.gpu import Graphs, Tensors
from dpscaffold.engine.memory import Memory
from dpscaffold.engine.server import phase_of
from dpscaffold.engine.stack import Stack
from dpscaffold.engine.state import Count, Draw, Round, RoundUploads, State, count_nothing
from dpscaffold.engine.work import Members, Work, under
from dpscaffold.errors import BadInput
from dpscaffold.randomness.streams import OneRound, Randomness

_log = logging.getLogger(__name__)


class Engine(Stack):
    """Takes rounds of one run, or of several that share task, algorithm and shapes.

    A GPU draws its own batches and noise, unless the run is secret. Rows are computed ``chunk`` at
    a time, by default as many as fit; where memory is not enough the chunk is halved for good, and
    the round is computed again: nothing of it has left, and its draws are the same.
    """

    @cached_property
    def memories(self) -> Memory:
        """What users keep between rounds."""
        slots = (self.run.algorithm.remembers, self.task.parameters, self.users, self.device)
        return Memory(*slots, runs=len(self.runs))

    @cached_property
    def graphs(self) -> Graphs:
        """Rounds that were recorded."""
        return Graphs()

    @cached_property
    def _sent(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Small tensors that are on the device, by name."""
        return {}

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
                f"the {self.run.plan.local_steps} steps of one user, with batches of {batch} of "
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
