"""An algorithm is pure functions on vectors: alike for one user and for a stack, and they change
nothing."""

from __future__ import annotations

import pytest
import torch
from small import EVERY

from dpscaffold.algorithms import (
    ALGORITHMS,
    Algorithm,
    Broadcast,
    Cohort,
    Known,
    Local,
    Participant,
    Server,
    Upload,
)

USERS, SIZE, STEPS = 4, 6, 5


def phases() -> list[tuple[str, Algorithm]]:
    """Every algorithm, and the warm-up of those that have one."""
    made = [(name, make()) for name, make in EVERY.items()]
    return made + [
        (f"{name}: warm-up", one.warm_up) for name, one in made if one.warm_up is not None
    ]


each_phase = pytest.mark.parametrize(
    "algorithm", [a for _, a in phases()], ids=[name for name, _ in phases()]
)


def slots(sizes, generator, *users) -> dict[str, torch.Tensor]:
    """Random slots of these sizes."""
    width = {"vector": SIZE, "number": 1}
    return {
        name: torch.randn(*users, width[size], generator=generator) for name, size in sizes.items()
    }


def server(algorithm: Algorithm) -> Server:
    """A server with random slots."""
    generator = torch.Generator().manual_seed(1)
    kept = slots(algorithm.keeps, generator)
    return Server(
        torch.randn(SIZE, generator=generator),
        {name: value.abs() if "adam" in name else value for name, value in kept.items()},
    )


def stack(algorithm: Algorithm) -> tuple[torch.Tensor, Local, Participant]:
    """A gradient, what local steps left, and what a stack of users has before it."""
    generator = torch.Generator().manual_seed(0)
    gradient, y, mean = torch.randn(3, USERS, SIZE, generator=generator)
    memories = slots(algorithm.remembers, generator, USERS)
    known = Known(STEPS, torch.tensor([[0.1], [0.2], [0.4], [0.6]]), torch.ones(USERS, 1))
    cohort = Cohort(
        tuple(range(USERS)),
        torch.full((USERS,), 1 / USERS),
        known,
        memories if algorithm.mirrored else {},
        torch.ones(USERS, dtype=torch.bool),
    )
    sent = server(algorithm)
    shared = {
        name: value.expand(USERS, -1) for name, value in algorithm.announce(sent, cohort).items()
    }
    broadcast = Broadcast(1, sent.params.expand(USERS, -1), shared)
    return gradient, Local(y, mean), Participant(broadcast, memories, known)


def of_user(at: Participant, u: int) -> Participant:
    """What one of the users has before it."""

    def row(values):
        return {name: value[u] for name, value in values.items()}

    broadcast = Broadcast(1, at.broadcast.params[u], row(at.broadcast.shared))
    known = Known(STEPS, float(at.known.step_size[u]), float(at.known.spread[u]))
    return Participant(broadcast, row(at.memory), known)


@each_phase
def test_a_stack_moves_as_its_rows_do(algorithm):
    """direction and finish of (U, P) are those of each user's (P,)."""
    gradient, local, at = stack(algorithm)
    moved = algorithm.direction(gradient, local.params, at)
    upload, kept = algorithm.finish(local, at)
    for u in range(USERS):
        mine = of_user(at, u)
        torch.testing.assert_close(
            moved[u], algorithm.direction(gradient[u], local.params[u], mine)
        )
        one, remembered = algorithm.finish(Local(local.params[u], local.mean_gradient[u]), mine)
        torch.testing.assert_close(upload.params[u], one.params)
        for name, value in one.totals.items():
            torch.testing.assert_close(upload.totals[name][u], value)
        for name, value in remembered.items():
            torch.testing.assert_close(kept[name][u], value)


@each_phase
def test_the_functions_are_pure(algorithm):
    """No argument is written to, and the same arguments give the same result."""
    gradient, local, at = stack(algorithm)
    sent = server(algorithm)
    values = [
        gradient,
        local.params,
        local.mean_gradient,
        at.broadcast.params,
        *at.broadcast.shared.values(),
        *at.memory.values(),
        sent.params,
        *sent.slots.values(),
    ]
    before = [value.clone() for value in values]
    once = algorithm.direction(gradient, local.params, at)
    assert torch.equal(once, algorithm.direction(gradient, local.params, at))
    upload, _ = algorithm.finish(local, at)
    mean = Upload(upload.params[0], {name: value[0] for name, value in upload.totals.items()})
    algorithm.update(sent, mean, 0.5)
    for value, old in zip(values, before, strict=True):
        assert torch.equal(value, old)


@each_phase
def test_the_slots_are_those_declared(algorithm):
    """finish keeps every slot of ``remembers`` and no other, update every one of ``keeps``."""
    _, local, at = stack(algorithm)
    upload, kept = algorithm.finish(local, at)
    assert kept.keys() == algorithm.remembers.keys()
    mean = Upload(upload.params[0], {name: value[0] for name, value in upload.totals.items()})
    moved = algorithm.update(server(algorithm), mean, 0.5)
    assert moved.slots.keys() == algorithm.keeps.keys()
    shapes = {name: (SIZE,) if size == "vector" else (1,) for name, size in algorithm.keeps.items()}
    assert {name: tuple(value.shape) for name, value in moved.slots.items()} == shapes
    assert algorithm.memory == bool(algorithm.remembers or algorithm.mirrored)


@each_phase
def test_what_is_kept_and_what_is_sent_agree(algorithm):
    """Δc_i is the new c_i less the old one, so that c stays the mean of all c_i.

    Memoryless ones send none.
    """
    _, local, at = stack(algorithm)
    upload, kept = algorithm.finish(local, at)
    assert upload.totals.keys() == kept.keys()
    for name, value in upload.totals.items():
        torch.testing.assert_close(value, kept[name] - at.memory[name])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_warm_up_comes_first(name):
    """Rounds 1 to w belong to the warm-up where there is one, the rest to the algorithm."""
    made = ALGORITHMS[name]()
    expected = [made.warm_up or made] * 2 + [made] * 2
    assert [made.phase(round, 2) for round in (1, 2, 3, 4)] == expected
    assert made.phase(1, 0) == made


def test_a_variant_replaces_one_function():
    """The base stays as it was."""
    base = ALGORITHMS["fedavg"]()
    signed = base.replace(name="signed", direction=lambda gradient, y, at: gradient.sign())
    assert base.name == "fedavg" and signed.finish is base.finish
    assert signed.direction(torch.tensor([-3.0, 2.0]), None, None).tolist() == [-1.0, 1.0]
