"""Evaluations next to the rounds: the same rows, in order, whenever they come."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from dpscaffold import Logistic, Plan, scaffold, synthetic
from dpscaffold.setting import Setting
from dpscaffold.training import background, stack
from dpscaffold.training.background import Evaluations
from dpscaffold.training.events import Evaluated, RoundDone
from dpscaffold.training.stack import Schedule, train_stack

CPU = torch.device("cpu")


def runs(*rates):
    data = synthetic(users=8, records=30)
    plan = {"rounds": 6, "local_steps": 2, "user_ratio": 0.5}
    plans = [Plan(learning_rate=rate, seed=k, **plan) for k, rate in enumerate(rates)]
    return [Setting(data.roster, Logistic(40, 10), scaffold(), plan) for plan in plans], data


@pytest.mark.parametrize("rates", [(0.1, 0.2), (0.1, 3e38)])
def test_a_stack_has_the_same_history_where_evaluations_come_late(monkeypatch, rates):
    """The second of the last pair diverges on its way: it is evaluated up to that round alone."""
    settings, data = runs(*rates)
    schedule = Schedule(every=2, late=2, full=True)
    meant = train_stack(settings, [data] * 2, schedule)
    told = []
    monkeypatch.setattr(stack, "Evaluations", partial(Evaluations, ahead=True))
    found = train_stack(settings, [data] * 2, schedule, tell=told.append)
    assert [one.history for one in found] == [one.history for one in meant]
    assert [one.diverged for one in found] == [one.diverged for one in meant]
    assert (meant[1].diverged is None) == (rates[1] < 1)
    assert [event.round for event in told if isinstance(event, Evaluated)] == [2, 4, 6]
    assert [event.round for event in told if isinstance(event, RoundDone)] == [1, 2, 3, 4, 5, 6]
    assert "test_accuracy" in told[-1].rows[0]


def test_a_round_does_not_wait_for_its_evaluation(monkeypatch):
    may_go_on = threading.Event()

    def slow(evaluators, models, full):
        assert may_go_on.wait(20)
        return [{"test_accuracy": float(models[0])}]

    monkeypatch.setattr(background, "evaluate_all", slow)
    with Evaluations([], False, CPU, ahead=True) as evaluations:
        evaluations.ask(3, [torch.tensor(0.5)])
        evaluations.ask(4, [torch.tensor(0.75)])
        assert list(evaluations.found()) == []
        may_go_on.set()
        rows = list(evaluations.found(wait=True))
        assert rows == [(3, [{"test_accuracy": 0.5}]), (4, [{"test_accuracy": 0.75}])]
        assert list(evaluations.found(wait=True)) == []
    assert not [one for one in threading.enumerate() if one.name.startswith("evaluation")]


def test_an_evaluation_that_fails_ends_the_stack(monkeypatch):
    def broken(*_):
        raise RuntimeError("no scores")

    monkeypatch.setattr(background, "evaluate_all", broken)
    settings, data = runs(0.1)
    for aside in (False, True):
        monkeypatch.setattr(stack, "Evaluations", partial(Evaluations, ahead=aside))
        with pytest.raises(RuntimeError, match="no scores"):
            train_stack(settings, [data])
