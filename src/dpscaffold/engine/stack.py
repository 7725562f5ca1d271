"""The runs of an engine, and what their rounds read and never change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from dpscaffold.config import Run
from dpscaffold.engine.aggregate import Law, law_of
from dpscaffold.engine.device import CPU, full_precision, sent
from dpscaffold.engine.distributed import ALONE, Comm
from dpscaffold.engine.draws import sizes_of, stream_keys
from dpscaffold.engine.gpu import Tensors
from dpscaffold.engine.query import query_of
from dpscaffold.engine.records import Store
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.federation.share import user_ranges
from dpscaffold.randomness.streams import Randomness

#: Bytes that a chunk of rows may take on a CPU: larger chunks gain nothing there.
CPU_CHUNK_BYTES = 256 << 20

#: Larger federations are not prepared as a whole on a CPU, where that would be a second copy.
CPU_RESIDENT_BYTES = 2 << 30


class Stack:
    """Runs side by side that share task, algorithm and shapes, on their records.

    ``law`` and ``comm`` stand in for that of the runs, and for a process that is alone.
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
        self.task, self.query, self.law = first.task, query_of(first), law or law_of(self.runs)
        self.streams = list(streams or [run.randomness() for run in self.runs])
        self.users = max(run.users for run in self.runs)
        #: The users of this process.
        self.own = user_ranges(self.users, comm.count)[comm.rank]
        given = (federations, self.task, device, self._resident_bytes())
        self.store = Store(*given, self.own if comm.count > 1 else None)
        self.records = self._padded([one.train.sizes for one in federations]).numpy()
        self.batches = self._padded([run.batch_sizes for run in self.runs]).numpy()
        # The least of all processes, which is stored: a run that is resumed adds in the same order.
        self.chunk = min(comm.all(chunk or self._fitting_chunk()))
        if device.type == "cuda":
            full_precision()

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
