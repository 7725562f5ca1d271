"""Small federations, settings and drives, so that a test states only what it is about."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpscaffold.algorithms import ITERATIVE, Algorithm, Server, fedavg, with_adam
from dpscaffold.algorithms.naming import factory_of
from dpscaffold.config import Run, make_run
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import Plan
from dpscaffold.engine import Draw, Engine, Loop, Round, State
from dpscaffold.engine.stack import Stack
from dpscaffold.federation import Federation
from dpscaffold.randomness.streams import Randomness
from dpscaffold.tasks import Logistic, Mlp, ModuleTask, Task

CPU = torch.device("cpu")

#: Where the simulator computes: ``TEST_DEVICE=cuda`` puts the conformance and statistical tests,
#: and every other that drives the simulator through this file, on a GPU (``make test-gpu``).
WHERE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
UNEQUAL = (9, 12, 4, 7, 15, 6)
EQUAL = (9, 9, 9, 9, 9, 9)


def federation(
    sizes: Sequence[int] = UNEQUAL, dimension: int = 4, classes: int = 3, seed: int = 0
) -> Federation:
    """Users with their own centres and their own linear labels; test tables are half as large."""
    stream = np.random.default_rng(seed)

    def part(
        sizes: Sequence[int], laws: list[tuple[np.ndarray, np.ndarray]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        tables = []
        for size, (centre, weights) in zip(sizes, laws, strict=True):
            x = (centre + stream.standard_normal((size, dimension))).astype(np.float32)
            tables.append((x, (x @ weights).argmax(1)))
        return tables

    laws = [
        (stream.standard_normal(dimension), stream.standard_normal((dimension, classes)))
        for _ in sizes
    ]
    return Federation.from_arrays(
        part(sizes, laws), part([max(1, n // 2) for n in sizes], laws), classes=classes
    )


def module(dimension: int, classes: int, seed: int = 0) -> nn.Module:
    """A network of several tensors, with weights of its own seed."""
    net = nn.Sequential(nn.Linear(dimension, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, classes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) / 2)
    return net


def fedadam() -> Algorithm:
    """FedAvg with Adam at the server, under a name of its own."""
    return with_adam(fedavg()).replace(name="fedadam")


EXAMPLES = Path(__file__).parents[1] / "examples"

#: The registry, a server optimiser that keeps three slots, and a user's own file: what the laws of
#: conformance are stated for.
EVERY: dict[str, Callable[..., Algorithm]] = {
    **ITERATIVE,
    "fedadam": fedadam,
    "feddyn": factory_of("feddyn:feddyn", EXAMPLES),
}

#: Every task, made for some dimension and number of classes.
TASKS: dict[str, Callable[[int, int], Task]] = {
    "logistic": Logistic,
    "mlp": lambda dimension, classes: Mlp(dimension, classes, hidden=6),
    "module": lambda dimension, classes: ModuleTask(module(dimension, classes)),
}

#: Every kind of privacy. Clips are low enough to bite and noise is strong enough to show.
PRIVACIES: dict[str, Gaussian | None] = {
    "none": None,
    "fixed": Gaussian(clip=0.7, noise=0.8),
    "poisson": Gaussian(clip=0.7, noise=0.8, sampling="poisson"),
    "user": Gaussian(clip=0.7, noise=0.2, unit="user"),
    "user-poisson": Gaussian(clip=0.7, noise=0.2, unit="user", sampling="poisson"),
    "median": Gaussian(clip="median", noise=0.8),
    "median-poisson": Gaussian(clip="median", noise=0.8, sampling="poisson"),
}

#: K·s = 1, so that FedSGD may run it too; one round of the four is a warm start where there is one.
PLAN = Plan(
    rounds=4,
    local_steps=3,
    user_ratio=0.5,
    data_ratio=1 / 3,
    learning_rate=0.3,
    regularisation=0.02,
    warm_rounds=1,
)


@dataclass(frozen=True)
class Trial(Run):
    """A setting together with the federation that it is of."""

    data: Federation | None = None

    @property
    def federation(self) -> Federation:
        assert self.data is not None
        return self.data

    @classmethod
    def of(cls, data: Federation, *parts, **more) -> Trial:
        """A trial of these data."""
        run = make_run(data.roster, *parts, **more)
        return cls(**{one.name: getattr(run, one.name) for one in fields(Run)}, data=data)


def setting(
    algorithm: str | Algorithm = "scaffold",
    task: str | Task = "logistic",
    privacy: str | Gaussian | None = None,
    data: Federation | None = None,
    **plan: object,
) -> Trial:
    """A whole setting from names; keywords change the plan."""
    data = data if data is not None else federation()
    algorithm = EVERY[algorithm]() if isinstance(algorithm, str) else algorithm
    task = TASKS[task](data.dimension, data.classes) if isinstance(task, str) else task
    privacy = PRIVACIES[privacy] if isinstance(privacy, str) else privacy
    if algorithm.noise_aware and privacy is not None and privacy.clip == "median":
        pytest.skip(f"{algorithm.name} refuses a clip bound that is computed from the batch")
    return Trial.of(data, task, algorithm, PLAN.changed(**plan), privacy)  # type: ignore[arg-type]


def loop(run: Trial, randomness: Randomness | None = None) -> Loop:
    """The readable engine on the run's own data."""
    return Loop(run, run.federation, randomness=randomness)


