"""One run on several processes (ranks): rank 0 drives it, the others compute for it.

Rank 0 takes the rounds as a run of one process does: it draws the participants, keeps the ledger,
moves the server, writes the run folder and reports progress.
The other ranks compute what it asks for and write nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import dpscaffold
from dpscaffold.config import Run
from dpscaffold.engines import ENGINES, Hardware
from dpscaffold.engines.fast.ranked import RankedSimulator
from dpscaffold.engines.launcher import VARIABLES, launched_ranks
from dpscaffold.engines.machine import pick_device, stop_signals
from dpscaffold.engines.ranks import Ranks
from dpscaffold.errors import BadInput, RankLost
from dpscaffold.federation import Federation
from dpscaffold.federation.share import UserShare
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.written import plain
from dpscaffold.training.evaluator import Evaluator, Metrics
from dpscaffold.training.opening import Asked
from dpscaffold.training.optimum import Optimum
from dpscaffold.training.result import Result

#: How long a rank waits for the others, in seconds; the environment variable changes it.
TIMEOUT, TIMEOUT_VARIABLE = 600.0, "DPSCAFFOLD_RANK_TIMEOUT"


def join(device: str = "cpu", distributed: bool | None = None) -> Ranks | None:
    """This process among the ranks of a run; None where it runs alone. The process group is joined
    here, unless the caller did so before. ``distributed`` None: where a launcher started several
    processes. Ranks of other versions and without the device are refused on all of them."""
    if distributed is None:
        distributed = launched_ranks() > 1
    if not distributed:
        return None
    _require_backend("gloo", device)
    timeout = _timeout()
    with _meeting(timeout):
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        ranks = Ranks(timeout)
    with _failing(ranks):
        own = _own_device(device)
        refuse_differing(ranks, versions() | {"kind of device": own.type})
        ranks.compute_on(own)
    return ranks


@contextmanager
def _meeting(timeout: float) -> Iterator[None]:
    """Say in one sentence that the ranks did not find each other."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        where = ":".join(os.environ.get(name, "?") for name in VARIABLES[2:])
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(
            "no-rendezvous",
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} did not meet the "
            f"others at {where} within {timeout:g} s ({said}); start all ranks, and let them reach "
            f"that address",
        ) from None


def leads(ranks: Ranks | None) -> bool:
    """Whether this process writes, prints and reports progress."""
    return ranks is None or ranks.leads


def own_hardware(device: str, ranks: Ranks | None, chunk: int | None = None) -> Hardware:
    """What this process computes on."""
    return Hardware(pick_device(device) if ranks is None else ranks.device, chunk)


def _require_backend(name: str, device: str) -> None:
    """Refuse a PyTorch that was built without a way to exchange tensors."""
    if not dist.is_available() or not getattr(dist, f"is_{name}_available")():
        raise BadInput(
            "backend-missing",
            f"several processes need the backend {name} for device {device!r}, and this PyTorch "
            f"was built without it; install one with it, or use one process",
        )


def _timeout() -> float:
    given = os.environ.get(TIMEOUT_VARIABLE)
    try:
        found = TIMEOUT if given is None else float(given)
    except ValueError:
        found = 0.0
    if not 1 <= found <= 86400:
        raise BadInput(
            "out-of-range",
            f"{TIMEOUT_VARIABLE} is {given!r}; give a number of seconds from 1 to 86400",
        )
    return found


def _own_device(device: str) -> torch.device:
    """The device of this rank: of several GPUs of a machine, the one of its local rank."""
    if device.startswith("cuda"):
        _require_backend("nccl", device)
    found = pick_device(device)
    if found.type == "cuda" and found.index is None:
        found = pick_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    if found.type == "cuda":
        _require_backend("nccl", device)  # asked for as "auto"
        torch.cuda.set_device(found)
    return found


@contextmanager
def _failing(ranks: Ranks) -> Iterator[None]:
    """Close the connections to the other ranks where something fails in this block."""
    try:
        yield
    except BaseException:
        ranks.fail()
        raise


@contextmanager
def together(ranks: Ranks | None) -> Iterator[None]:
    """What fails in this block on one rank ends it on all of them."""
    if ranks is None:
        yield
        return
    with _failing(ranks):
        yield
    ranks.close()


def check_same(ranks: Ranks, setting: Run, federation: Federation, more: object) -> None:
    """Refuse ranks that do not run the same thing; ``more`` is what else must agree."""
    if ranks.count > setting.users:
        raise BadInput(
            "too-many-ranks",
            f"{ranks.count} ranks were started for {setting.users} users; start at most one rank "
            f"for each user",
        )
    declared = hashlib.sha256(repr(federation.declared_sizes).encode()).hexdigest()
    said = plain([setting.to_dict(), more, declared])
    described = json.dumps(said, sort_keys=True, default=repr)
    facts = {
        "configuration": hashlib.sha256(described.encode()).hexdigest(),
        "data": _known_again(federation),
    }
    refuse_differing(ranks, facts)


