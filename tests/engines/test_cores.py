"""The cores of a CPU share a round, steps run as one script, and no bit of a run changes."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import EVERY, PRIVACIES, TASKS, UNEQUAL, Driven, federation, setting

from dpscaffold import Gaussian, Linear, Logistic, Plan, scaffold, synthetic, train
from dpscaffold.algorithms import fedavg
from dpscaffold.config import make_run
from dpscaffold.engines import Hardware, Simulator
from dpscaffold.engines.fast import cores
from dpscaffold.engines.fast import scripted as scripts
from dpscaffold.engines.fast.cores import shares_of, side_by_side
from dpscaffold.engines.fast.worker import Worker
from dpscaffold.engines.participation import participate as participation
from dpscaffold.engines.participation.drawing import Row
from dpscaffold.federation import Federation
from dpscaffold.randomness.csprng import CipherStream
from dpscaffold.randomness.streams import OneRound, Randomness
from dpscaffold.tasks import LOSSES, huber


@pytest.fixture(autouse=True)
def every_round_is_shared(monkeypatch):
    """However small it is."""
    monkeypatch.setattr(cores, "_WORTHWHILE", 0)
    monkeypatch.setattr(cores, "_BUSY", 0.0)


def shared_by(run, count, chunk=None):
    """Where a run and its users' memories end with this many cores."""
    engine = Simulator([run], [run.federation], Hardware(chunk=chunk, threads=count))
    reached = Driven(engine).drive().reached
    return torch.cat([reached.params, *(v.flatten() for v in reached.memories.values())])


def same_by_all_cores(run):
    one = shared_by(run, 1)
    for count in (2, 3):
        assert torch.equal(shared_by(run, count), one), count


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("algorithm", EVERY)
def test_cores_change_no_bit(algorithm, sampling, task):
    same_by_all_cores(setting(algorithm, task, sampling, user_ratio=1.0))


@pytest.mark.parametrize("privacy", PRIVACIES)
@pytest.mark.parametrize("task", ["logistic", "mlp"])
def test_no_kind_of_privacy_sees_the_cores(task, privacy):
    same_by_all_cores(setting("scaffold", task, privacy, federation(UNEQUAL), user_ratio=1.0))


def test_secret_noise_is_each_users_own_whatever_the_cores(monkeypatch):
    def keyed(self, *address):
        return CipherStream(hashlib.sha256(repr(address).encode()).digest())

    monkeypatch.setattr(OneRound, "_private", keyed)
    secret = Gaussian(clip=0.7, noise=0.8, secret=True)
    run = setting("scaffold", "logistic", secret, user_ratio=1.0)
    same_by_all_cores(run)
    scripted, plain, taken = scripted_and_not(monkeypatch, lambda: shared_by(run, 2))
    assert torch.equal(scripted, plain) and all(taken)


def test_secret_noise_that_is_not_held_is_used_whatever_it_is(monkeypatch):
    """A site draws new noise each time it asks: were it asked again only where an error grew wild,
    the noise would no longer be Gaussian."""
    run = setting("scaffold", "logistic", Gaussian(clip=0.7, noise=0.8, secret=True))
    real, held = participation.scripted_steps, []

    def spied(task, phase, at, rows, *more):
        held.append(isinstance(rows[0].randomness, OneRound))
        bare = [replace(row, randomness=Randomness(0, secret=True)) for row in rows]
        assert real(task, phase, at, bare, *more) is None
        return real(task, phase, at, rows, *more)

    monkeypatch.setattr(participation, "scripted_steps", spied)
    Driven(Simulator([run], [run.federation], Hardware())).drive()
    assert held and all(held)


def test_chunks_are_shared_in_turn():
    run = setting("scaffold", "logistic", "poisson", user_ratio=1.0)
    for chunk in (1, 2, 4):
        assert torch.equal(shared_by(run, 3, chunk), shared_by(run, 1, chunk))


def test_a_stack_of_runs_is_shared_without_drawing_twice(monkeypatch):
    data = federation(UNEQUAL)
    plans = [Plan(rounds=3, data_ratio=0.4, user_ratio=1.0, learning_rate=r) for r in (0.1, 0.3)]
    runs = [
        make_run(data.roster, Logistic(4, 3), scaffold(), plan, PRIVACIES["fixed"])
        for plan in plans
    ]
    drawn, real = [], Randomness.batches

    def batches(self, round, user, *more):
        drawn.append((round, user))
        return real(self, round, user, *more)

    monkeypatch.setattr(Randomness, "batches", batches)
    ends = []
    for count in (1, 2, 3):
        engine = Simulator(runs, [data] * 2, Hardware(threads=count), [Randomness(0)] * 2)
        ends.append(torch.stack([s.params for s in Driven(engine).drive().states]))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    assert len(drawn) == 3 * len(set(drawn))  # once a round and user in each of the three


