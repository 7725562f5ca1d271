"""Memory that is not enough, slots in a file, and federations of which few take part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses
from small import EQUAL, Driven, federation, final, setting, simulator
from torch.utils._python_dispatch import TorchDispatchMode

from dpscaffold.algorithms import scaffold, scaffold_balanced
from dpscaffold.config import make_run
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import Plan
from dpscaffold.engine import Draw, Engine, Memory, State, memory, stack
from dpscaffold.engine.work import Work
from dpscaffold.federation import Federation, Records
from dpscaffold.randomness.streams import OneRound, Randomness
from dpscaffold.tasks import Logistic

SECRET = Gaussian(clip=0.7, noise=0.8, secret=True)


def short_of_memory(monkeypatch, fits, kind=torch.cuda.OutOfMemoryError):
    """Engines that cannot take more than this many rows; returns how many were tried."""
    tried, real = [], Work._part

    def part(self, block, *more):
        rows = block.rows.stop - block.rows.start
        tried.append(rows)
        found = real(self, block, *more)  # the draws are made, and lost
        if rows > fits:
            raise kind("out of memory")
        return found

    monkeypatch.setattr(Work, "_part", part)
    return tried


@pytest.mark.parametrize("kind", [torch.cuda.OutOfMemoryError, MemoryError, RuntimeError])
def test_a_chunk_that_does_not_fit_is_halved_for_good(monkeypatch, caplog, kind):
    run = setting("scaffold", "logistic", "fixed", user_ratio=1.0, rounds=2)
    whole = final("simulator", run).params
    tried = short_of_memory(monkeypatch, 2, kind)
    engine = simulator(run, chunk=6)
    halved = Driven(engine).drive().reached.params
    assert tried == [6, 3] + 6 * [1] + 6 * [1]
    assert engine.chunk == 1 and "users at a time" in caplog.text
    torch.testing.assert_close(halved, whole, rtol=1e-5, atol=1e-6)


def test_as_many_users_are_computed_together_as_fit(monkeypatch):
    run = setting("scaffold", "logistic", "fixed", user_ratio=1.0)
    assert simulator(run, chunk=2).chunk == 2
    chunks = []
    for size in (10_000, 20_000):
        monkeypatch.setattr(stack, "CPU_CHUNK_BYTES", size)
        chunks.append(simulator(run).chunk)
    assert 1 < 2 * chunks[0] <= chunks[1]


def test_a_secret_round_is_drawn_again_as_it_was(monkeypatch):
    """Were batches drawn again, only those that fit would ever be used."""
    noises, real = {}, OneRound.normals

    def normals(self, round, user):
        stream, probe = real(self, round, user), real(self, round, user)
        noises.setdefault((round, user), set()).add(float(probe.standard_normal(1)[0]))
        return stream

    monkeypatch.setattr(OneRound, "normals", normals)
    tried = short_of_memory(monkeypatch, 3)
    run = setting("scaffold", "logistic", SECRET, user_ratio=1.0)
    Driven(simulator(run, chunk=6)).drive(3)
    assert tried == [6, 3, 3, 3, 3, 3, 3]
    assert len(noises) == 18 and all(len(values) == 1 for values in noises.values())
    assert len(set.union(*noises.values())) == 18  # and never the same twice


def test_a_round_asked_for_twice_has_fresh_secret_noise():
    engine = simulator(setting("fedavg", "logistic", SECRET, federation(EQUAL), rounds=1))
    ends = [Driven(engine).drive().reached.params for _ in range(2)]
    assert not torch.allclose(ends[0], ends[1])
    held = OneRound(Randomness(3, secret=True))
    assert held.cohort(1, 9, 3).tolist() == Randomness(3).cohort(1, 9, 3).tolist()


def test_one_user_that_does_not_fit_is_a_sentence(monkeypatch):
    short_of_memory(monkeypatch, 0)
    driven = Driven(simulator(setting("fedavg", "logistic", "fixed"), chunk=4))
    with refuses("memory-exceeded: batches of 5 of 15 … plan.data_ratio"):
        driven.drive()
    assert driven.state.round == 0


def test_slots_in_a_file_are_the_same(monkeypatch):
    """What is kept, who was seen, the norms, what is forgotten and what a checkpoint holds."""
    stream, everyone = np.random.default_rng(0), list(range(40))
    slots = {"control": "vector", "count": "number"}
    plain = Memory(slots, 5, 20, runs=2)
    monkeypatch.setattr(memory, "MAPPED", 200)
    opened, real = [], memory.np.memmap
    monkeypatch.setattr(
        memory.np, "memmap", lambda *given, **more: opened.append(1) or real(*given, **more)
    )
    mapped = Memory(slots, 5, 20, runs=2)
    assert opened == [1]  # the table of vectors alone is that large
    for _ in range(6):
        users = stream.choice(40, 6, replace=False).tolist()
        kept = {
            "control": torch.from_numpy(stream.standard_normal((6, 5), dtype=np.float32)),
            "count": torch.ones(6, 1),
        }
        plain.keep(users, kept)
        mapped.keep(users, kept)
    for one in (plain, mapped):
        one.forget(1)
    assert plain.norms() == mapped.norms() and plain.norms()["control"] > 0
    again = Memory(slots, 5, 20, runs=2)
    again.keep([3], {"control": torch.ones(1, 5), "count": torch.ones(1, 1)})
    again.restore(mapped.to_dict())
    for name in slots:
        values = [one.recall(everyone)[name] for one in (plain, mapped, again)]
        assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
        assert not values[0][20:].any() and values[0][:20].any()
    assert torch.equal(plain.seen(everyone), mapped.seen(everyone))
    assert not plain.seen(everyone)[20:].any()


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        view = any(one.alias_info for one in function._schema.returns)
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor) and not view:
                self.most = max(self.most, one.numel())
        return made


@pytest.mark.parametrize("algorithm", [scaffold, scaffold_balanced])
def test_a_round_makes_nothing_for_users_who_do_not_take_part(algorithm):
    """Twenty of this many users: the largest tensor of the second round."""

    def round_of(users):
        x = torch.randn(3 * users, 4, generator=torch.Generator().manual_seed(0))
        table = Records(x, (x[:, 0] > 0).long(), torch.arange(users + 1) * 3)
        data = Federation(table, table, 2).validated()
        plan = Plan(rounds=2, local_steps=2, user_ratio=20 / users, data_ratio=0.4)
        run = make_run(data.roster, Logistic(4, 2), algorithm(), plan, Gaussian(1.0, 1.0))
        engine = Engine([run], [data])
        draw = Draw.all(run.randomness().cohort(1, users, 20))
        state = engine.round(State.initial(run), [draw]).state
        with Largest() as seen:
            engine.round(state, [draw])
        return seen.most

    assert round_of(1_000) == round_of(40_000) < 1_000


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux alone says it")
def test_users_who_never_take_part_cost_no_memory():
    """One in 5,000 writes a row; on pages of 2 MB they would hold a quarter of the table."""

    def held():
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) << 10

    before, users = held(), range(0, 1_000_000, 5000)
    table = Memory({"control": "vector"}, parameters=400, users=1_000_000)
    table.keep(users, {"control": torch.ones(len(users), 400)})
    assert held() - before < 100 << 20
    assert float(table.recall([users[-1]])["control"].sum()) == 400
