"""Memory that is not enough, and memories in a file: the same run every time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refusals import refuses
from small import CPU, EQUAL, Driven, federation, setting, simulator

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.engines import Memories, memories
from dpscaffold.engines.fast.worker import Worker
from dpscaffold.randomness.streams import OneRound, Randomness


def test_as_many_users_are_computed_together_as_fit():
    run = setting("scaffold", "logistic", "fixed", user_ratio=1.0)
    assert simulator(run).chunk == 6 and simulator(run, chunk=2).chunk == 2


def short_of_memory(monkeypatch, fits, kind=torch.cuda.OutOfMemoryError):
    """Workers that cannot take more than this many rows; returns the shards that were tried."""
    tried, real = [], Worker.participate

    def participate(self, phase, rows, *more):
        tried.append([row.user for row in rows])
        found = real(self, phase, rows, *more)  # the draws are made, and lost
        if len(rows) > fits:
            raise kind("out of memory")
        return found

    monkeypatch.setattr(Worker, "participate", participate)
    return tried


@pytest.mark.parametrize("kind", [torch.cuda.OutOfMemoryError, MemoryError, RuntimeError])
def test_a_chunk_that_does_not_fit_is_halved_for_good(monkeypatch, caplog, kind):
    run = setting("scaffold", "logistic", "fixed", user_ratio=1.0, rounds=2)
    whole = Driven(simulator(run)).drive().reached.params
    tried = short_of_memory(monkeypatch, 2, kind)
    engine = simulator(run, chunk=6)
    halved = Driven(engine).drive().reached.params
    assert [len(users) for users in tried] == [6, 3] + 6 * [1] + 6 * [1]
    assert engine.chunk == 1 and "users at a time" in caplog.text
    torch.testing.assert_close(halved, whole, rtol=1e-5, atol=1e-6)


def test_a_secret_round_is_drawn_again_as_it_was(monkeypatch):
    """Were batches drawn again, only those that fit would ever be used."""
    noises, real = {}, OneRound.normals

    def normals(self, round, user):
        stream, probe = real(self, round, user), real(self, round, user)
        noises.setdefault((round, user), set()).add(float(probe.standard_normal(1)[0]))
        return stream

    monkeypatch.setattr(OneRound, "normals", normals)
    tried = short_of_memory(monkeypatch, 3)
    secret = Gaussian(clip=0.7, noise=0.8, secret=True)
    engine = simulator(setting("scaffold", "logistic", secret, user_ratio=1.0, rounds=3), chunk=6)
    Driven(engine).drive()
    assert [len(users) for users in tried] == [6, 3, 3, 3, 3, 3, 3]
    assert len(noises) == 18 and all(len(values) == 1 for values in noises.values())
    assert len(set.union(*noises.values())) == 18  # and never the same twice
    assert not engine._streams  # no key outlives its round


def test_a_round_asked_for_twice_has_fresh_secret_noise():
    secret = Gaussian(clip=0.7, noise=0.8, secret=True)
    engine = simulator(setting("fedavg", "logistic", secret, federation(EQUAL), rounds=1))
    ends = [Driven(engine).drive().reached.params for _ in range(2)]
    assert not torch.allclose(ends[0], ends[1])


def test_held_streams_are_those_of_a_secret_run_alone():
    engine = simulator(setting("fedavg", "logistic", "fixed"))
    assert engine._of_round(1, 0) is engine.randomness[0]
    assert type(OneRound(Randomness(3, secret=True))).__mro__[1] is Randomness
    assert OneRound(Randomness(3, secret=True)).cohort(1, 9, 3).tolist() == (
        Randomness(3).cohort(1, 9, 3).tolist()
    )


def test_one_user_that_does_not_fit_is_a_sentence(monkeypatch):
    short_of_memory(monkeypatch, 0)
    with refuses("memory-exceeded"):
        Driven(simulator(setting("fedavg", "logistic", "fixed"), chunk=4)).drive()


def test_other_errors_are_not_taken_for_memory(monkeypatch):
    def broken(self, *_):
        raise RuntimeError("sizes differ")

    monkeypatch.setattr(Worker, "participate", broken)
    with pytest.raises(RuntimeError, match="sizes differ"):
        Driven(simulator(setting("fedavg", "logistic", "fixed"))).drive()


def test_memories_in_a_file_are_the_same(monkeypatch):
    stream = np.random.default_rng(0)
    made = [Memories({"control": "vector", "seen": "number"}, 5, CPU) for _ in range(2)]
    for _ in range(12):
        users = stream.choice(40, 6, replace=False).tolist()
        slots = {
            "control": torch.from_numpy(stream.standard_normal((6, 5), dtype=np.float32)),
            "seen": torch.ones(6, 1),
        }
        made[0].keep(users, slots)
        with monkeypatch.context() as small:
            small.setattr(memories, "MAPPED", 200)
            made[1].keep(users, slots)
    assert made[1]._rooms["control"]._file is not None and made[0]._rooms["control"]._file is None
    everyone = list(range(40))
    for name in ("control", "seen"):
        assert torch.equal(*(one.recall(everyone)[name] for one in made))
    assert made[0].largest() == made[1].largest()
    again = Memories({"control": "vector", "seen": "number"}, 5, CPU)
    again.restore(made[1].to_dict())
    assert torch.equal(again.recall(everyone)["control"], made[0].recall(everyone)["control"])
