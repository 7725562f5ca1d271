"""How long an experiment would take here: a few timed rounds of each shape it has."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from dpscaffold.config import Settings
from dpscaffold.engines import Draw, Simulator
from dpscaffold.experiments.cases import Case
from dpscaffold.experiments.judging import Judge
from dpscaffold.experiments.runner import user_steps
from dpscaffold.federation import Federation
from dpscaffold.local import Gaussian
from dpscaffold.plan import Plan, floor_share
from dpscaffold.setting import Setting

#: (features, classes) of the sources that the experiments use, after preprocessing.
SHAPES = {"synthetic": (40, 10), "emnist47": (784, 47), "mnist": (60, 10)}

#: Steps a timed round has at most.
STEPS = 10


@dataclass
class Probe:
    """Seconds per user-step and per evaluated record, measured once per shape on random records."""

    device: torch.device
    _known: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)

    def seconds(self, cases: list[Case]) -> float:
        """An estimate for all the cases, one after the other."""
        distinct = {case.digest: case for case in cases}
        return sum(self._seconds(case) for case in distinct.values())

    def _seconds(self, case: Case) -> float:
        settings = case.settings
        step, record = self.measured(settings)
        train, test = _records(settings)
        users = settings.data.users or 100  # type: ignore[union-attr]
        judged = users * (test + (train if case.schedule.full else 0))
        evaluations = len(case.schedule.rounds(settings.plan.rounds))
        slow = 20 if case.engine != "simulator" else 1
        return user_steps(case) * step * slow + evaluations * judged * record

    def measured(self, settings: Settings) -> tuple[float, float]:
        """(seconds per user-step, seconds per evaluated record) of a configuration's shape."""
        plan = settings.plan
        users = settings.data.users or 100  # type: ignore[union-attr]
        rows = max(2, min(16, floor_share(plan.user_ratio, users)))
        steps = min(STEPS, plan.local_steps)
        train, _ = _records(settings)
        key = (settings.data.source, settings.task.kind, settings.privacy is None, rows, steps, train)
        if key not in self._known:
            self._known[key] = self._time(settings, rows, steps, train)
        return self._known[key]

    def _time(self, settings: Settings, rows: int, steps: int, train: int) -> tuple[float, float]:
        federation = _random_federation(settings.data.source, rows, train)
        algorithm = settings.algorithm.model_copy(update={"name": "scaffold"}).build()
        plan = Plan(rounds=99, local_steps=steps, user_ratio=1.0, data_ratio=settings.plan.data_ratio)
        privacy = None if settings.privacy is None else Gaussian(1.0, 1.0, settings.privacy.sampling)
        setting = Setting(federation, settings.task.build(federation), algorithm, plan, privacy)
        engine = Simulator([setting], self.device)
        everyone = np.arange(rows)
        engine.round(1, Draw(everyone, everyone))
        step = min(_timed(lambda: engine.round(2, Draw(everyone, everyone)), self.device) for _ in range(2))
        judge = Judge([setting], self.device, full=True)
        judged = _timed(lambda: judge([engine.state.params]), self.device)
        return step / (rows * steps), judged / (rows * (train + 8))


def _timed(work, device: torch.device) -> float:  # type: ignore[no-untyped-def]
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _records(settings: Settings) -> tuple[int, int]:
    """(train, test) records of a user."""
    records = settings.data.records or 5000  # type: ignore[union-attr]
    test = round(settings.data.test_ratio * records)  # type: ignore[union-attr]
    return records - test, test


def _random_federation(source: str, users: int, records: int) -> Federation:
    """Unit-norm rows of the source's shape."""
    features, classes = SHAPES.get(source, (40, 10))
    stream = torch.Generator().manual_seed(0)

    def table(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, features, generator=stream)
        return x / x.norm(dim=1, keepdim=True), torch.randint(classes, (count,), generator=stream)

    return Federation.from_arrays(
        [table(records) for _ in range(users)], [table(8) for _ in range(users)], classes=classes
    )
