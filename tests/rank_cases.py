"""Runs for several processes: what each process trains, and what it came to."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from small import EQUAL, EVERY, UNEQUAL, federation, setting
from stated import rounds_of

import dpscaffold
from dpscaffold import Gaussian, Linear, Logistic, Plan, scaffold, synthetic, train
from dpscaffold.algorithms import fedavg, scaffold_balanced
from dpscaffold.algorithms.mean_regularised import mean_regularised
from dpscaffold.config.secure import Secure
from dpscaffold.engine import Engine
from dpscaffold.engine.distributed import Ranks
from dpscaffold.errors import BadInput, RankLost
from dpscaffold.federation import Federation
from dpscaffold.runs.checkpoint import Checkpoint
from dpscaffold.runs.folder import RunFolder
from dpscaffold.tasks import LOSSES


@dataclass(frozen=True)
class Case:
    """Arguments of ``train``, made anew in every process."""

    algorithm: str
    task: str = "logistic"
    privacy: str = "fixed"
    chunk: int | None = None
    checkpoint_every: int = 100

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        every = {"checkpoint_every": self.checkpoint_every}
        one = setting(self.algorithm, self.task, self.privacy, **every)
        given = (one.federation, one.task, one.algorithm, one.plan, one.privacy)
        return given, {"chunk": self.chunk}


@dataclass(frozen=True)
class Special:
    """One of :data:`SPECIAL`, by its name."""

    name: str

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return SPECIAL[self.name]()


def narrow() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Products so narrow that their last bits depend on where a row begins in memory."""
    plan = Plan(rounds=4, local_steps=4, user_ratio=0.4, data_ratio=0.2, learning_rate=0.5)
    data = synthetic(users=20, records=60)
    return (data, Logistic(40, 10), scaffold(), plan, Gaussian(clip=1.0, noise=2.0)), {}


def secure() -> tuple[tuple[Any, ...], dict[str, Any]]:
    plan = Plan(rounds=3, local_steps=1, user_ratio=0.8, data_ratio=0.5, learning_rate=0.5)
    data = synthetic(users=10, records=40)
    given = (data, Logistic(40, 10), fedavg(), plan, Gaussian(clip=1.0, noise=2.0))
    return given, {"secure": Secure(colluders=1)}


def declared() -> tuple[tuple[Any, ...], dict[str, Any]]:
    one = setting("scaffold", "logistic", "poisson")
    data = one.federation.declaring(10)
    return (data, one.task, one.algorithm, one.plan, one.privacy), {}


def extreme() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One user has a record that is not tame: that changes how all users are computed."""
    one = setting("scaffold", "logistic", "fixed", user_ratio=1.0)
    data = one.federation
    data.train.features[0] = 1e15
    return (data, one.task, one.algorithm, one.plan, one.privacy), {}


def by_records() -> tuple[tuple[Any, ...], dict[str, Any]]:
    one = setting("scaffold", "logistic", "fixed", weighting="records", user_ratio=1.0)
    return (one.federation, one.task, one.algorithm, one.plan, one.privacy), {}


def own_noises() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Users with noise of their own, weighted by it."""
    plan = {"weighting": "noise"}
    one = setting("scaffold-balanced", "logistic", "fixed", federation(EQUAL), **plan)
    noises = tuple(2.0 + user % 2 for user in range(one.users))  # two, which are accounted
    privacy = Gaussian(clip=1.0, noise=noises)
    return (one.federation, one.task, one.algorithm, one.plan, privacy), {}


def personal() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model for each user, with a pull that the server estimates."""
    one = setting(mean_regularised(scaffold()), "logistic", "fixed")
    return (one.federation, one.task, one.algorithm, one.plan, one.privacy), {}


def pulled() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same with balanced controls, a pull that is given, and a network."""
    one = setting(mean_regularised(scaffold_balanced(), 0.5), "mlp", "poisson")
    return (one.federation, one.task, one.algorithm, one.plan, one.privacy), {"chunk": 2}


def many() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """More rows than are added together, and more than PyTorch adds in one group."""
    plan = Plan(rounds=3, local_steps=2, user_ratio=0.9, data_ratio=0.5, learning_rate=0.5)
    data = synthetic(users=60, records=10)
    given = (data, Logistic(40, 10), scaffold(), plan, Gaussian(clip=1.0, noise=2.0))
    return given, {"chunk": 21}


def two_classes() -> tuple[tuple[Any, ...], dict[str, Any]]:
    plan = Plan(rounds=2, local_steps=2, user_ratio=0.5, data_ratio=0.5, learning_rate=0.5)
    data = synthetic(users=8, records=20, classes=2)
    task = Linear(data.dimension, 1, LOSSES["logistic"])
    return (data, task, scaffold(), plan, Gaussian(clip=1.0, noise=2.0)), {}


def numbers() -> tuple[tuple[Any, ...], dict[str, Any]]:
    data = federation(UNEQUAL)
    pairs = [
        [(t.of(i)[0], t.of(i)[0][:, 0] / 4) for i in range(6)] for t in (data.train, data.test)
    ]
    made = Federation.from_arrays(*pairs, target="number")
    plan = Plan(rounds=3, local_steps=2, user_ratio=0.5, data_ratio=0.5, learning_rate=0.5)
    task = Linear(4, 1, LOSSES["squared"])
    return (made, task, scaffold(), plan, Gaussian(clip=1.0, noise=2.0)), {}


SPECIAL = {
    one.__name__: one
    for one in (
        narrow,
        secure,
        declared,
        extreme,
        by_records,
        own_noises,
        personal,
        pulled,
        numbers,
        two_classes,
        many,
    )
}