def rows_of(users, runs=1):
    plan, streams = Plan(rounds=1, learning_rate=0.5), [Randomness(0), Randomness(1)]
    return [
        Row(user, 9, 3, plan, None, streams[run % len(streams)], plan.step_size, run)
        for run in range(runs)
        for user in range(users)
    ]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 9))
def test_shares_hold_every_row_once(users, runs, count):
    rows = rows_of(users, runs)
    shares = shares_of(rows, 10, count)
    if count == 1 or len(rows) == 1:
        assert not shares
        return
    assert 1 <= len(shares) <= count
    assert sorted(k for share in shares for k in share.rows) == list(range(len(rows)))
    drawn = [{rows[k].kind for k in share.rows} for share in shares]
    assert sum(map(len, drawn)) == len(set.union(*drawn))  # those that draw alike are together
    assert [len(kinds) for kinds in drawn] == [s.drawn.stop - s.drawn.start for s in shares]
    sizes = [len(kinds) for kinds in drawn]
    assert max(sizes) - min(sizes) <= 1


def test_few_users_and_little_work_are_not_shared(monkeypatch):
    monkeypatch.setattr(cores, "_BUSY", 0.7)
    assert len(shares_of(rows_of(20), 10, 2)) == 2
    assert not shares_of(rows_of(17), 10, 16)  # one core would have two, and fifteen would wait
    assert not shares_of(rows_of(3), 10, 16)
    monkeypatch.setattr(cores, "_WORTHWHILE", 1 << 20)
    assert not shares_of(rows_of(20), 10, 2)
    assert len(shares_of(rows_of(20), 1 << 20, 2)) == 2
    assert not shares_of(rows_of(20), 1 << 24, 2)  # products that PyTorch's threads are good at


def test_the_shares_really_run_beside_each_other():
    together = threading.Barrier(3, timeout=20)

    def work():
        together.wait()
        return threading.current_thread().name, torch.get_num_threads()

    before = torch.get_num_threads()
    found = side_by_side([work] * 3)
    assert len({name for name, _ in found}) == 3 and all(count == 1 for _, count in found)
    assert torch.get_num_threads() == before
    fresh = []
    other = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert fresh == [before]


def test_a_failing_share_is_told_once_all_have_ended():
    slow, ended = threading.Event(), []

    def fails():
        slow.set()
        raise ValueError("a share failed")

    def goes_on():
        slow.wait(20)
        ended.append(True)

    with pytest.raises(ValueError, match="a share failed"):
        side_by_side([fails, goes_on])
    assert ended


def test_a_share_that_does_not_fit_halves_the_chunk(monkeypatch):
    run = setting("scaffold", "logistic", "fixed", user_ratio=1.0, rounds=2)
    whole = Driven(Simulator([run], [run.federation], Hardware())).drive().reached.params
    real, tried = participation.participate, []

    def short(task, phase, rows, *more):
        tried.append(len(rows))
        if len(rows) > 1:
            raise MemoryError
        return real(task, phase, rows, *more)

    monkeypatch.setattr("dpscaffold.engines.fast.worker.participate", short)
    engine = Simulator([run], [run.federation], Hardware(chunk=4, threads=2))
    halved = Driven(engine).drive().reached.params
    assert engine.chunk == 2 and sorted(tried)[-2:] == [2, 2]
    torch.testing.assert_close(halved, whole, rtol=1e-5, atol=1e-6)


# ---- the script -----------------------------------------------------------------------------


def losses():
    return {**LOSSES, "huber:0.3": huber(0.3)}


def data_for(loss, scale=1.0, sizes=UNEQUAL):
    stream = np.random.default_rng(3)
    tables = []
    for size in sizes:
        x = (scale * stream.standard_normal((size, 4))).astype(np.float32)
        y = stream.integers(0, 2, size) if loss.kind == "class" else x @ stream.standard_normal(4)
        tables.append((x, y if loss.kind == "class" else y.astype(np.float32)))
    if loss.kind == "class":
        return Federation.from_arrays(tables, tables, classes=2)
    return Federation.from_arrays(tables, tables, target="number")


