"""The comparisons of small runs, published tables and offers with version 0.2.0."""

from __future__ import annotations

import tomllib
from typing import Any

import numpy as np
from frozen import configurations, make, results
from frozen.compare.configurations import RENAMES, apart, renamed
from frozen.compare.offers import of_case


def test_keys_move_change_their_words_or_go():
    words = {
        "dropped": ["plan.tail"],
        "renamed": {"privacy.clip": "query.norm", "secure": "masks"},
        "values": {"query.norm": {"median": "half"}},
    }
    old = {"plan": {"rounds": 2, "tail": 0.1}, "privacy": {"clip": "median"}, "secure": {"k": 1}}
    new = {"plan": {"rounds": 2}, "privacy": {}, "query": {"norm": "half"}, "masks": {"k": 1}}
    assert renamed(old, words) == new
    assert old["privacy"] == {"clip": "median"}


def test_arrays_are_apart_by_values_shape_or_no_number():
    old = np.array([1.0, -4.0], np.float32)
    assert not apart("a", old, old + np.float32(3e-4), 1e-4).why
    for new in (old + 5e-4, old[:1], np.array([1.0, np.nan]), None):
        assert apart("a", old, new, 1e-4).why


def test_every_run_has_its_arrays():
    frozen = configurations.frozen()
    assert list(frozen) == [run.id for run in configurations.read()] and len(frozen) >= 40
    for arrays in frozen.values():
        assert arrays["features"].shape[0] <= configurations.ROWS
        assert all(np.isfinite(array).all() and array.any() for array in arrays.values())


def test_another_step_size_is_noticed():
    run = next(run for run in configurations.read() if run.id == "fedavg")
    plan = {**run.tables["plan"], "learning_rate": 0.5002}
    tables = renamed({**run.tables, "plan": plan}, tomllib.loads(RENAMES.read_text("utf-8")))
    new = configurations.made(tables)["parameters"]
    assert apart("a", configurations.frozen()[run.id]["parameters"], new, run.tolerance).why


def test_tables_are_read_as_their_numbers():
    first = "Words 7.\n\n| K | mean |\n|---|---|\n| 1 | 2.50 ± 0.1 |\n| 10 | −1e-3 |\n"
    page = first + "\n| a |\n|---|\n| 3 |\n"
    assert list(results.tables(page)) == [[["1", "2.50", "0.1"], ["10", "−1e-3"]], [["3"]]]


def test_another_price_and_other_terms_of_an_offer_are_noticed():
    renames = tomllib.loads(RENAMES.read_text(encoding="utf-8"))

    def said(given: dict[str, Any], old: dict[str, Any]) -> set[str]:
        found = of_case("one", given, old, renames)
        return {one.why.split(":")[0] for one in found if one.why}

    granted = (case for case in make.read("offers") if case["said"].get("epsilon"))
    case = next(case for case in granted if "offer" in case["given"])
    given, old = case["given"], case["said"]
    assert said(given, old) == set()
    assert said(given, {**old, "epsilon": old["epsilon"] * 1.001}) == {"smaller than it was"}
    assert said(given, {**old, "participations": old["participations"] - 1}) >= {
        "more participations than were permitted"
    }
    assert said(given, {"refused": "policy-epsilon"}) == {"was refused, and is not"}
    other = {**given["offer"], "plan": {**given["offer"]["plan"], "rounds": 7}}
    assert "other terms" in said({**given, "offer": other}, old)
