"""Runs of equal shape that a GPU moves together, round after round, without its host.

In the simulator the host says for every run of a stack who takes part, what is announced, and how
the server moves: a few milliseconds a round, and far more with hundreds of small runs. Where all
users hold equally many records, nothing of a round but its participants changes, and these are
known before the first. So the state of all runs is held in tensors with a first axis S for the run,
``announce`` and ``update`` are mapped over it (``torch.vmap``), and a whole round is one recorded
graph that reads its own number from the device.

What a round is, this module shares with every engine: ``announce`` and ``update`` of the algorithm,
the local steps (:class:`~dpscaffold.engines.fast.devices.DeviceWork`), the weighted sum of uploads
(:mod:`~dpscaffold.engines.aggregate`) and the average of iterates
(:func:`~dpscaffold.engines.state.running_average`). It cannot share the loop of
:mod:`~dpscaffold.engines.rounds`: that loop calls Python between the parts of a round, and a
recorded graph has no host that could do so. Here a round is a single launch, and
:meth:`Lockstep.rounds` only counts the launches.

The simulator stays the oracle: it takes every stack that does not fit, and draws the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Cohort, Known, Server, Slots, Upload
from dpscaffold.algorithms.affine import FAST_FIELDS
from dpscaffold.algorithms.base import tell_nothing
from dpscaffold.config import Run
from dpscaffold.engines.aggregate import weighted_sum
from dpscaffold.engines.fast.devices import DeviceWork, Layout, draws_on, scale_numbers, under
from dpscaffold.engines.fast.draws import addresses, sizes_of
from dpscaffold.engines.fast.graphs import Capture, Tensors, cuda_graph
from dpscaffold.engines.fast.stacking import refuse_unlike
from dpscaffold.engines.fast.worker import Worker
from dpscaffold.engines.machine import sent
from dpscaffold.engines.participation.drawing import Row
from dpscaffold.engines.state import running_average
from dpscaffold.federation import Federation
from dpscaffold.randomness.streams import Randomness

#: After this many rounds the host waits for the device, so that progress is what was done.
WAITS = 16

#: Private slots, which are not announced or uploaded, are left to the simulator.
_KNOWN = FAST_FIELDS - {"private"}

_log = logging.getLogger(__name__)


class Lockstep:
    """The runs of a stack in step. :meth:`of` says whether they can be; then :meth:`rounds` takes
    one round after the other.

    ``held`` are the tensors that rounds change: ``x`` and ``average`` (S, P), the server's slots
    (S, ·), every user's (S, M, ·), who was ``seen`` (S, M), the number of the ``round``, the round
    in which each run ``diverged`` (0: none), and whether a Poisson batch was ``cut`` short, in
    which case nothing here means anything and the simulator has to take the stack.
    """

    def __init__(
        self,
        settings: Sequence[Run],
        worker: Worker,
        streams: Sequence[Randomness],
        capture: Capture | None,
    ) -> None:
        self.settings, self.worker, self.capture = list(settings), worker, capture
        self.device = device = worker.device
        first, runs = self.settings[0], len(self.settings)
        self.users, self.cohort_size, self.plan = first.users, first.cohort_size, first.plan
        own = list(dict.fromkeys(streams))  # one object a seed
        which = [own.index(stream) for stream in streams]
        self._fixed = self._constants(own, which)
        initial = [one.task.initial(one.plan.public_seed) for one in self.settings]
        params = torch.stack(initial).to(device)
        length = first.task.parameters
        self.held: Tensors = {
            "x": params,
            "average": torch.zeros_like(params),
            "seen": torch.zeros(runs, self.users, dtype=torch.bool, device=device),
            "round": torch.zeros(1, dtype=torch.int64, device=device),
            "diverged": torch.zeros(runs, dtype=torch.int64, device=device),
            "cut": torch.zeros((), dtype=torch.bool, device=device),
        }
        for name, size in first.algorithm.keeps.items():
            width = length if size == "vector" else 1
            self.held[f"server.{name}"] = params.new_zeros(runs, width)
        for name, size in first.algorithm.remembers.items():
            width = length if size == "vector" else 1
            self.held[f"memory.{name}"] = params.new_zeros(runs, self.users, width)
        self._ways: dict[Algorithm, Callable[[], None]] = {}

    @classmethod
    def of(
        cls,
        settings: Sequence[Run],
        federations: Sequence[Federation],
        streams: Sequence[Randomness],
        device: torch.device,
        capture: Capture | None = cuda_graph,
    ) -> Lockstep | None:
        """The runs in step, or None where the simulator has to take them: users hold different
        numbers of records, the host draws, the runs do not fit the device at once, the algorithm
        looks at a number on its way, or it has fields that are not known here."""
        for other in settings[1:]:
            refuse_unlike(settings[0], other)
        pairs = zip(settings, streams, strict=True)
        if not draws_on(device, [_row(*pair) for pair in pairs]):
            return None
        if settings[0].algorithm.in_use_beyond(_KNOWN) or not _alike(settings, federations):
            return None
        worker = Worker(settings, federations, device)
        if not _fit_at_once(settings, worker):
            return None
        try:
            found = cls(settings, worker, streams, capture)
            return found if found._possible() else None
        except torch.cuda.OutOfMemoryError:
            return None

    def _averaging_counts(self) -> np.ndarray:
        """(T, S): how many models are in the average after a round, which runs may begin at
        different rounds; 0 where the round's model is not averaged."""
        averaged = np.array([[t >= s.averaged_from for s in self.settings] for t in self._numbers])
        return np.where(averaged, np.cumsum(averaged, axis=0), 0)

    def _constants(self, own: Sequence[Randomness], which: Sequence[int]) -> Tensors:
        """What rounds read and never change. Z is the number of seeds, whose runs draw alike."""
        settings, users, count = self.settings, self.users, self.cohort_size
        everyone = [(data, user) for data in self.worker.federations for user in range(users)]
        rows = [_row(one, own[z]) for one, z in zip(settings, which, strict=True)]
        made = {
            "averaged": torch.from_numpy(self._averaging_counts()).float(),
            "which": torch.tensor(which),
            "starts": torch.tensor(self.worker.store.of(everyone).starts).view(-1, users),
            "scales": scale_numbers([row for row in rows for _ in range(count)]),
            "weights": torch.full((count,), 1 / count),
            "step_size": torch.tensor([one.settled.step_size for one in settings]),
        }
        if len(own) < len(settings):
            every = torch.arange(count)
            made["places"] = (torch.tensor(which)[:, None] * count + every).flatten()
        made |= self._drawing_constants(own) | self._known_constants()
        return {name: sent(value, self.device) for name, value in made.items()}

    def _drawing_constants(self, own: Sequence[Randomness]) -> Tensors:
        """Who takes part, and where the draws of the participants of one seed begin."""
        first, users, count = self.settings[0], self.users, self.cohort_size
        numbers = range(1, self.plan.rounds + 1)
        cohorts = [[one.cohort(number, users, count) for one in own] for number in numbers]
        seeds = [one.seed for one in own for _ in range(count)]
        size, batch = int(first.sizes[0]), int(first.batch_sizes[0])
        return {
            "cohorts": torch.from_numpy(np.array(cohorts)),
            "keys": addresses(seeds, [0] * len(seeds), [0] * len(seeds))[:, 2:],
            "sizes": sizes_of([size] * len(seeds), [batch] * len(seeds)),
        }

    def _known_constants(self) -> Tensors:
        """The weight and the spread of the noise that algorithms know of every participant."""
        known = [one.known(range(self.cohort_size)) for one in self.settings]
        self._spread = None if known[0].spread is None else 0.0
        made = {"weight": torch.stack([torch.as_tensor(one.weight) for one in known])}
        if all(isinstance(one.spread, Tensor) for one in known):
            made["spread"] = torch.stack([cast("Tensor", one.spread) for one in known])
        return made

    @property
    def models(self) -> list[Tensor]:
        """x^t of every run, (P,) each, as it is now."""
        return list(self.held["x"].clone().unbind())

    @property
    def averages(self) -> list[Tensor] | None:
        """The averaged iterates; None where the plan asks for none."""
        asked = any(t >= self.settings[0].averaged_from for t in self._numbers)
        return list(self.held["average"].unbind()) if asked else None

    @property
    def _numbers(self) -> range:
        return range(1, self.plan.rounds + 1)

    @property
    def diverged(self) -> list[int | None]:
        """The round in which each run stopped being finite. Waits for the device."""
        return [round or None for round in self.held["diverged"].tolist()]

    @property
    def in_vain(self) -> bool:
        """Whether a Poisson batch did not fit (chance 2⁻¹²⁸ each), and with it nothing is known.
        Waits for the device."""
        return bool(self.held["cut"])

    def rounds(self) -> Iterator[int]:
        """The rounds, each when it is launched."""
        for number in self._numbers:
            self._move(number)
            yield number

    def _move(self, number: int) -> None:
        """Launch the next round, whose number this is."""
        phase = self.settings[0].algorithm.phase(number, self.settings[0].warm_rounds)
        if phase not in self._ways:
            self._ways[phase] = self._way(phase)
        self._ways[phase]()
        if number % WAITS == 0 and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _way(self, phase: Algorithm) -> Callable[[], None]:
        """A round of this phase, recorded where that is possible."""
        work = self._work(phase)

        def plain() -> None:
            self._round(phase, work)

        def recorded(_: Tensors) -> Tensors:
            plain()
            return {}

        if self.capture is None:
            return plain
        try:
            with self._as_it_was():  # it is tried out before it is recorded
                replay, _ = self.capture(recorded, self.held)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is, the same rounds run without a graph
            said = (str(error).splitlines() or [type(error).__name__])[0]
            _log.warning("rounds could not be recorded as a graph (%s)", said)
            return plain
        return replay

    def _work(self, phase: Algorithm) -> DeviceWork:
        """The local steps of all runs."""
        task = self.settings[0].task
        rows = [_row(one, Randomness(0)) for one in self.settings] * self.cohort_size
        layout = Layout.of(rows, task.parameters, "places" in self._fixed)
        return DeviceWork(
            task, phase, layout, self.worker.store.of([(self.worker.federations[0], 0)])
        )

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """What rounds change within this context is put back."""
        before = {name: value.clone() for name, value in self.held.items()}
        try:
            yield
        finally:
            for name, value in before.items():
                self.held[name].copy_(value)

    def _round(self, phase: Algorithm, work: DeviceWork) -> None:
        """One round of all runs, in place."""
        held, fixed = self.held, self._fixed
        runs, count = len(self.settings), self.cohort_size
        held["round"] += 1
        at = (held["round"] - 1).clamp_max(self.plan.rounds - 1)  # tried out, it may run on
        drawn = fixed["cohorts"].index_select(0, at)[0]  # (Z, m)
        users = drawn.index_select(0, fixed["which"])  # (S, m)
        memories = {name: _of_users(table, users) for name, table in under("memory.", held).items()}
        slots = under("server.", held)
        announced = self._announced(phase, slots, memories, held["seen"].gather(1, users))
        numbers = drawn.reshape(-1, 1)
        inputs: Tensors = {
            "draws": torch.cat(
                [numbers, held["round"].expand_as(numbers), fixed["keys"], fixed["sizes"]], dim=1
            ),
            "starts": fixed["starts"].gather(1, users).flatten(),
            "scales": fixed["scales"],
            "params": held["x"].repeat_interleave(count, 0, output_size=runs * count),
        }
        if "places" in fixed:
            inputs["places"] = fixed["places"]
        for name, value in announced.items():
            inputs[f"shared.{name}"] = value.repeat_interleave(count, 0, output_size=runs * count)
        for name, value in memories.items():
            inputs[f"memory.{name}"] = value.flatten(0, 1)
        made = work(inputs)
        if "overflowed" in made:
            held["cut"] |= made["overflowed"]
        self._keep(users, under("kept.", made))
        # Run by run: in one product with a matrix of weights 0·NaN of a run that diverged would
        # poison the others.
        moves = made["params"].view(runs, count, -1)
        mean = weighted_sum(fixed["weights"], moves)
        totals = {
            name: value.view(runs, count, -1).sum(1) / self.users
            for name, value in under("totals.", made).items()
        }
        self._updated(phase, slots, mean, totals)
        averaged = fixed["averaged"].index_select(0, at)[0].unsqueeze(1)  # (S, 1)
        average = running_average(held["average"], held["x"], averaged.clamp_min(1))
        held["average"].copy_(torch.where(averaged > 0, average, held["average"]))
        lost = ~torch.isfinite(held["x"]).all(1) & (held["diverged"] == 0)
        held["diverged"] += lost * held["round"]

    def _announced(
        self, phase: Algorithm, slots: Tensors, memories: Tensors, seen: Tensor
    ) -> Tensors:
        """What every run's participants receive, (S, ·)."""
        if phase.announce is tell_nothing:
            return {}
        fixed, steps = self._fixed, self.plan.local_steps

        def tell(
            x: Tensor, slots: Slots, memories: Slots, seen: Tensor, numbers: Tensors
        ) -> Tensors:
            spread = numbers.get("spread", self._spread)
            known = Known(steps, numbers["step_size"], spread, numbers["weight"])
            nobody = cast("tuple[int, ...]", _Unnamed())
            held = memories if phase.mirrored else {}
            cohort = Cohort(nobody, fixed["weights"], known, held, seen)
            return dict(phase.announce(Server(x, slots), cohort))

        names = ("step_size", "weight", "spread")
        numbers = {name: fixed[name] for name in names if name in fixed}
        return torch.vmap(tell)(self.held["x"], slots, memories, seen, numbers)

    def _updated(self, phase: Algorithm, slots: Tensors, mean: Tensor, totals: Tensors) -> None:
        """Every run's server after its move."""
        rate = self.plan.server_rate

        def moved(x: Tensor, slots: Slots, mean: Tensor, totals: Slots) -> tuple[Tensor, Tensors]:
            server = phase.update(Server(x, slots), Upload(mean, totals), rate)
            return server.params, dict(server.slots)

        x, kept = torch.vmap(moved)(self.held["x"], slots, mean, totals)
        self.held["x"].copy_(x)
        for name, value in kept.items():
            self.held[f"server.{name}"].copy_(value)

    def _keep(self, users: Tensor, slots: Tensors) -> None:
        """The participants' new slots; they count as seen from now on."""
        for name, value in slots.items():
            table = self.held[f"memory.{name}"]
            index = users[:, :, None].expand(-1, -1, table.shape[2])
            table.scatter_(1, index, value.view(index.shape))
        self.held["seen"].scatter_(1, users, True)

    def _possible(self) -> bool:
        """Whether rounds can be taken so: one of each phase is tried."""
        algorithm = self.settings[0].algorithm
        try:
            for phase in {algorithm, algorithm.warm_up or algorithm}:
                with self._as_it_was():
                    self._round(phase, self._work(phase))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # an algorithm of the user's own may do anything
            _log.info("the rounds of %s are taken run by run (%s)", algorithm.name, error)
            return False
        return True