def simulator(
    runs: Trial | Sequence[Trial],
    randomness: Randomness | Sequence[Randomness] | None = None,
    chunk: int | None = None,
) -> Engine:
    """The fast engine on the runs' own data."""
    runs = [runs] if isinstance(runs, Run) else runs
    streams = [randomness] if isinstance(randomness, Randomness) else randomness
    return Engine(runs, [run.federation for run in runs], WHERE, chunk, streams)


def draw_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU draw as a GPU does, where a GPU would; a GPU does so anyway."""
    real = Stack.__dict__["draws_on_device"].func

    def there(engine: Engine) -> bool:
        cuda = torch.device("cuda")
        return real(SimpleNamespace(streams=engine.streams, run=engine.run, device=cuda))

    monkeypatch.setattr(Engine, "draws_on_device", property(there))


class Driven:
    """An engine, with the servers of its runs between rounds."""

    def __init__(self, engine: Loop | Engine) -> None:
        self.engine = engine
        if isinstance(engine, Engine):
            self.settings, self.randomness = engine.runs, engine.streams
        else:
            self.settings, self.randomness = [engine.run], [engine.randomness]
        states = [State.initial(run, engine.device) for run in self.settings]
        self.state = states[0] if len(states) == 1 else State.stack(states)

    def rounds(self, *draws: Draw) -> Round:
        """The next round of every run, with these participants."""
        done = self.engine.round(self.state, draws)
        self.state = done.state
        return done

    def round_of(self, users: Sequence[int]) -> Round:
        """The next round of a single run, with these participants."""
        return self.rounds(Draw.all(np.array(users, dtype=np.int64)))

    def drive(self, count: int | None = None) -> Driven:
        """Rounds with the participants of the runs' own streams, up to the last or to ``count``."""
        for number in range(self.state.round + 1, (count or self.settings[0].plan.rounds) + 1):
            drawn = [
                streams.cohort(number, run.users, run.cohort_size)
                for run, streams in zip(self.settings, self.randomness, strict=True)
            ]
            self.rounds(*map(Draw.all, drawn))
        return self

    @property
    def reached(self) -> Reached:
        """Where the first run stands."""
        return self.all_reached[0]

    @property
    def all_reached(self) -> list[Reached]:
        """Where every run stands."""
        held, users = self.engine.memories, self.engine.memories.users
        return [
            Reached(
                _on_cpu(state), _all_on_cpu(held.recall(range(k * users, k * users + run.users)))
            )
            for k, (state, run) in enumerate(zip(_apart(self.state), self.settings, strict=True))
        ]


def _apart(state: State) -> list[State]:
    """The state of every run of a stack."""
    if state.params.dim() == 1:
        return [state]
    return [
        State(
            state.round,
            Server(params, {name: value[k] for name, value in state.server.slots.items()}),
            state.average[k],
            state.averaged[k],
        )
        for k, params in enumerate(state.params)
    ]


def _all_on_cpu(slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in slots.items()}


def _on_cpu(state: State) -> State:
    server = replace(state.server, params=state.params.cpu(), slots=_all_on_cpu(state.server.slots))
    return replace(state, server=server, average=state.average.cpu())


@dataclass(frozen=True)
class Reached:
    """Where a run stands: the server's state, and the slots of all users, (M, P) or (M, 1)."""

    state: State
    memories: dict[str, Tensor]

    @property
    def params(self) -> Tensor:
        return self.state.params

    @property
    def output(self) -> Tensor:
        return self.state.output

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """What the server keeps besides x, by name."""
        return self.state.server.slots

    @property
    def control(self) -> Tensor:
        """SCAFFOLD's c."""
        return self.state.server.slots["control"]

    @property
    def memory(self) -> Tensor:
        """SCAFFOLD's c_i, (M, P)."""
        return self.memories["control"]


#: Each gives an engine on a setting, ready to be driven.
ENGINES: dict[str, Callable[..., Driven]] = {
    "loop": lambda run, randomness=None: Driven(loop(run, randomness)),
    "simulator": lambda run, randomness=None: Driven(simulator(run, randomness)),
}


