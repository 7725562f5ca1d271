"""Models evaluated while the next round runs: the same events, rows, checkpoints and ends."""

from __future__ import annotations

import threading

import pytest
import torch

from dpscaffold import Gaussian, Logistic, Plan, Stopping, fedavg, scaffold, synthetic, train
from dpscaffold.engines import Simulator
from dpscaffold.errors import Diverged
from dpscaffold.training.evaluator import Evaluator
from dpscaffold.training.events import Checkpointed, Ended, Evaluated, RoundDone
from dpscaffold.training.in_progress import RunInProgress

DATA = synthetic(users=8, records=30)
NOISE = Gaussian(clip=1.0, noise=1.0)


def plan(**changes):
    given = {"rounds": 7, "local_steps": 2, "user_ratio": 0.5, "evaluate_every": 2}
    return Plan(**given | {"checkpoint_every": 2, "averaging": "tail"} | changes)


@pytest.fixture
def overlapping(monkeypatch):
    """A CPU that evaluates in a thread, as a GPU does."""
    return lambda on=True: monkeypatch.setattr(RunInProgress, "ahead", on)


def told(**more):
    """A run, and everything that it told."""
    events = []
    result = train(
        DATA, Logistic(40, 10), scaffold(), plan(), NOISE, listener=events.append, **more
    )
    return result, events


def names(events):
    """Kind, round and what is known of it, in order."""
    return [
        (type(one).__name__, one.round, [dict(row) for row in getattr(one, "rows", ())])
        for one in events
    ]


def test_events_and_rows_are_those_of_a_run_in_line(overlapping, tmp_path):
    meant, in_line = told(out=tmp_path / "a")
    overlapping()
    found, overlapped = told(out=tmp_path / "b")
    assert names(overlapped) == names(in_line)
    assert [type(one) for one in overlapped[:4]] == [RoundDone, Evaluated, RoundDone, Checkpointed]
    assert isinstance(overlapped[-1], Ended)
    assert found.history == meant.history and torch.equal(found.params, meant.params)
    rows = [(tmp_path / run / "metrics.jsonl").read_text() for run in "ab"]
    assert rows[0] == rows[1]


def test_the_next_round_begins_before_the_last_is_judged(overlapping, monkeypatch):
    overlapping()
    begun, real_gather, real_judge = threading.Event(), Simulator.gather_all, Evaluator.__call__

    def gather(self, phase, broadcasts, draws):
        if broadcasts[0].round == 3:
            begun.set()
        return real_gather(self, phase, broadcasts, draws)

    def judge(self, params):
        assert begun.wait(20)
        return real_judge(self, params)

    monkeypatch.setattr(Simulator, "gather_all", gather)
    monkeypatch.setattr(Evaluator, "__call__", judge)
    assert told()[0].ended == "completed"


@pytest.mark.parametrize("stopped", [3, 4, 5, 6])
def test_resume_is_exact_wherever_it_stopped(overlapping, tmp_path, stopped):
    whole = told()[0]
    overlapping()

    def dies(event):
        if isinstance(event, RoundDone) and event.round == stopped:
            raise RuntimeError("the machine went down")

    with pytest.raises(RuntimeError, match="went down"):
        train(DATA, Logistic(40, 10), scaffold(), plan(), NOISE, listener=dies, out=tmp_path / "r")
    again = told(out=tmp_path / "r", resume=True)[0]
    assert torch.equal(again.params, whole.params)
    assert [r["test_accuracy"] for r in again.history] == [
        r["test_accuracy"] for r in whole.history
    ]


def test_a_run_that_diverges_has_noted_the_rounds_before(overlapping, tmp_path):
    overlapping()
    events = []
    wild = plan(learning_rate=3e38, evaluate_every=1, averaging="none")
    with pytest.raises(Diverged):
        train(DATA, Logistic(40, 10), fedavg(), wild, listener=events.append, out=tmp_path / "r")
    rounds = [one.round for one in events if isinstance(one, RoundDone)]
    judged = [one.round for one in events if isinstance(one, Evaluated)]
    assert rounds == judged == list(range(1, len(rounds) + 1))


def test_what_is_owed_is_settled_where_the_next_round_fails(overlapping, monkeypatch, tmp_path):
    overlapping()
    real = Simulator.gather_all

    def fails(self, phase, broadcasts, draws):
        if broadcasts[0].round == 5:
            raise ValueError("round 5 fails")
        return real(self, phase, broadcasts, draws)

    events = []
    with monkeypatch.context() as broken:
        broken.setattr(Simulator, "gather_all", fails)
        with pytest.raises(ValueError, match="round 5"):
            train(DATA, Logistic(40, 10), scaffold(), plan(), NOISE, listener=events.append,
                  out=tmp_path / "r")  # fmt: skip
    assert [one.round for one in events if isinstance(one, Checkpointed)] == [2, 4]
    assert torch.equal(told(out=tmp_path / "r", resume=True)[0].params, told()[0].params)


def test_stopping_sees_each_evaluation_in_time(overlapping):
    rows, labels = DATA.test.features, [DATA.target.classes[k] for k in DATA.test.labels.tolist()]
    ends = []
    for on in (False, True):
        overlapping(on)
        stopping = Stopping(rows.numpy(), labels=labels, patience=1)
        result = train(DATA, Logistic(40, 10), fedavg(),
                       plan(rounds=40, evaluate_every=1, learning_rate=30.0), NOISE,
                       stopping=stopping)  # fmt: skip
        ends.append((result.rounds, result.history))
    assert ends[0] == ends[1] and ends[0][0] < 40


def test_a_metric_of_ones_own_is_called_in_the_callers_thread(overlapping):
    overlapping()
    threads = []

    def own(model, federation):
        threads.append(threading.current_thread())
        return 1.0

    result = told(metrics=[own])[0]
    assert set(threads) == {threading.current_thread()} and result.final["own"] == 1.0