class _Unnamed:
    """Represents the users of a cohort, who differ from run to run."""

    def _refuse(self, *_: object) -> bool:
        raise TypeError("the algorithm asks who takes part")

    __iter__ = __len__ = __getitem__ = __bool__ = __eq__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _of_users(table: Tensor, users: Tensor) -> Tensor:
    """The slots (S, m, ·) of each run's participants (S, m)."""
    return table.gather(1, users[:, :, None].expand(-1, -1, table.shape[2]))


def _row(setting: Run, stream: Randomness) -> Row:
    """A participant of a run: all are alike."""
    size, batch = int(setting.sizes[0]), int(setting.batch_sizes[0])
    given = (setting.plan, setting.privacy, stream, setting.settled.step_size_in(1))
    return Row(0, size, batch, *given, declared=setting.declared(0), sums=setting.sums)


def _fit_at_once(settings: Sequence[Run], worker: Worker) -> bool:
    """Whether the device has room for all records, all participants and all memories at once."""
    first = settings[0]
    slots = first.algorithm.remembers.values()
    length = sum(first.task.parameters if slot == "vector" else 1 for slot in slots)
    memories = 4 * len(settings) * first.users * length
    crowded = len(settings) * first.cohort_size > worker.fitting_chunk()
    return worker.store.resident and not crowded and 2 * memories <= _free(worker.device)


