"""Run the cases of an experiment, stack by stack, and never one that is finished."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dpscaffold.checks import floor_share
from dpscaffold.config import Run
from dpscaffold.data.config import Images
from dpscaffold.data.loading import load_federation
from dpscaffold.federation import Federation
from dpscaffold.paper.archive import Archive
from dpscaffold.paper.cases import Case
from dpscaffold.paper.solving import solved_noise
from dpscaffold.runs.written import versions
from dpscaffold.training.events import Listener, StackBegun, StackDone
from dpscaffold.training.optimum import Optimum, solve
from dpscaffold.training.stack import ROWS, train_stack
from dpscaffold.tuning.folds import fold_federation


@dataclass(frozen=True)
class CaseStack:
    """Cases that run in one stack."""

    cases: tuple[Case, ...]

    @property
    def work(self) -> float:
        """User-steps: Σ T·m·K over the runs."""
        return float(sum(user_steps(case) for case in self.cases))

    @property
    def rounds(self) -> int:
        """T."""
        return self.cases[0].settings.plan.rounds

    @property
    def title(self) -> str:
        """What is running, for a progress line."""
        rows = sorted({str(case.labels.get("row", "")) for case in self.cases})
        lines = sorted({str(case.labels.get("line", "")) for case in self.cases})
        columns = sorted({str(case.labels.get("column", "")) for case in self.cases})
        fold = "folds, " if self.cases[0].fold else ""
        named = " / ".join(part for part in (_few(rows), _few(columns), _few(lines)) if part)
        return f"{fold}{named} ({len(self.cases)} runs)"


def _few(labels: list[str]) -> str:
    labels = [label for label in labels if label]
    return labels[0] if len(labels) == 1 else (f"{len(labels)} levels" if labels else "")


def user_steps(case: Case) -> int:
    """T·m·K of a case: how many batches are drawn and clipped."""
    settings = case.settings
    users = settings.data.users or 100  # type: ignore[union-attr]
    return (
        settings.plan.rounds
        * floor_share(settings.plan.user_ratio, users)
        * settings.plan.local_steps
    )


def case_stacks(cases: Sequence[Case], device: torch.device) -> list[CaseStack]:
    """The cases, those of equal structure together, cut into stacks that suit the device."""
    limit = ROWS[device.type]
    filled: list[list[Case]] = []
    open_stacks: dict[str, tuple[int, int]] = {}
    for case in cases:
        key, rows = _structure(case)
        place, held = open_stacks.get(key, (-1, limit))
        if held + rows > limit:
            filled.append([])
            place, held = len(filled) - 1, 0
        filled[place].append(case)
        open_stacks[key] = (place, held + rows)
    return [CaseStack(tuple(group)) for group in filled]


def _structure(case: Case) -> tuple[str, int]:
    """What stacked runs share, from the configuration alone, and the run's participants."""
    s = case.settings
    data, privacy = s.data, s.privacy
    users, records = data.users or 100, data.records or 0  # type: ignore[union-attr]
    shared: list[Any] = [
        data.source,
        [getattr(step, "step", "") for step in getattr(data, "preprocess", ())],
        users,
        records,
        s.task.model_dump(),
        s.algorithm.model_dump(),
        s.plan.rounds,
        s.plan.local_steps,
        s.plan.warm_rounds,
        s.plan.user_ratio if s.algorithm.build().warm_up is not None else 0,
        privacy is None,
        s.secure is None,
        privacy and (privacy.sampling, privacy.unit, isinstance(privacy.clip, str)),
        vars(case.schedule),
        case.fold is None,
    ]
    return json.dumps(shared, default=str), floor_share(s.plan.user_ratio, users)


@dataclass
class Loader:
    """Federations by their ``[data]`` table and fold, of which the last few stay in memory, and the
    optima of their convex tasks. ``data_dir`` is
    the folder of the datasets, if it is not the usual."""

    keep: int = 8
    data_dir: Path | None = None
    _held: dict[str, Federation] = field(default_factory=dict)
    _optima: dict[tuple[object, ...], Optimum] = field(default_factory=dict)

    def get(self, case: Case) -> Federation:
        """The federation of a case; equal tables give the same object, so a stack stores it
        once."""
        data = case.settings.data
        if self.data_dir is not None and isinstance(data, Images):
            data = data.model_copy(update={"path": str(self.data_dir)})
        base = data.model_dump_json()
        if case.fold is None:
            return self._remember(base, lambda: load_federation(data))
        fold, folds = case.fold
        whole = self._remember(base, lambda: load_federation(data))
        return self._remember(f"{base} {fold}/{folds}", lambda: fold_federation(whole, fold, folds))

    def optimum(self, case: Case) -> Optimum | None:
        """x* of a case, solved once; None where its task is not convex."""
        federation = self.get(case)
        task = case.settings.task.build(federation)
        if not task.convex:
            return None
        kind = case.settings.task.model_dump_json()
        key = (*case.objective, kind, case.fold)
        if key not in self._optima:
            strength = case.settings.plan.regularisation
            self._optima[key] = solve(federation, task, strength)
        return self._optima[key]

    def _remember(self, key: str, load: Callable[[], Federation]) -> Federation:
        if key not in self._held:
            while len(self._held) >= self.keep:
                self._held.pop(next(iter(self._held)))
            self._held[key] = load()
        else:
            self._held[key] = self._held.pop(key)
        return self._held[key]


def run_cases(
    cases: Sequence[Case],
    archive: Archive,
    device: torch.device,
    tell: Listener,
    optimum: bool = False,
    loader: Loader | None = None,
) -> None:
    """Run what is not in the archive yet; every finished stack is kept at once."""
    todo = list({case.digest: case for case in cases if case not in archive}.values())
    loader = loader or Loader()
    made = versions() | {"device": _device_name(device), "threads": torch.get_num_threads()}
    stacks = case_stacks(todo, device)
    for number, stack in enumerate(stacks, 1):
        tell(StackBegun(stack.title, number, len(stacks), stack.rounds, stack.work))
        started = time.perf_counter()
        data = [loader.get(case) for case in stack.cases]
        settings = [_setting(*one) for one in zip(stack.cases, data, strict=True)]
        optima = {}
        if optimum:
            for case, federation in zip(stack.cases, data, strict=True):
                best = loader.optimum(case)
                if best is not None:
                    optima[id(federation), case.settings.plan.regularisation] = best.loss
        outcomes = train_stack(settings, data, stack.cases[0].schedule, device, tell, optima)
        archive.add(stack.cases, outcomes, made)
        seconds = time.perf_counter() - started
        tell(StackDone(seconds))


def _setting(case: Case, federation: Federation) -> Run:
    return solved_noise(case, federation.roster).settings.setting(federation)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "cpu"
