"""A run of a Flower app on the disk of its server, so that a ServerApp that ended can go on.

``run.pt`` is replaced whole after every round, before its uploads are acknowledged, and before the
messages of a round leave. A client whose answer was lost is then asked the same question again, and
repeats what it has stored.
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
from dpscaffold.engines import State
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
    #: The last round that it was asked for: one that is asked again is the same participation.
    last_round: int = 0

    def ask(self, round: int) -> None:
        """Note that a round is asked for."""
        self.asked += round != self.last_round
        self.last_round = round

    @property
    def worst(self) -> float:
        """ε of all that may have left the client."""
        return self.granted if self.asked > self.participations else self.epsilon


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
            hold(lock)
            yield
        except BlockingIOError:
            raise BadInput(
                "folder-in-use",
                f"state is {self.folder}, where another ServerApp is at work; wait until it ends, "
                f"or name another folder",
            ) from None
        finally:
            os.close(lock)

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
                f"{path} cannot be read ({type(error).__name__}); restore the file, or name "
                f"another folder to begin a new run, for which clients grant a new budget",
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