FAST = [
    *(Case(name) for name in EVERY),
    *(Case("scaffold", "mlp", privacy) for privacy in ("poisson", "user-poisson", "median")),
    Case("scaffold", "module"),
    Case("scaffold-balanced", "logistic", "none", chunk=2),
    *(Special(name) for name in SPECIAL),
]

#: Those that two GPUs compute: every way of adding.
ON_GPUS = [
    Case("scaffold"),
    Case("scaffold-balanced", chunk=2),
    Case("fedavg", "mlp", "poisson"),
    *(Special(name) for name in ("secure", "personal", "pulled")),
]

#: Those that are run twice on the same ranks: every way of adding.
AGAIN = [Case("scaffold-balanced"), *(Special(name) for name in ("pulled", "many"))]

#: The run that is stored.
FOLDER = Case("scaffold-balanced")
#: The run that is interrupted.
KILLED = Case("scaffold", checkpoint_every=1)


def reached(case: Case | Special, **more: Any) -> dict[str, Any]:
    """What a run comes to."""
    given, options = case.arguments()
    result = train(*given, **options, **more)
    return {
        "params": result.params,
        "ended": result.ended,
        "privacy": result.privacy,
        "history": [dict(row) for row in result.history],
        "own": torch.zeros(0) if result.own is None else result.own,
    }


def stored(folder: Path) -> dict[str, Any]:
    """The users' slots and the ledger of a run folder."""
    run = RunFolder(folder)
    saved = run.load_checkpoint()
    assert isinstance(saved, Checkpoint)
    users = saved.memories["users"]
    order = sorted(range(len(users)), key=users.__getitem__)
    return {
        "users": sorted(users),
        "slots": {name: value[order] for name, value in saved.memories["slots"].items()},
        "average": saved.state.average,
        "ledger": [(e["round"], tuple(e["users"])) for e in rounds_of(run.path)],
    }


def all_cases(rank: int, cases: list[Case | Special]) -> list[dict[str, Any]]:
    """The cases on this rank."""
    return [reached(case, distributed=True) for case in cases]


def gpu_of(rank: int) -> str:
    """The GPU of one of two ranks: its own, or the only one, which both share."""
    return "cuda" if torch.cuda.device_count() > 1 else "cuda:0"


def on_gpus(rank: int) -> list[dict[str, Any]]:
    """Some cases where each rank has a GPU."""
    device = gpu_of(rank)
    return [reached(case, distributed=True, device=device) for case in ON_GPUS]


def small_matrix(rank: int, folder: Path) -> dict[str, Any]:
    """What two ranks do in one test session: the cases, and a run that rank 0 stores."""
    found: dict[str, Any] = {"cases": all_cases(rank, FAST)}
    found["again"] = all_cases(rank, AGAIN)
    found["stored"] = reached(FOLDER, out=folder / "several", distributed=True)
    found["resumed"] = reached(KILLED, out=folder / "resumed", resume=True, distributed=True)
    found["refused"] = refused(rank, folder)
    return found


def refused(rank: int, folder: Path) -> dict[str, tuple[str, str]]:
    """The code and the sentence with which each of several mistakes is refused on this rank."""
    one = setting("scaffold", rounds=3)
    given = [one.federation, one.task, one.algorithm, one.plan, one.privacy]
    other = rank == 1
    mistakes: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "plan": ([*given[:3], one.plan.changed(rounds=3 + rank), given[4]], {}),
        "data": ([federation(seed=rank), *given[1:]], {}),
        "users": ([federation((9,)), *given[1:3], one.plan.changed(user_ratio=1.0), None], {}),
        "engine": (given, {"engine": "loop"}),
        "metrics": (given, {"metrics": ["log_loss"] if other else []}),
        "one rank": ([*given[:3], "no plan" if other else one.plan, given[4]], {}),
        "version": (given, {}),
        "no GPU on one rank": (given, {"device": "cuda:99" if other else "cpu"}),
        "no gloo": (given, {}),
    }
    patches: dict[str, Any] = {
        "version": patch.object(dpscaffold, "__version__", f"1.{rank}"),
        "no gloo": patch.object(dist, "is_gloo_available", return_value=False),
    }
    found = {}
    for name, (arguments, options) in mistakes.items():
        try:
            with patches.get(name, nullcontext()):
                train(*arguments, **options, out=folder / "refused", distributed=True)
        except (BadInput, RankLost) as error:
            found[name] = (error.code, str(error))
    return found


def dies(rank: int, folder: Path) -> None:
    """A run of which rank 1 is killed in the third round, before it sends anything."""
    with _killed(rank, Engine, "round", 3):
        reached(KILLED, out=folder, distributed=True)


def resumes(rank: int, folder: Path) -> dict[str, Any]:
    """The rest of that run."""
    return reached(KILLED, out=folder, resume=True, distributed=True)


def dies_on_a_gpu(rank: int, case: Case | Special) -> None:
    """A run on GPUs of which rank 1 is killed where the second sum begins."""
    with _killed(rank, Ranks, "sum", 2):
        reached(case, distributed=True, device=gpu_of(rank))


@contextmanager
def _killed(rank: int, owner: type, method: str, call: int) -> Iterator[None]:
    """Rank 1 is killed when it calls a method for the n-th time."""
    real, calls = getattr(owner, method), []

    def killed(*given: Any) -> Any:
        calls.append(method)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given)

    with patch.object(owner, method, killed) if rank == 1 else nullcontext():
        yield
