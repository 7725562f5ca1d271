"""One run on the loop engine, for the experiment in which all users draw the same noise."""

from __future__ import annotations

import time

import torch

from dpscaffold.engines import Hardware, Loop, State
from dpscaffold.engines.rounds import plain_draws, rounds
from dpscaffold.federation import Federation
from dpscaffold.runs.history import HistoryRow
from dpscaffold.setting import Setting
from dpscaffold.training.evaluator import evaluate_all
from dpscaffold.training.events import Evaluated, Listener, RoundDone, silence
from dpscaffold.training.shared_draws import SameForEveryUser
from dpscaffold.training.stack import Outcome, Schedule, evaluators_of


def train_loop(
    setting: Setting,
    federation: Federation,
    engine: str,
    schedule: Schedule,
    device: torch.device,
    tell: Listener = silence,
) -> Outcome:
    """As :func:`~dpscaffold.training.stack.train_stack`, for one run on the readable engine.

    ``engine`` is ``"loop"``, or ``"loop-same-noise"``, which gives all users the batches and the
    noise of the first, as the paper's published code does.
    """
    started = time.perf_counter()
    seed = setting.plan.public_seed
    randomness = SameForEveryUser(seed) if engine == "loop-same-noise" else setting.randomness()
    loop = Loop(setting, federation, Hardware.on(device), randomness)
    evaluators = evaluators_of([setting], [federation], device)
    outcome = Outcome(setting)
    evaluated = set(schedule.rounds(setting.plan.rounds))
    state = State.initial(setting, device)
    for done in rounds(setting, loop, plain_draws(setting, randomness), state):
        state = done.state
        if not bool(torch.isfinite(state.params).all()):
            outcome.diverged = done.number
            break
        row = HistoryRow(done.number)
        if done.number in evaluated:
            found = evaluate_all(evaluators, [state.params], schedule.full)[0]
            row = HistoryRow(done.number, found)
            outcome.history.append(row)
            tell(Evaluated(done.number, (row,)))
        tell(RoundDone(done.number, setting.plan.rounds, (state.params,), (row,)))
    if state.averaged and outcome.diverged is None:
        outcome.average = evaluate_all(evaluators, [state.average], schedule.full)[0]
    outcome.seconds = time.perf_counter() - started
    return outcome