#: Other ways to the same run: in parts, from files, and next to another run.
WAYS: dict[str, Callable[..., Driven]] = {
    **ENGINES,
    "one user at a time": lambda run, randomness=None: Driven(simulator(run, randomness, chunk=1)),
    "two users at a time": lambda run, randomness=None: Driven(simulator(run, randomness, chunk=2)),
    "mapped": lambda run, randomness=None: Driven(simulator(mapped(run), randomness)),
    "mapped, two users at a time": lambda run, randomness=None: Driven(
        simulator(mapped(run), randomness, chunk=2)
    ),
    "stacked": lambda run, randomness=None: Driven(simulator([run, replace(run, plan=run.plan)])),
}


def mapped(run: Trial) -> Trial:
    """The same run on records that are loaded for the users of each round."""
    return replace(run, data=replace(run.federation, mapped=True))


def final(
    engine: str, setting: Run, randomness: Randomness | None = None, rounds: int | None = None
) -> Reached:
    """Where this setting stands after all rounds on the named engine, or one of the other ways."""
    return WAYS[engine](setting, randomness).drive(rounds).reached


def parts(reached: Reached) -> dict[str, Tensor]:
    """The tensors of a run by name."""
    server = reached.state.server
    return {
        "params": server.params,
        "average": reached.state.average,
        **{f"server {name}": value for name, value in server.slots.items()},
        **{f"users {name}": value for name, value in reached.memories.items()},
    }


def assert_agree(one: Reached, two: Reached, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Two runs agree to float tolerance, relative to the largest number of each part."""
    assert parts(one).keys() == parts(two).keys()
    for key, value in parts(one).items():
        other = parts(two)[key]
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(
            value, other, rtol=rtol, atol=atol * scale, msg=lambda m, key=key: f"{key}: {m}"
        )


def assert_identical(one: Reached, two: Reached) -> None:
    """Two runs stand at the same place, bit for bit."""
    assert one.state.round == two.state.round and one.state.averaged == two.state.averaged
    assert parts(one).keys() == parts(two).keys()
    for key, value in parts(one).items():
        assert torch.equal(value, parts(two)[key]), key


def uploads(
    engine: str, setting: Run, rounds: int = 1, randomness: Randomness | None = None
) -> list[dict[str, Tensor]]:
    """Everything that leaves the users or stays with them, per round: rows in the order of the
    participants.

    It watches the algorithm's own ``finish``, in the real rounds and in the warm-up.
    """
    seen: list[dict[str, list[Tensor]]] = [{} for _ in range(rounds)]

    def watched(algorithm: Algorithm) -> Algorithm:
        def finish(local, at):
            upload, kept = algorithm.finish(local, at)
            values = {
                "move": upload.params,
                **upload.totals,
                **{f"memory {name}": value for name, value in kept.items()},
            }
            for key, value in values.items():
                seen[int(at.broadcast.round) - 1].setdefault(key, []).append(
                    value.reshape(-1, value.shape[-1]).clone().cpu()
                )
            return upload, kept

        return algorithm.replace(
            finish=finish, warm_up=algorithm.warm_up and watched(algorithm.warm_up)
        )

    final(engine, replace(setting, algorithm=watched(setting.algorithm)), randomness, rounds)
    return [{key: torch.cat(values) for key, values in one.items()} for one in seen]


class Scripted(Randomness):
    """Streams whose noise the test writes: ``script(round, user, step)`` gives a vector or a
    number."""

    def __init__(self, seed: int, script: Callable[[int, int, int], object]) -> None:
        super().__init__(seed)
        self.script = script

    def normals(self, round: int, user: int) -> np.random.Generator:
        """A stand-in for the user's generator that knows only ``standard_normal``."""
        return _Script(lambda step: self.script(round, user, step))  # type: ignore[return-value]


class _Script:
    def __init__(self, normals: Callable[[int], object]) -> None:
        self._normals, self._step = normals, 0

    def standard_normal(self, size=None, dtype="float64", out=None):
        shape = out.shape if out is not None else np.atleast_1d(size)
        steps = shape[0] if len(shape) == 2 else 1
        values = np.empty((steps, shape[-1]), dtype=dtype)
        for k in range(steps):
            values[k] = self._normals(self._step)
            self._step += 1
        if out is None:
            return values.reshape(shape)
        out[...] = values.reshape(out.shape)
        return out


def silent(seed: int = 0) -> Scripted:
    """Real participants and batches, and noise that is always zero."""
    return Scripted(seed, lambda round, user, step: 0.0)
