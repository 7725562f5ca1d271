"""One run on the loop engine, for the experiment in which all users draw the same noise."""

from __future__ import annotations

import time

import torch

from dpscaffold.engines import Draw, Loop
from dpscaffold.experiments.draws import SameForEveryUser
from dpscaffold.experiments.judging import Judge
from dpscaffold.experiments.stack import Course, Schedule, Watch
from dpscaffold.setting import Setting


def train_loop(
    setting: Setting,
    engine: str,
    schedule: Schedule,
    device: torch.device,
    watch: Watch | None = None,
) -> Course:
    """As :func:`~dpscaffold.experiments.stack.train_stack`, for one run on the readable engine.

    ``engine`` is ``"loop"``, or ``"loop-same-noise"``, which gives all users the batches and the
    noise of the first, as the paper's published code does.
    """
    started = time.perf_counter()
    seed = setting.plan.seed
    randomness = SameForEveryUser(seed) if engine == "loop-same-noise" else setting.randomness()
    loop = Loop(setting, device, randomness)
    judge = Judge([setting], device, schedule.full)
    course = Course(setting)
    evaluated = set(schedule.rounds(setting.plan.rounds))
    for round in range(1, setting.plan.rounds + 1):
        drawn = randomness.participants(round, setting.users, setting.participants)
        loop.round(round, Draw(drawn, drawn))
        if not bool(torch.isfinite(loop.state.params).all()):
            course.diverged = round
            break
        if round in evaluated:
            course.history.append({"round": round, **judge([loop.state.params])[0]})
        if watch:
            watch(round)
    if loop.state.averaged and course.diverged is None:
        course.average = judge([loop.state.average])[0]
    course.seconds = time.perf_counter() - started
    return course
