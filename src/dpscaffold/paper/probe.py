"""How long an experiment would take here: a few timed rounds of a stack of each shape it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dpscaffold.algorithms import ALGORITHMS, DEFAULT
from dpscaffold.checks import floor_share
from dpscaffold.data.shapes import Shape, shape_of
from dpscaffold.engines import Hardware, Simulator, State
from dpscaffold.engines.rounds import plain_draws, stacked_rounds
from dpscaffold.federation import Federation
from dpscaffold.paper.cases import Case
from dpscaffold.paper.runner import CaseStack, case_stacks, user_steps
from dpscaffold.setting import Setting
from dpscaffold.setting.gaussian import Gaussian
from dpscaffold.setting.plan import Plan
from dpscaffold.setting.seeds import public_seed
from dpscaffold.training.evaluator import evaluate_all
from dpscaffold.training.shared_draws import shared_draws
from dpscaffold.training.stack import evaluators_of

#: (features, classes) that represent those of data whose settings do not tell.
USUAL = (40, 10)

#: Steps a timed round has at most, and rounds that are timed (the fastest counts: others wait for
#: the machine).
STEPS, ROUNDS = 4, 2

#: Numbers that the random records of a probe hold at most.
_HELD = 1 << 23

#: A step on the loop engine costs about as much as this many of a stack.
LOOP = 20


@dataclass
class Probe:
    """Seconds per user-step and per evaluated record, measured once per shape on random records."""

    device: torch.device
    _known: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)

    def seconds(self, cases: list[Case]) -> float:
        """An estimate for all the cases, in the stacks that they would run in."""
        distinct = {case.digest: case for case in cases}
        return sum(
            self._seconds(stack) for stack in case_stacks(list(distinct.values()), self.device)
        )

    def _seconds(self, stack: CaseStack) -> float:
        step, record = self.measured(stack)
        slow = 1 if stack.cases[0].engine == "simulator" else LOOP
        return sum(
            user_steps(case) * step * slow + _evaluated(case) * record for case in stack.cases
        )

    def measured(self, stack: CaseStack) -> tuple[float, float]:
        """(seconds per user-step, seconds per evaluated record of a run) of a stack's shape."""
        case = stack.cases[0]
        settings = case.settings
        key = (
            shape_of(settings.data),
            settings.task.kind,
            settings.privacy and settings.privacy.sampling,
            settings.plan.data_ratio,
            _cohort_size(case),
            min(STEPS, settings.plan.local_steps),
            _records(case),
            case.schedule.full,
            len(stack.cases) // len(_seeds(stack)),
        )
        if key not in self._known:
            self._known[key] = self._time(stack)
        return self._known[key]

    def _time(self, stack: CaseStack) -> tuple[float, float]:
        federation, runs = self._stack(stack)
        streams, data = shared_draws(runs), [federation] * len(runs)
        engine = Simulator(runs, data, Hardware.on(self.device), streams, ahead=False)
        states = [State.initial(setting, self.device) for setting in runs]
        drawings = [plain_draws(*one) for one in zip(runs, streams, strict=True)]
        done = stacked_rounds(runs, engine, drawings, states)
        next(done)
        step = min(_timed(lambda: next(done), self.device) for _ in range(ROUNDS))
        evaluators, full = evaluators_of(runs, data, self.device), stack.cases[0].schedule.full
        models = [state.params for state in states]
        for evaluator in evaluators:
            evaluator.prepare(full)
        judged = _timed(lambda: evaluate_all(evaluators, models, full), self.device)
        steps = runs[0].plan.local_steps * sum(setting.cohort_size for setting in runs)
        records = len(federation.test.labels) + full * len(federation.train.labels)
        return step / steps, judged / (records * len(runs))

    def _stack(self, stack: CaseStack) -> tuple[Federation, list[Setting]]:
        """As many runs as the stack has, of the same seeds (runs of one seed share their draws), on
        random records of its shape and fewer users."""
        case = stack.cases[0]
        settings, cohort_size = case.settings, _cohort_size(case)
        train, test = _records(case)
        shape = shape_of(settings.data) or USUAL
        users = max(cohort_size, min(_users(case), _HELD // (train * shape[0])))
        federation = _random_federation(shape, users, train, test)
        # Whatever the stack runs: FedSGD's one pass and warm starts would not fit the few steps.
        algorithm = ALGORITHMS[DEFAULT]()
        privacy = (
            None if settings.privacy is None else Gaussian(1.0, 1.0, settings.privacy.sampling)
        )
        task = settings.task.build(federation)
        return federation, [
            Setting(
                federation.roster,
                task,
                algorithm,
                Plan(
                    rounds=99,
                    local_steps=min(STEPS, settings.plan.local_steps),
                    user_ratio=cohort_size / users,
                    data_ratio=settings.plan.data_ratio,
                    seed=seed,
                ),
                privacy,
            )
            for seed in (public_seed(case.settings.plan.seed) for case in stack.cases)
        ]


def _timed(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _seeds(stack: CaseStack) -> set[int]:
    return {public_seed(case.settings.plan.seed) for case in stack.cases}


def _users(case: Case) -> int:
    return case.settings.data.users or 100  # type: ignore[union-attr]


def _cohort_size(case: Case) -> int:
    return floor_share(case.settings.plan.user_ratio, _users(case))


def _records(case: Case) -> tuple[int, int]:
    """(train, test) records of a user; a fold holds a part of the training records out."""
    data = case.settings.data
    records = data.records or 5000  # type: ignore[union-attr]
    test = round(data.test_ratio * records)  # type: ignore[union-attr]
    train = records - test
    if case.fold is None:
        return train, test
    held = train // case.fold[1]
    return train - held, held


def _evaluated(case: Case) -> int:
    """Records that are evaluated in the whole run."""
    train, test = _records(case)
    times = len(case.schedule.rounds(case.settings.plan.rounds))
    return times * _users(case) * (test + (train if case.schedule.full else 0))


def _random_federation(shape: Shape, users: int, train: int, test: int) -> Federation:
    """Unit-norm rows of (features, classes)."""
    features, classes = shape
    stream = torch.Generator().manual_seed(0)

    def table(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, features, generator=stream)
        return x / x.norm(dim=1, keepdim=True), torch.randint(classes, (count,), generator=stream)

    return Federation.from_arrays(
        [table(train) for _ in range(users)], [table(test) for _ in range(users)], classes=classes
    )