def scripted_and_not(monkeypatch, make):
    """Where a run ends by the script and step by step, and how often the script took all steps."""
    taken, real = [], participation.scripted_steps

    def spied(*given):
        found = real(*given)
        taken.append(found is not None)
        return found

    with monkeypatch.context() as looking:
        looking.setattr(participation, "scripted_steps", spied)
        scripted = make()
    with monkeypatch.context() as without:
        without.setattr(participation, "scripted_steps", lambda *_: None)
        return scripted, make(), taken


@pytest.mark.parametrize("privacy", ["none", "fixed", "poisson", "user"])
@pytest.mark.parametrize("name", ["softmax", "logistic", "squared", "huber", "huber:0.3"])
def test_the_script_says_what_the_steps_say(monkeypatch, name, privacy):
    loss = losses()[name]
    data = data_for(loss)
    task = Linear(4, loss.outputs(2), loss)
    plan = Plan(rounds=3, local_steps=4, user_ratio=1.0, data_ratio=0.5, learning_rate=0.1,
                regularisation=0.02)  # fmt: skip

    def ended():
        return train(data, task, scaffold(), plan, PRIVACIES[privacy]).params

    scripted, plain, taken = scripted_and_not(monkeypatch, ended)
    assert torch.equal(scripted, plain) and len(taken) == 3 and all(taken)


@pytest.mark.parametrize("algorithm", EVERY)
def test_every_direction_is_taken_as_it_is(monkeypatch, algorithm):
    run = setting(algorithm, "logistic", "poisson", user_ratio=1.0)
    scripted, plain, taken = scripted_and_not(monkeypatch, lambda: shared_by(run, 1))
    assert torch.equal(scripted, plain)
    assert all(taken) == (algorithm != "feddyn")  # your own direction is taken step by step


def test_noise_in_blocks_of_steps_is_the_same(monkeypatch):
    run = setting("scaffold", "logistic", "fixed", user_ratio=1.0)
    whole = shared_by(run, 2)
    monkeypatch.setattr("dpscaffold.engines.fast.scripted.NOISE_BLOCK", 40)
    assert torch.equal(shared_by(run, 2), whole)


def test_errors_that_grow_wild_are_taken_step_by_step(monkeypatch):
    loss = LOSSES["squared"]
    data, mechanism = data_for(loss), Gaussian(clip=1e4, noise=0.1)
    plan = Plan(rounds=2, local_steps=3, data_ratio=0.4, learning_rate=300.0, user_ratio=1.0)

    def ended():
        return train(data, Linear(4, 1, loss), fedavg(), plan, mechanism).params

    scripted, plain, taken = scripted_and_not(monkeypatch, ended)
    assert torch.equal(scripted, plain) and False in taken


@pytest.mark.parametrize(
    ("privacy", "scale"), [("median", 1.0), ("user-poisson", 1.0), ("fixed", 1e8)]
)
def test_what_the_script_does_not_know_it_leaves(monkeypatch, privacy, scale):
    data = data_for(LOSSES["softmax"], scale)
    plan = Plan(rounds=1, local_steps=2, user_ratio=1.0, data_ratio=0.4, learning_rate=0.5)

    def ended():
        return train(data, Logistic(4, 2), fedavg(), plan, PRIVACIES[privacy]).params

    _, _, taken = scripted_and_not(monkeypatch, ended)
    assert taken == [False]


def test_without_scripts_the_steps_are_taken_one_by_one(monkeypatch, caplog):
    run = setting("scaffold", "logistic", "fixed", user_ratio=1.0)
    whole = shared_by(run, 2)

    def refuses(program):
        raise RuntimeError("no scripts in this PyTorch")

    scripts._compiled.cache_clear()
    monkeypatch.setattr(torch.jit, "script", refuses)
    monkeypatch.setattr("dpscaffold.engines.fast.kernels._refused", set())
    try:
        assert torch.equal(shared_by(run, 2), whole)
    finally:
        scripts._compiled.cache_clear()
    assert caplog.text.count("no scripts in this PyTorch") == 1


def test_train_shares_by_the_threads_of_pytorch(monkeypatch):
    data, seen, real = synthetic(users=6, records=30), [], Worker.__init__

    def noting(self, settings, federations, device, count=1):
        seen.append(count)
        real(self, settings, federations, device, count)

    monkeypatch.setattr(Worker, "__init__", noting)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        train(data, Logistic(40, 10), scaffold(), Plan(rounds=1, local_steps=2))
    finally:
        torch.set_num_threads(before)
    assert seen == [2]
