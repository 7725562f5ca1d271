"""All of a round's users on one axis: the fast engine.

A *row* is one participant of one run. Rows are stacked to (U, P), and the same pure functions as in
the loop engine move them. Several runs of equal shape may share the stack: their participants are
simply more rows, with their own step sizes, clips, noise scales and control variates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Broadcast, Memory, Server, Upload
from dpscaffold.engines.state import Draw, RoundReport, State, mean_weights
from dpscaffold.engines.store import Store
from dpscaffold.errors import BadInput
from dpscaffold.local.steps import Scales, local_steps
from dpscaffold.randomness import Batches, NoiseStreams, Randomness, in_background, in_threads
from dpscaffold.setting import Setting
from dpscaffold.tasks import Batch, Logistic, Mlp, Task

#: Bytes that a chunk of rows may take on a CPU: larger chunks gain nothing there.
CPU_CHUNK_BYTES = 256 << 20

#: How many numbers of noise are drawn together.
NOISE_BLOCK = 1 << 22


#: See :meth:`Simulator._kind`.
Kind = tuple[int, int, int, int]


@dataclass(frozen=True)
class Row:
    """One participant of one run, and its weight in that run's mean."""

    run: int
    user: int
    weight: float


class Simulator:
    """Runs the rounds of one setting, or of several that share task, algorithm and shapes.

    With ``ahead`` a background thread draws the next round's batches while this one computes; the
    draws are the same.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        device: torch.device,
        randomness: Sequence[Randomness] | None = None,
        chunk: int | None = None,
        ahead: bool = False,
    ) -> None:
        self.settings = list(settings)
        self.device = device
        self.randomness = list(randomness) if randomness else [s.randomness() for s in settings]
        self.first = self.settings[0]
        for other in self.settings[1:]:
            refuse_unlike(self.first, other)
        limit = None if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 2
        self.store = Store([s.federation for s in settings], self.first.task, device, limit)
        self.states = [State.initial(setting, device) for setting in settings]
        self.chunk = chunk or self._fitting_chunk()
        self.ahead = ahead
        self._drawn_ahead: tuple[int, list[Kind], Future[tuple[Tensor, Tensor]]] | None = None

    @property
    def state(self) -> State:
        """The first run's state (the only one, outside a stack)."""
        return self.states[0]

    @state.setter
    def state(self, state: State) -> None:
        self.states[0] = state

    def round(self, round: int, draw: Draw) -> RoundReport:
        """One round of a single run."""
        return self.rounds(round, [draw])[0]

    def rounds(self, round: int, draws: Sequence[Draw]) -> list[RoundReport]:
        """The same round of every stacked run."""
        rows = [
            Row(s, int(user), float(weight))
            for s, (setting, draw) in enumerate(zip(self.settings, draws, strict=True))
            for user, weight in zip(draw.active, mean_weights(setting, draw), strict=True)
        ]
        params = torch.stack([state.params for state in self.states])
        controls = (
            None if self.state.control is None else torch.stack([s.control for s in self.states])  # type: ignore[misc]
        )
        moves, sums = torch.zeros_like(params), torch.zeros_like(params)
        drifts = [0.0] * len(self.settings)
        for start in range(0, len(rows), self.chunk):
            part = rows[start : start + self.chunk]
            upload = self._participate(round, part, params, controls)
            # Run by run, not as one product with a matrix of weights: there 0·NaN of a run that
            # diverged would poison the others.
            for run, where, weights in self._weights(part):
                moves[run] += weights @ upload.params[where]
                if upload.control is not None:
                    sums[run] += upload.control[where].sum(0)
            for row, drift in zip(part, upload.params.norm(dim=1).tolist(), strict=True):
                drifts[row.run] = max(drifts[row.run], drift)
        algorithm = self.first.algorithm.phase(round, self.first.warm_rounds)
        reports = []
        for s, (setting, state) in enumerate(zip(self.settings, self.states, strict=True)):
            server = Server(state.params, state.control)
            server = algorithm.update(
                server, Upload(moves[s], sums[s] / setting.users), setting.plan.server_rate
            )
            state.advance(round, server.params, server.control, setting)
            reports.append(
                RoundReport(round, tuple(draws[s].active.tolist()), {"largest_drift": drifts[s]})
            )
        return reports

    def _participate(
        self, round: int, rows: list[Row], params: Tensor, controls: Tensor | None
    ) -> Upload:
        """K local steps of these rows; their new control variates are stored."""
        runs = torch.tensor([row.run for row in rows], device=self.device)
        broadcast = Broadcast(round, params[runs], None if controls is None else controls[runs])
        memory = Memory(None if controls is None else self._recall(rows))
        algorithm = self.first.algorithm.phase(round, self.first.warm_rounds)
        upload, memory = local_steps(
            self.first.task,
            algorithm,
            broadcast,
            memory,
            self._batches(round, rows),
            self._scales(rows),
        )
        if memory.control is not None:
            self._remember(rows, memory.control)
        return upload

    def _recall(self, rows: list[Row]) -> Tensor:
        """The control variates c_i of these rows, (U, P)."""
        return torch.cat([state.memory[users] for state, _, users in self._by_run(rows)])  # type: ignore[index]

    def _remember(self, rows: list[Row], controls: Tensor) -> None:
        for state, where, users in self._by_run(rows):
            assert state.memory is not None
            state.memory[users] = controls[where]

    def _by_run(self, rows: list[Row]) -> Iterator[tuple[State, slice, Tensor]]:
        """Rows come run by run: for each run its state, its slice of the rows, and its users."""
        start = 0
        while start < len(rows):
            end = start
            while end < len(rows) and rows[end].run == rows[start].run:
                end += 1
            users = torch.tensor([row.user for row in rows[start:end]], device=self.device)
            yield self.states[rows[start].run], slice(start, end), users
            start = end

    def _weights(self, rows: list[Row]) -> Iterator[tuple[int, slice, Tensor]]:
        """For each run its number, its slice of the rows, and its rows' weights in the mean."""
        start = 0
        for run, members in groupby(rows, key=lambda row: row.run):
            weights = torch.tensor([row.weight for row in members], device=self.device)
            yield run, slice(start, start + len(weights)), weights
            start += len(weights)

    def _scales(self, rows: list[Row]) -> Scales:
        """The numbers of these rows, from the plan and the mechanism of their runs."""

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self.device)[:, None]

        settings = [self.settings[row.run] for row in rows]
        privacy = self.first.privacy
        mechanisms = [setting.privacy for setting in settings]
        clip: Tensor | str | None = None
        if privacy is not None:
            clip = (
                "median" if privacy.clip == "median" else column([p.clip for p in mechanisms])[:, 0]  # type: ignore[union-attr, misc]
            )
        noisy = any(p is not None and p.noise > 0 for p in mechanisms)
        return Scales(
            step_size=column([s.plan.step_size for s in settings]),
            regularisation=column([s.plan.regularisation for s in settings]),
            divisor=column(
                [float(s.batches[row.user]) for s, row in zip(settings, rows, strict=True)]
            ),
            steps=self.first.plan.local_steps,
            clip=clip,  # type: ignore[arg-type]
            noise=column([p.noise for p in mechanisms]) if noisy else None,  # type: ignore[union-attr]
            sampling=self.first.sampling,
            unit=privacy.unit if privacy else "record",
        )

    def _batches(self, round: int, rows: list[Row]) -> Iterator[tuple[Batch, Tensor | None]]:
        """The K (batch, noise) pairs of these rows, drawn from their own streams."""
        steps = self.first.plan.local_steps
        shelf = self.store.shelf([(self.settings[row.run].federation, row.user) for row in rows])
        starts = torch.tensor(shelf.starts, device=self.device)[:, None]
        firsts, places = self._distinct(rows)
        index, count = self._indices_in_time(round, firsts)
        index, full = index.to(self.device), bool((count == index.shape[2]).all())
        column = torch.arange(index.shape[2], device=self.device)
        counts = count.to(self.device)
        normals = self._normals(round, firsts, steps)
        users, size = len(rows), index.shape[2]
        for k in range(steps):
            flat = (_spread(index[:, k], places) + starts).view(-1)
            noise = next(normals)
            yield (
                Batch(
                    features=shelf.features.index_select(0, flat).view(users, size, -1),
                    labels=shelf.labels.index_select(0, flat).view(users, size),
                    weight=None
                    if full
                    else (column < _spread(counts[:, k], places)[:, None]).float(),
                    squares=shelf.squares.index_select(0, flat).view(users, size),
                ),
                None if noise is None else _spread(noise, places),
            )

    def _indices_in_time(self, round: int, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """The batches of these rows, drawn ahead if they were; the next round's are then begun.

        Streams are keyed, not consumed, so a draw that turns out not to be wanted (a user declined)
        changes nothing: it is made again for the rows that are.
        """
        kinds = [self._kind(row) for row in rows]
        found = None
        if self._drawn_ahead is not None and self._drawn_ahead[:2] == (round, kinds):
            found = self._drawn_ahead[2].result()
        self._drawn_ahead = None
        found = found or self._indices(round, rows)
        if self.ahead and round < self.first.plan.rounds:
            self._draw_ahead(round + 1)
        return found

    def _draw_ahead(self, round: int) -> None:
        """Begin the batches of a round in the background, where they fit one chunk."""
        rows = [
            Row(s, int(user), 0.0)
            for s, setting in enumerate(self.settings)
            for user in self.randomness[s].participants(round, setting.users, setting.participants)
        ]
        if len(rows) > self.chunk:
            return
        firsts, _ = self._distinct(rows)
        kinds = [self._kind(row) for row in firsts]
        self._drawn_ahead = (round, kinds, in_background(lambda: self._indices(round, firsts)))

    def _kind(self, row: Row) -> Kind:
        """What decides a row's draws: the streams, the user, and how many of how many records."""
        setting = self.settings[row.run]
        size, batch = int(setting.federation.train.sizes[row.user]), int(setting.batches[row.user])
        return id(self.randomness[row.run]), row.user, size, batch

    def _distinct(self, rows: list[Row]) -> tuple[list[Row], Tensor | None]:
        """Rows that draw the same are drawn once: the first of each kind, and every row's place
        among them.

        Runs that were given one and the same :class:`Randomness` (those of one seed in a sweep)
        draw alike for a user who holds as many records in both. The places are None where all rows
        differ.
        """
        kinds: dict[Kind, int] = {}
        firsts, places = [], []
        for row in rows:
            kind = self._kind(row)
            if kind not in kinds:
                kinds[kind] = len(kinds)
                firsts.append(row)
            places.append(kinds[kind])
        return firsts, None if len(firsts) == len(rows) else torch.tensor(
            places, device=self.device
        )

    def _indices(self, round: int, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """Each user's own record numbers (U, K, B), and how many of each batch are real, (U, K)."""
        steps, sampling = self.first.plan.local_steps, self.first.sampling

        def draw(u: int, out: np.ndarray | None = None) -> Batches:
            row = rows[u]
            setting = self.settings[row.run]
            records, batch = (
                int(setting.federation.train.sizes[row.user]),
                int(setting.batches[row.user]),
            )
            return self.randomness[row.run].batches(
                round, row.user, records, batch, steps, sampling, out
            )

        if sampling == "fixed":
            sizes = [int(self.settings[row.run].batches[row.user]) for row in rows]
            index = np.empty((len(rows), steps, max(sizes)), dtype=np.int64)

            def place(u: int) -> np.ndarray:
                index[u, :, sizes[u] :] = 0
                return draw(u, index[u, :, : sizes[u]]).count

            counts = in_threads(place, len(rows))
        else:
            drawn = in_threads(draw, len(rows))
            counts = [batches.count for batches in drawn]
            longest = max(batches.index.shape[1] for batches in drawn)
            index = np.zeros((len(rows), steps, longest), dtype=np.int64)
            for u, batches in enumerate(drawn):
                index[u, :, : batches.index.shape[1]] = batches.index
        return torch.from_numpy(index), torch.from_numpy(np.stack(counts))

    def _normals(self, round: int, rows: list[Row], steps: int) -> Iterator[Tensor | None]:
        """Each step's standard normals, (U, P); None without noise."""
        if self.first.privacy is None:
            for _ in range(steps):
                yield None
            return
        size = self.first.task.parameters
        streams = NoiseStreams(
            [self.randomness[row.run].noise(round, row.user) for row in rows], size
        )
        block = max(1, NOISE_BLOCK // (len(rows) * size))
        for start in range(0, steps, block):
            yield from torch.from_numpy(streams.draw(min(block, steps - start))).to(self.device)

    def _fitting_chunk(self) -> int:
        """How many rows fit the memory that a chunk may take."""
        task, plan = self.first.task, self.first.plan
        batch = max(int(s.batches.max()) for s in self.settings)
        if self.first.sampling == "poisson":
            batch += int(6 * batch**0.5) + 6
        floats = batch * (2 * self.first.federation.dimension + task.width) + 10 * task.parameters
        row = 4 * floats + 8 * plan.local_steps * batch
        if not self.store.resident:
            row += (
                8
                * int(max(s.federation.train.sizes.max() for s in self.settings))
                * self.first.federation.dimension
            )
        budget = CPU_CHUNK_BYTES
        if self.device.type == "cuda":
            budget = torch.cuda.mem_get_info(self.device)[0] // 3
        return max(1, budget // row)


def _spread(values: Tensor, places: Tensor | None) -> Tensor:
    """What was drawn once, handed to every row that draws it."""
    return values if places is None else values.index_select(0, places)


def refuse_unlike(first: Setting, other: Setting) -> None:
    """Stacked runs share shapes and structure; say which part differs."""

    def structure(setting: Setting) -> dict[str, object]:
        privacy = setting.privacy
        return {
            "task": (setting.task.name, setting.task.parameters),
            "algorithm": setting.algorithm.name,
            "plan.local_steps": setting.plan.local_steps,
            "plan.rounds": setting.plan.rounds,
            "warm rounds": setting.warm_rounds,
            "privacy": privacy is None,
            "privacy.sampling": setting.sampling,
            "privacy.unit": privacy.unit if privacy else None,
            "privacy.clip": isinstance(privacy.clip, str) if privacy else None,
        }

    mine, theirs = structure(first), structure(other)
    for name, value in mine.items():
        if theirs[name] != value:
            raise BadInput(
                f"runs cannot be stacked: {name} is {value} in one and {theirs[name]} in another; "
                f"run them apart"
            )
    if first.algorithm != other.algorithm:
        raise BadInput(
            f"runs cannot be stacked: they differ in a number of {first.algorithm.name}; run them "
            f"apart"
        )
    if not _same_task(first.task, other.task):
        raise BadInput(
            f"runs cannot be stacked: each has its own task {first.task.name!r}; give both the same"
        )


def _same_task(one: Task, other: Task) -> bool:
    """Whether one task can stand for the other: the same object, or one of our own with the same
    shape."""
    ours = isinstance(one, Logistic | Mlp) and type(one) is type(other)
    return one is other or (ours and vars(one) == vars(other))
