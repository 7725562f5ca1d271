"""An algorithm is pure functions on vectors: alike for one user and for a stack, and they change
nothing."""

from __future__ import annotations

import pytest
import torch

from dpscaffold.algorithms import ALGORITHMS, Algorithm, Broadcast, Local, Memory, Server, Upload

USERS, SIZE = 4, 6


def phases() -> list[tuple[str, Algorithm]]:
    """Every algorithm, and the warm-up of those that have one."""
    made = [(name, make()) for name, make in ALGORITHMS.items()]
    return made + [
        (f"{name}: warm-up", one.warm_up) for name, one in made if one.warm_up is not None
    ]


each_phase = pytest.mark.parametrize(
    "algorithm", [a for _, a in phases()], ids=[name for name, _ in phases()]
)


def stack(algorithm: Algorithm) -> tuple[torch.Tensor, Local, Broadcast, Memory]:
    """A gradient, what local steps left, and what came from the server, for a stack of users."""
    generator = torch.Generator().manual_seed(0)
    gradient, y, x, c, own, mean = torch.randn(6, USERS, SIZE, generator=generator)
    controls = (c, own) if algorithm.memory else (None, None)
    travelled = torch.tensor([[0.5], [1.0], [2.0], [3.0]])
    return gradient, Local(y, mean, travelled), Broadcast(1, x, controls[0]), Memory(controls[1])


def row(value: torch.Tensor | None, u: int) -> torch.Tensor | None:
    return None if value is None else value[u]


@each_phase
def test_a_stack_moves_as_its_rows_do(algorithm):
    """direction and finish of (U, P) are those of each user's (P,)."""
    gradient, local, broadcast, memory = stack(algorithm)
    moved = algorithm.direction(gradient, local.params, broadcast, memory)
    upload, kept = algorithm.finish(local, broadcast, memory)
    for u in range(USERS):
        sent = Broadcast(1, broadcast.params[u], row(broadcast.control, u))
        mine, alone = Memory(row(memory.control, u)), float(local.travelled[u])
        single = Local(local.params[u], local.mean_gradient[u], alone)
        torch.testing.assert_close(
            moved[u], algorithm.direction(gradient[u], local.params[u], sent, mine)
        )
        one, remembered = algorithm.finish(single, sent, mine)
        torch.testing.assert_close(upload.params[u], one.params)
        if algorithm.memory:
            torch.testing.assert_close(upload.control[u], one.control)
            torch.testing.assert_close(kept.control[u], remembered.control)


@each_phase
def test_the_functions_are_pure(algorithm):
    """No argument is written to, and the same arguments give the same result."""
    gradient, local, broadcast, memory = stack(algorithm)
    values = [
        gradient,
        local.params,
        local.mean_gradient,
        broadcast.params,
        broadcast.control,
        memory.control,
    ]
    before = [None if v is None else v.clone() for v in values]
    once = algorithm.direction(gradient, local.params, broadcast, memory)
    assert torch.equal(once, algorithm.direction(gradient, local.params, broadcast, memory))
    algorithm.finish(local, broadcast, memory)
    server = Server(broadcast.params[0], row(broadcast.control, 0))
    mean = Upload(local.params[0], local.mean_gradient[0])
    algorithm.update(server, mean, 0.5)
    for value, old in zip(values, before, strict=True):
        assert value is old is None or torch.equal(value, old)


@each_phase
def test_what_is_kept_and_what_is_sent_agree(algorithm):
    """Δc_i is the new c_i less the old one, so that c stays the mean of all c_i.

    Memoryless ones send none.
    """
    _, local, broadcast, memory = stack(algorithm)
    upload, kept = algorithm.finish(local, broadcast, memory)
    if algorithm.memory:
        torch.testing.assert_close(upload.control, kept.control - memory.control)
    else:
        assert upload.control is None and kept.control is None


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
    signed = base.replace(
        name="signed", direction=lambda gradient, y, broadcast, memory: gradient.sign()
    )
    assert base.name == "fedavg" and signed.finish is base.finish
    assert signed.direction(torch.tensor([-3.0, 2.0]), None, None, None).tolist() == [-1.0, 1.0]
