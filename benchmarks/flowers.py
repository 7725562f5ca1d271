"""The round of :mod:`round` in Flower's simulation: every client a node, each with Opacus.

Needs flwr, ray and opacus. Ray's actors import this file by name, so its folder is put on their
path. A simulation runs from start to end; here it waits before each round until it is asked for
one, so that it can take turns with the other sides.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

USERS, STEPS, BATCH, RECORDS, FEATURES, CLASSES = 20, 50, 800, 4000, 40, 10

#: What a client of an actor's process holds between rounds, by node.
_held: dict[int, tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = {}


def records_of(node: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A client's records and its correction, made once a process."""
    if node not in _held:
        generator = torch.Generator().manual_seed(node % 2**31)
        features = torch.randn(RECORDS, FEATURES, generator=generator)
        features /= features.norm(dim=1, keepdim=True)
        labels = torch.randint(0, CLASSES, (RECORDS,), generator=generator)
        zeros = [torch.zeros(CLASSES, FEATURES), torch.zeros(CLASSES)]
        _held[node] = features, labels, zeros
    return _held[node]


def train(message: Any, context: Any) -> Any:
    """K steps with Opacus' hooks from the weights that were sent, and the correction's change."""
    from flwr.app import ArrayRecord, Message, RecordDict
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    torch.set_num_threads(1)
    features, labels, correction = records_of(context.node_id)
    model = torch.nn.Linear(FEATURES, CLASSES)
    model.load_state_dict(message.content["weights"].to_torch_state_dict())
    start = [p.detach().clone() for p in model.parameters()]
    wrapped = GradSampleModule(model)
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    optimizer = DPOptimizer(
        inner, noise_multiplier=120.0, max_grad_norm=1.5, expected_batch_size=BATCH
    )
    loss = torch.nn.CrossEntropyLoss()
    for _ in range(STEPS):
        chosen = torch.randperm(RECORDS)[:BATCH]
        optimizer.zero_grad()
        loss(wrapped(features[chosen]), labels[chosen]).backward()
        optimizer.pre_step()
        for p, shift in zip(model.parameters(), correction, strict=True):
            p.grad += shift
        inner.step()
    moved = {
        name: old - p.detach()
        for (name, p), old in zip(model.named_parameters(), start, strict=True)
    }
    reply = {"weights": ArrayRecord(model.state_dict()), "control": ArrayRecord(moved)}
    return Message(content=RecordDict(reply), reply_to=message)


class Simulation:
    """Flower's simulation in a thread, a round at a time."""

    def __init__(self, nodes: int, cores: int) -> None:
        self._wanted, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._failed: list[BaseException] = []
        self._over = False
        self._thread = threading.Thread(target=self._run, args=(nodes, cores), daemon=True)
        self._thread.start()

    def once(self) -> None:
        """A round."""
        self._wanted.release()
        self._done.acquire()
        if self._failed:
            raise RuntimeError(f"Flower's simulation ended: {self._failed[0]}")

    def end(self) -> None:
        """Let the simulation end, and its actors with it."""
        self._over = True
        self._wanted.release()
        self._thread.join(60)

    def _run(self, nodes: int, cores: int) -> None:
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation

        server, client = ServerApp(), ClientApp()
        client.train()(train)
        server.main()(self._serve)
        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        try:
            run_simulation(
                server, client, nodes, backend_config={**resources, "init_args": _started(cores)}
            )
        except BaseException as error:  # whatever ended it, the side that waits must hear of it
            self._failed.append(error)
        self._done.release()

    def _serve(self, grid: Any, context: Any) -> None:
        from flwr.app import ArrayRecord, Message, RecordDict

        model = torch.nn.Linear(FEATURES, CLASSES).state_dict()
        while len(list(grid.get_node_ids())) < USERS:  # they register while the server app runs
            time.sleep(0.1)
        while True:
            self._wanted.acquire()
            if self._over:
                return
            content = RecordDict({"weights": ArrayRecord(model)})
            asked = [
                Message(content, dst_node_id=node, message_type="train")
                for node in grid.get_node_ids()
            ]
            replies = list(grid.send_and_receive(asked))
            answers = [one.content for one in replies if one.has_content()]
            if len(answers) < len(asked):
                said = [one.error.reason for one in replies if one.has_error()]
                failed = f"{len(answers)} of {len(asked)} clients answered ({said[:1]})"
                self._failed.append(RuntimeError(failed))
            else:
                states = [one["weights"].to_torch_state_dict() for one in answers]
                model = {name: torch.stack([s[name] for s in states]).mean(0) for name in model}
            self._done.release()


_running: list[Simulation] = []


def _started(cores: int) -> dict[str, Any]:
    """How Ray is started: quietly, with this many cores, and no page of its own."""
    return {"num_cpus": cores, "include_dashboard": False, "log_to_driver": False}


def flower(cores: int) -> Callable[[], object]:
    """A round of the simulation with 20 clients."""
    import flwr  # noqa: F401
    import opacus  # noqa: F401
    import ray  # noqa: F401

    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    _running.append(Simulation(USERS, cores))
    return _running[-1].once


def end_all() -> None:
    """End what runs, before the interpreter waits for its threads."""
    while _running:
        _running.pop().end()


def tree_time() -> float:
    """CPU seconds of this process and, on Linux, of all that it started, to a hundredth each."""
    tick, mine = os.sysconf("SC_CLK_TCK"), os.getpid()
    parents, spent = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        pid = int(folder.name)
        parents[pid], spent[pid] = int(fields[1]), sum(map(int, fields[11:15])) / tick

    def ours(pid: int) -> bool:
        while pid > 1 and pid != mine:
            pid = parents.get(pid, 0)
        return pid == mine

    started = sum(seconds for pid, seconds in spent.items() if pid != mine and ours(pid))
    return time.process_time() + started
