"""No noise is used twice: not for two users, two rounds or two steps, not with the other sign, and
not in two secret runs of one configuration.

The noise of every step is captured inside the engine, as a step receives it, so a vector that is
used again shows as a correlation of ±1 where independent vectors have less than 0.1.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from small import ENGINES
from statistical.captured import SIZE, queries, uncorrelated

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.randomness.csprng import CipherStream
from dpscaffold.randomness.streams import NOISE, NoiseStreams, OneRound, Randomness

each_engine = pytest.mark.parametrize("engine", ENGINES)
each_privacy = pytest.mark.parametrize(
    "privacy",
    [Gaussian(1.0, 1.0), Gaussian(1.0, 1.0, "poisson", secret=True)],
    ids=["from a seed", "secret"],
)


def reused(engine: str = "simulator", privacy: Gaussian | None = None, **plan: object) -> set[str]:
    """What two vectors that are correlated have in common, of all (round, step, user): words of
    "round", "step" and "user", or "nothing"."""
    noise = queries(engine, "scaffold", privacy or Gaussian(1.0, 1.0), (6, 6, 6), **plan)
    shape = noise.shape[:3]
    vectors = noise.reshape(-1, SIZE)
    found = set()
    for i, j in zip(*np.triu_indices(len(vectors), 1), strict=True):
        if not uncorrelated(vectors[i], vectors[j]):
            places = zip(np.unravel_index(i, shape), np.unravel_index(j, shape), strict=True)
            alike = [
                name
                for name, (a, b) in zip(("round", "step", "user"), places, strict=True)
                if a == b
            ]
            found.add(" and ".join(alike) or "nothing")
    return found


def noise_of_two_runs() -> tuple[np.ndarray, np.ndarray]:
    """All noise of two secret runs of one configuration, with a seed for what is public."""
    secret = Gaussian(1.0, 1.0, secret=True)
    one, two = (queries("simulator", "scaffold", secret, (6, 6), seed=7) for _ in range(2))
    return one.reshape(-1, SIZE), two.reshape(-1, SIZE)


@each_engine
@each_privacy
def test_users_rounds_and_steps_have_independent_noise(engine, privacy):
    assert reused(engine, privacy) == set()


@each_engine
def test_neighbouring_numbers_of_a_vector_are_independent(engine):
    noise = queries(engine, "scaffold", Gaussian(1.0, 1.0), (6, 6, 6)).reshape(-1, SIZE)
    assert uncorrelated(noise[:, 1:], noise[:, :-1])
    assert not uncorrelated(noise[0], noise[0] + 2 * noise[1])


def test_secret_runs_of_one_configuration_have_nothing_in_common():
    one, two = noise_of_two_runs()
    assert all(uncorrelated(a, b) for a in one for b in two)


# --- planted mistakes -------------------------------------------------------------------------


def noise_from(monkeypatch, address, signed=False):
    """Every user's noise in a round comes from the stream of ``address(round, user)``, which says
    with which sign, too, if ``signed``."""
    proper = Randomness.normals

    def normals(self, round, user):
        *where, sign = address(round, user) if signed else (*address(round, user), 1)
        stream = proper(self, *where)
        return Negative(stream) if sign < 0 else stream

    monkeypatch.setattr(Randomness, "normals", normals)


class Negative:
    """A stream of normals, each with the other sign."""

    def __init__(self, stream):
        self.stream = stream

    def standard_normal(self, dtype, out):
        np.negative(self.stream.standard_normal(dtype=dtype, out=out), out=out)


@pytest.mark.parametrize(
    "address",
    [
        lambda round, user: (round, 0),
        lambda round, user: (round, user // 2),
    ],
    ids=["by all", "by two"],
)
def test_noise_shared_by_users(monkeypatch, address):
    noise_from(monkeypatch, address)
    assert reused() == {"round and step"}


def test_noise_numbered_by_round_plus_user(monkeypatch):
    """That of one user is that of the next a round later."""
    noise_from(monkeypatch, lambda round, user: (0, round + user))
    assert reused() == {"step"}


@pytest.mark.parametrize("period", [1, 2])
def test_noise_that_repeats_every_round_or_every_other_one(monkeypatch, period):
    noise_from(monkeypatch, lambda round, user: (round % period, user))
    assert reused() == {"step and user"}


def test_a_key_per_user(monkeypatch):
    """Secret noise from a key that a user draws once, in place of one for every participation."""
    keys = {}

    def private(self, *address):
        purpose, round, user = address
        kept = user if purpose == NOISE else (round, user)
        return CipherStream(keys.setdefault((purpose, kept), os.urandom(32)))

    for streams in (Randomness, OneRound):
        monkeypatch.setattr(streams, "_private", private)
    assert reused(privacy=Gaussian(1.0, 1.0, secret=True)) == {"step and user"}


def test_secret_noise_that_came_from_the_seed(monkeypatch):
    for streams in (Randomness, OneRound):
        monkeypatch.setattr(streams, "_private", lambda self, *address: self._stream(*address))
    one, two = noise_of_two_runs()
    assert not uncorrelated(one, two)


@pytest.mark.parametrize(
    ("address", "common"),
    [
        (lambda round, user: (round, user // 2, (-1) ** user), "round and step"),
        (lambda round, user: (round // 2, user, (-1) ** round), "step and user"),
    ],
    ids=["users", "rounds"],
)
def test_antithetic_noise(monkeypatch, address, common):
    """The noise of one user, or of one round, with the other sign in the next: sums cancel it."""
    noise_from(monkeypatch, address, signed=True)
    assert reused() == {common}


def test_antithetic_noise_of_local_steps(monkeypatch):
    """The noise of the second step takes that of the first off again."""
    proper = NoiseStreams.draw

    def draw(self, steps):
        drawn = proper(self, steps).copy()
        drawn[1] = -drawn[0]
        return drawn

    monkeypatch.setattr(NoiseStreams, "draw", draw)
    assert reused(local_steps=2) == {"round and user"}
