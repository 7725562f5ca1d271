"""An algorithm is pure functions on vectors: alike for one user and for a stack, and they change
nothing. Each law is stated for every algorithm, its warm-up, and what can be wrapped around it."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from small import EVERY
from torch.testing import assert_close

from dpscaffold.algorithms import (
    ALGORITHMS,
    SERVERS,
    Algorithm,
    Broadcast,
    Cohort,
    Known,
    Local,
    Participant,
    Server,
    Upload,
)
from dpscaffold.algorithms.base import PROVED_FIELDS, AffineDirection
from dpscaffold.algorithms.mean_regularised import FIRST, mean_regularised

USERS, SIZE, STEPS = 4, 6, 5

MADE = {name: make() for name, make in EVERY.items()}
PHASES: dict[str, Algorithm] = {
    **MADE,
    **{f"{name}: warm-up": one.warm_up for name, one in MADE.items() if one.warm_up is not None},
    **{f"scaffold, {name}": wrap(MADE["scaffold"]) for name, wrap in SERVERS.items()},
    **{
        f"{name}, personal {strength}": mean_regularised(MADE[name], strength)
        for name in ("fedavg", "scaffold", "scaffold-balanced")
        for strength in (0.5, "auto")
    },
}

each_phase = pytest.mark.parametrize("algorithm", PHASES.values(), ids=PHASES)


def slots(sizes, generator, *users) -> dict[str, torch.Tensor]:
    """Random slots of these sizes; numbers, and second moments, are positive."""
    values = {
        name: torch.randn(*users, SIZE if size == "vector" else 1, generator=generator)
        for name, size in sizes.items()
    }
    positive = {name for name, size in sizes.items() if size == "number" or "square" in name}
    return {name: value.abs() if name in positive else value for name, value in values.items()}


def server(algorithm: Algorithm) -> Server:
    generator = torch.Generator().manual_seed(1)
    return Server(torch.randn(SIZE, generator=generator), slots(algorithm.keeps, generator))


def stack(algorithm: Algorithm, round: object = 1) -> tuple[torch.Tensor, Local, Participant]:
    """A gradient, what local steps left, and what a stack of users has before it."""
    generator = torch.Generator().manual_seed(0)
    gradient, y, mean = torch.randn(3, USERS, SIZE, generator=generator)
    memories = slots(algorithm.remembers, generator, USERS)
    known = Known(STEPS, torch.tensor([[0.1], [0.2], [0.4], [0.6]]), torch.ones(USERS, 1))
    told = {name: value for name, value in memories.items() if algorithm.mirrored}
    everyone = torch.ones(USERS, dtype=torch.bool)
    cohort = Cohort(tuple(range(USERS)), everyone / USERS, known, told, everyone)
    sent = server(algorithm)
    shared = algorithm.announce(sent, cohort)
    shared = {name: value.expand(USERS, -1) for name, value in shared.items()}
    broadcast = Broadcast(round, sent.params.expand(USERS, -1), shared)
    return gradient, Local(y, mean), Participant(broadcast, memories, known)


def of_user(at: Participant, u: int) -> Participant:
    """What one of the users has before it."""

    def row(values):
        return {name: value[u] for name, value in values.items()}

    broadcast = Broadcast(1, at.broadcast.params[u], row(at.broadcast.shared))
    known = Known(STEPS, float(at.known.step_size[u]), float(at.known.spread[u]))
    return Participant(broadcast, row(at.memory), known)


def outcome(algorithm: Algorithm, gradient, local, at) -> dict[str, torch.Tensor]:
    """All that the user's functions give, by name."""
    upload, kept = algorithm.finish(local, at)
    named = {"totals": upload.totals, "kept": kept}
    return {
        "begin": algorithm.begin_at(at),
        "direction": algorithm.direction(gradient, local.params, at),
        "params": upload.params,
        **{f"{part} {name}": v for part, found in named.items() for name, v in found.items()},
    }


def updated(algorithm: Algorithm, local: Local, at: Participant) -> Server:
    """The server after the first user's upload; nothing that it had is written to."""
    upload, _ = algorithm.finish(local, at)
    mean = Upload(upload.params[0], {name: value[0] for name, value in upload.totals.items()})
    before = server(algorithm)
    after = algorithm.update(before, mean, 0.5)
    assert_close(asdict(before), asdict(server(algorithm)), rtol=0, atol=0)
    return after