def _alike(settings: Sequence[Run], federations: Sequence[Federation]) -> bool:
    """Whether all users of all runs hold equally many records, and whatever else a recorded round
    takes as given is the same in all runs."""
    first = settings[0]
    declared = torch.cat([one.sizes for one in settings])
    sizes = torch.cat([declared, *(data.train.sizes for data in federations)])
    same = {
        (
            one.users,
            one.cohort_size,
            int(one.batch_sizes[0]),
            one.plan.server_rate,
            one.plan.averaging == "none",
            type(one.known([0]).spread),  # all with noise, or none
        )
        for one in settings
    }
    even = all(map(_even, settings))
    return even and len(sizes.unique()) == 1 and len(same) == 1 and first.plan.rounds > 0


def _even(setting: Run) -> bool:
    """Whether all rounds, and all users, have the same numbers."""
    plan, privacy = setting.plan, setting.privacy
    if privacy is not None and privacy.noise_by_user is not None:
        return False
    alike = plan.steps_by_user is None and plan.weighting != "noise"
    return plan.schedule == "constant" and alike


def _free(device: torch.device) -> float:
    """Bytes of the device's memory that tables of slots may take."""
    return torch.cuda.mem_get_info(device)[0] / 4 if device.type == "cuda" else 1 << 30