def _known_again(federation: Federation) -> str:
    """What tells that ranks have the same data; of stored data, the checksums of the files and the
    sizes, so that no rank has to read the records of others."""
    if not federation.mapped or not federation.checksum:
        return federation.digest().value
    state = hashlib.blake2b(federation.checksum.encode())
    for table in (federation.train, federation.test):
        state.update(repr(tuple(table.features.shape)).encode())
        for block in table.offsets.split(1 << 20):
            state.update(block.numpy().data)
    return state.hexdigest()


def versions() -> dict[str, str]:
    """What ranks must have the same version of."""
    return {
        "version of dpscaffold": dpscaffold.__version__,
        "version of PyTorch": torch.__version__.partition("+")[0],
        "version of NumPy": np.__version__,
    }


#: What ranks say of themselves in words that help; the rest are checksums.
_SHOWN = {*versions(), "kind of device"}


def refuse_differing(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Refuse ranks that do not say the same of themselves."""
    found = ranks.gather_values(dict(facts))
    for name, own in found[0].items():
        other = next((rank for rank, said in enumerate(found) if said.get(name) != own), None)
        if other is not None:
            shown = f" ({own} and {found[other].get(name)})" if name in _SHOWN else ""
            raise BadInput(
                "ranks-differ",
                f"rank {other} does not have the {name} of rank 0{shown}; give every rank the same",
            )


class Single:
    """A run of one process."""

    leads = True

    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    def engine(self, hardware: Hardware, randomness: Randomness) -> Any:
        """What gathers the uploads of a round."""
        asked = self.asked
        return ENGINES[asked.engine](asked.run, asked.federation, hardware, randomness)

    def evaluator(self, best: Optimum | None) -> Callable[[Tensor], Metrics]:
        """What measures the model."""
        return self._evaluator(self.asked.federation, best)

    def _evaluator(self, federation: Federation, best: Optimum | None, **holders: Any) -> Evaluator:
        run, device = self.asked.run, self.asked.hardware.device
        return Evaluator(
            federation,
            run.task,
            run.plan.regularisation,
            device,
            None if best is None else best.loss,
            self.asked.measures,
            **holders,
        )

    def end(self, result: Result) -> None:
        """The run is over."""

    def serve(self) -> Result:
        """What a process does that does not lead."""
        raise NotImplementedError


class Shared(Single):
    """The run at one of its ranks, once all of them are known to run the same."""

    def __init__(self, asked: Asked, ranks: Ranks) -> None:
        super().__init__(asked)
        if asked.engine != "simulator":
            raise BadInput(
                "not-applicable",
                f"engine is {asked.engine!r}, and only the simulator runs on several ranks; leave "
                f"it out, or use one process",
            )
        metrics = asked.metrics
        names = [metric if isinstance(metric, str) else metric.__name__ for metric in metrics]
        check_same(ranks, asked.run, asked.federation, names)
        self.ranks, self.leads = ranks, ranks.leads
        self.share = UserShare.of(asked.federation, ranks.users(asked.run.users))

    def engine(self, hardware: Hardware, randomness: Randomness) -> RankedSimulator:
        """Have every rank make its engine, with the chunks and threads of this one."""
        self.ranks.ask("start", chunk=hardware.chunk, threads=hardware.threads)
        return RankedSimulator(self.asked.run, self.share, hardware, randomness, self.ranks)

    def evaluator(self, best: Optimum | None) -> Callable[[Tensor], Metrics]:
        """What measures the model on the records of all ranks: sums are reduced, no record is
        sent."""
        own = self._own_evaluator(best)

        def evaluate(params: Tensor) -> Metrics:
            self.ranks.ask("evaluate")
            return own(self.ranks.broadcast(params.contiguous()))

        return evaluate

    def _own_evaluator(self, best: Optimum | None) -> Evaluator:
        share = self.share
        return self._evaluator(share.federation, best, holders=self.ranks, users=share.all_users)

    def serve(self) -> Result:
        """What another rank than 0 does: answer rank 0, and return the result that it reached."""
        asked, evaluator = self.asked, self._own_evaluator(None)
        handlers: dict[str, Callable[..., object]] = {}

        def start(chunk: int | None, threads: int | None) -> None:
            hardware = replace(asked.hardware, chunk=chunk, threads=threads)
            if threads is not None and hardware.device.type == "cpu":
                torch.set_num_threads(threads)
            given = (asked.run, self.share, hardware, asked.run.randomness(), self.ranks)
            handlers.update(RankedSimulator(*given).handlers())

        def evaluate() -> None:
            params = torch.empty(asked.run.task.parameters, device=asked.hardware.device)
            evaluator(self.ranks.broadcast(params))

        handlers |= {"start": start, "evaluate": evaluate}
        with stop_signals():  # rank 0 ends the round and then the run
            try:
                self.ranks.serve(handlers)
            except RankLost as error:
                raise RankLost(f"{error}; start all ranks again, with --resume") from error
        outcome = self.ranks.gather_values(None)[0]
        return Result(asked.run, asked.federation, **outcome)

    def end(self, result: Result) -> None:
        """The run is over, with this result at every rank."""
        self.ranks.ask("end")
        outcome = {**vars(result)}
        del outcome["setting"], outcome["federation"]
        self.ranks.gather_values(outcome)


def sharing(asked: Asked) -> Single:
    """How the processes of a run work together."""
    return Single(asked) if asked.ranks is None else Shared(asked, asked.ranks)
