"""Every ε, δ and σ that is shown is rounded up."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import dpscaffold
from dpscaffold.privacy import digits_up, percent, round_up

#: What is left of a budget, which is rounded down or shown in full.
LEFT = {"{epsilon:.6g}", "{int(epsilon * 1000) / 1000:.3f}"}


@given(st.floats(0, 1e6, allow_nan=False), st.integers(0, 6))
def test_an_epsilon_is_never_shown_smaller_than_it_is(value, digits):
    shown = Fraction(round_up(value, digits))
    assert Fraction(value) <= shown < Fraction(value) + Fraction(1, 10**digits)


@given(st.floats(1e-30, 1e6))
def test_a_delta_is_never_shown_smaller_than_it_is(value):
    assert value <= float(digits_up(value)) <= value * 1.0101


@given(st.floats(0.0, 1.0))
def test_percentages_are_never_too_small(value):
    assert value * 100 <= float(percent(value).split()[0]) <= min(100.0, value * 100 + 0.1001)


def test_no_message_rounds_an_epsilon_by_itself():
    """Formats such as {epsilon:.3f} round to the nearest; :g is for what a user gave."""
    sources = (path.read_text() for path in Path(dpscaffold.__file__).parent.rglob("*.py"))
    found = {f for text in sources for f in re.findall(r"\{[^{}]*epsilon[^{}]*:\.\d*[fge]\}", text)}
    assert found <= LEFT
