"""The comparison with version 0.2.0: its rule for numbers, and the list of what is meant."""

from __future__ import annotations

import pytest
from frozen import make
from frozen.compare.__main__ import Accepted, unnamed
from frozen.compare.difference import Difference, differences, fault

REFUSED = {"refused": "no-guarantee"}


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        (1.0, 1.0, ""),
        (1.0, 1.0004, ""),
        (4.0, 4.0019, ""),
        (1.0, 1.0006, "larger"),
        (1.0, 1 - 2e-9, "smaller"),
        ([1.0, 2.0], [1.0, 1.9], "smaller"),
        ([1.0, 2.0], [1.0], "not as many"),
        ("infinite", 3.0, "smaller"),
        (3.0, "infinite", "larger"),
        ("infinite", "infinite", ""),
        (REFUSED, {"refused": "another code"}, ""),
        (REFUSED, 9.0, "was refused"),
        (9.0, REFUSED, "is refused"),
        (1.0, None, "one of the two"),
        (None, 1.0, "one of the two"),
        (True, False, "not the same"),
        ("a", "b", "not the same"),
    ],
)
def test_what_is_wrong_with_a_number(old, new, wrong):
    found = fault(old, new)
    assert bool(found) == bool(wrong) and wrong in found


def test_a_refusal_of_the_whole_is_no_number():
    keys = ["server"]
    (one,) = differences("m", REFUSED, {"server": 1.0}, keys)
    assert one.why == "was refused, and is not"
    (one,) = differences("m", {"server": 1.0}, REFUSED, keys)
    assert one.why == "is refused, and was not"
    (one,) = differences("m", {"server": 1.0}, {}, keys)
    assert one.why


def test_only_what_the_changelog_names_is_meant():
    entry = Accepted("mechanisms/*:*repeats*/*", "one more participation", "A repeated round")
    assert unnamed([entry], "- Nothing.") and not unnamed([entry], "- A repeated\n round counts.")
    assert unnamed([Accepted("*", "because", " ")], "- Anything.")
    assert entry.covers(Difference("mechanisms/007:repeats/server", 1.0, 1.1, "larger"))
    assert not entry.covers(Difference("mechanisms/007:single/server", 1.0, 1.1, "larger"))
    larger = Accepted("*", "because", "words", why="larger*")
    assert not larger.covers(Difference("m", 1.0, 0.9, "smaller than it was"))


@pytest.mark.parametrize("kind", sorted(make.MAKERS))
def test_the_frozen_inputs_are_those_of_their_script(kind):
    frozen = [(case["id"], case["given"]) for case in make.read(kind)]
    assert frozen == [*make.MAKERS[kind]()]


def test_what_is_no_epsilon_has_no_tolerance():
    (one,) = differences("h", {"delta": 1e-5}, {"delta": 2e-5}, ["delta"])
    assert one.why


def test_every_frozen_caveat_has_a_name():
    """A sentence of no known kind could be lost without a word."""
    named = {name for case in make.read("statements") for name in case["said"].get("caveats", [])}
    assert "other" not in named and len(named) > 6
