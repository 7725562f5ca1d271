"""A run of a Flower app on the disk of its server, so that a ServerApp that ended can go on.

``run.pt`` is replaced whole after every round, before its uploads are acknowledged, and before the
messages of a round leave. A client whose answer was lost is then asked the same question again, and
repeats what it has stored.

The file may be an older one that was put back. So the clients of a run that goes on are asked what
they have spent, and one that has not answered yet counts with all that it granted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpscaffold.atomic import atomic_file, binary_file, hold
from dpscaffold.deployment.protocol.messages import Json
from dpscaffold.engine import State
from dpscaffold.errors import BadInput

FILE = "run.pt"
#: Of the file; raise it when an older one can no longer be read.
FORMAT = 1


@dataclass
class ClientAccount:
    """What one client was asked for, and what it has stated."""

    granted: float
    delta: float
    epsilon: float = 0.0
    asked: int = 0
    participations: int = 0
    #: The last round that it was asked for.
    last_round: int = 0
    #: Whether that round was asked again when all that was asked had been counted: an answer may
    #: then be the one that the client had stored.
    again: bool = False
    #: Whether it has answered since the run began or went on.
    heard: bool = True

    def ask(self, round: int) -> None:
        """Note that a round is asked for. One that is asked again and was not answered is the same
        participation."""
        again, counted = round == self.last_round, self.participations >= self.asked
        self.again = again and (counted or self.again)
        if counted or not again:
            self.asked = max(self.asked, self.participations) + 1
        self.last_round = round

    def hear(self, epsilon: float, participations: int) -> None:
        """Take what the client says that it has spent in this run; it never becomes less."""
        self.epsilon = max(self.epsilon, epsilon)
        self.participations = max(self.participations, participations)
        self.heard = True

    def answer(self, epsilon: float, participations: int) -> None:
        """Take what the client says with the answer to the round that was asked for."""
        self.hear(epsilon, participations)
        if self.again:
            self.asked, self.again = self.participations, False

    @property
    def may_have_spent(self) -> bool:
        """Whether anything may have left the client."""
        return self.asked > 0 or self.participations > 0 or not self.heard

    @property
    def worst(self) -> float:
        """ε of all that may have left the client. The file of a run may be an older one that was
        put back, so that a client which has not answered since may have spent all."""
        known = self.heard and self.participations >= self.asked
        return self.epsilon if known else self.granted


@dataclass(frozen=True)
class SavedRun:
    """Where a run stands: the clients (node numbers, and how many records each has), the state of
    the server, and what was heard of every client.

    ``memories`` are the slots of the users, restored by the object that wrote them.
    """

    run: str
    nodes: tuple[int, ...]
    sizes: tuple[int, ...]
    state: State
    memories: Mapping[str, Any]
    acknowledged: Mapping[int, str]
    restore: frozenset[int]
    heads: Mapping[int, Json]
    accounts: Mapping[int, ClientAccount]

    def to_dict(self) -> dict[str, Any]:
        """The content of ``run.pt``."""
        return {
            **vars(self),
            "state": self.state.to_dict(),
            "restore": sorted(self.restore),
            "accounts": {node: dict(vars(one)) for node, one in self.accounts.items()},
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> SavedRun:
        """The inverse of :meth:`to_dict`."""
        given = {name: saved[name] for name in cls.__dataclass_fields__}
        given["state"] = State.from_dict(given["state"])
        given["restore"] = frozenset(given["restore"])
        given["accounts"] = {node: ClientAccount(**one) for node, one in given["accounts"].items()}
        return cls(**given)


class KeptRun:
    """The folder of one run. ``plan`` identifies what is trained: it is compared when the run goes
    on."""

    def __init__(self, folder: Path, plan: str) -> None:
        self.folder, self.plan = folder, plan

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For this process alone."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._hold(lock)
            yield
        finally:
            os.close(lock)

    def _hold(self, lock: int) -> None:
        try:
            hold(lock)
        except BlockingIOError:
            raise BadInput(
                "folder-in-use",
                f"state is {self.folder}, where another ServerApp is at work; wait until it ends, "
                f"or name another folder",
            ) from None

    def load(self) -> SavedRun | None:
        """The run as it was saved last; None where none has begun."""
        path = self.folder / FILE
        if not path.exists():
            return None
        try:
            saved = dict(torch.load(path, map_location="cpu", weights_only=True))
            known, plan = saved["format"], saved["plan"]
            content = SavedRun.from_dict(saved) if known == FORMAT else None
        except Exception as error:  # PyTorch's errors are of many kinds
            raise BadInput(
                "checkpoint-damaged",
                f"{path} cannot be read ({type(error).__name__}); put a copy back (clients say "
                f"what they have spent since, and rounds that are repeated cost them again), or "
                f"name another folder to begin a new run, for which clients grant a new budget",
            ) from error
        if content is None:
            raise BadInput(
                "wrong-version",
                f"{path} has format {known}, and this version reads {FORMAT}; finish the run with "
                f"the version that wrote it",
            )
        if plan != self.plan:
            raise BadInput(
                "configuration-changed",
                f"state is {self.folder}, which holds a run with another plan, privacy, algorithm "
                f"or model; go on with those, or name another folder",
            )
        return content

    def save(self, content: SavedRun) -> None:
        """Replace the file; it is on the disk when this returns."""
        path = self.folder / FILE
        with atomic_file(path) as partial:
            partial.touch(mode=0o600)
            with binary_file(partial) as stream:
                torch.save({"format": FORMAT, "plan": self.plan, **content.to_dict()}, stream)