@each_phase
def test_a_stack_moves_as_its_rows_do(algorithm):
    """What the functions give for (U, P) is what they give for each user's (P,)."""
    gradient, local, at = stack(algorithm)
    found = outcome(algorithm, gradient, local, at)
    for u in range(USERS):
        one = Local(local.params[u], local.mean_gradient[u])
        assert_close(
            {name: value[u] for name, value in found.items()},
            outcome(algorithm, gradient[u], one, of_user(at, u)),
        )


@each_phase
def test_the_functions_are_pure(algorithm):
    """No argument is written to, and the same arguments give the same result."""
    given = gradient, local, at = stack(algorithm)
    before = gradient.clone(), asdict(local), asdict(at)
    once, moved = outcome(algorithm, *given), asdict(updated(algorithm, local, at))
    assert_close(once, outcome(algorithm, *given), rtol=0, atol=0)
    assert_close(moved, asdict(updated(algorithm, local, at)), rtol=0, atol=0)
    assert_close((gradient, asdict(local), asdict(at)), before, rtol=0, atol=0)


@each_phase
def test_the_slots_are_those_declared(algorithm):
    """finish keeps every slot of ``remembers`` and no other, update every one of ``keeps``."""
    _, local, at = stack(algorithm)
    assert algorithm.finish(local, at)[1].keys() == algorithm.remembers.keys()
    shapes = {name: (SIZE,) if size == "vector" else (1,) for name, size in algorithm.keeps.items()}
    kept = updated(algorithm, local, at).slots
    assert {name: tuple(value.shape) for name, value in kept.items()} == shapes
    assert algorithm.memory == bool(algorithm.remembers or algorithm.mirrored)


@each_phase
def test_what_is_kept_and_what_is_sent_agree(algorithm):
    """Δc_i is the new c_i less the old one, so that c stays the mean of all c_i.

    Memoryless ones send none, and private slots are never sent.
    """
    _, local, at = stack(algorithm)
    upload, kept = algorithm.finish(local, at)
    assert upload.totals.keys() - FIRST.keys() == algorithm.shared.keys()
    for name in algorithm.shared:
        assert_close(upload.totals[name], kept[name] - at.memory[name])


@each_phase
@pytest.mark.parametrize("round", [1, 2])
def test_the_number_of_a_round_may_be_a_tensor(algorithm, round):
    number, tensor = stack(algorithm, round), stack(algorithm, torch.tensor(round))
    found = outcome(algorithm, *number)
    assert_close(found, outcome(algorithm, *tensor), rtol=0, atol=0)
    first = [value for name, value in found.items() if name.startswith("totals first")]
    assert all(bool(value.any()) == (round == 1) for value in first)


@each_phase
def test_a_device_takes_the_steps_of_the_direction(algorithm):
    """direction(g, y) = g + shift + pull·(y − x) at any g and y, or zero."""
    gradient, local, at = stack(algorithm)
    form = algorithm.form(at, PROVED_FIELDS)
    assert (form is None) == (algorithm.name == "feddyn")
    if form is not None:
        apart = local.params - at.broadcast.params
        shift = 0.0 if form.shift is None else form.shift
        expected = (gradient + shift + form.pull * apart) * form.moves
        assert_close(algorithm.direction(gradient, local.params, at), expected)


class Signed(AffineDirection):
    """A subclass that moves otherwise."""

    def __call__(self, gradient, y, at):
        return gradient.sign()


@each_phase
def test_another_direction_has_no_form_and_no_proof(algorithm):
    """Neither a function in its place nor a subclass is taken for the one that it replaces."""
    _, _, at = stack(algorithm)
    form = getattr(algorithm.direction, "form", None)
    for other in (lambda gradient, y, at: gradient.sign(), Signed(form)):
        changed = algorithm.replace(direction=other)
        assert changed.form(at, PROVED_FIELDS) is None and not changed.one_sum


def test_the_uploads_of_these_alone_are_proved_to_be_linear():
    proved = {name for name, algorithm in PHASES.items() if algorithm.one_sum}
    assert proved == {"fedavg", "fedsgd", "fedprox", "fedadam"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_warm_up_comes_first(name):
    """Rounds 1 to w belong to the warm-up where there is one, the rest to the algorithm."""
    made = ALGORITHMS[name]()
    expected = [made.warm_up or made] * 2 + [made] * 2
    if made.warm_up is not None:  # it measures where it stands
        gradient, local, at = stack(made.warm_up)
        assert not made.warm_up.direction(gradient, local.params, at).any()
        stood = Local(at.broadcast.params, local.mean_gradient)
        assert not made.warm_up.finish(stood, at)[0].params.any()
    assert [made.phase(round, 2) for round in (1, 2, 3, 4)] == expected
    assert made.phase(1, 0) == made
    assert replace(made, title="").shown == name
