"""The reference of keys: whole, current, and true of the code."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from dpscaffold.config import parse
from dpscaffold.errors import BadInput
from dpscaffold.reference.keys import keys, words
from dpscaffold.reference.page import annotated, page, stored

HERE = Path(__file__).parents[2]
FOUND = keys()
AGAIN = "run python -m dpscaffold.reference"


def test_the_stored_reference_is_current():
    kept = files("dpscaffold.reference").joinpath("keys.json").read_text(encoding="utf-8")
    assert kept == stored(FOUND), AGAIN
    assert (HERE / "docs" / "configuration.md").read_text(encoding="utf-8") == page(FOUND), AGAIN
    kept = (HERE / "examples" / "annotated.toml").read_text(encoding="utf-8")
    assert kept == annotated(FOUND), AGAIN


def test_the_annotated_configuration_says_the_defaults():
    """What it spells out is what a configuration without those keys would come to."""
    told = parse(tomllib.loads(annotated(FOUND)))
    assert told == parse({"privacy": {"noise": 30.0}})


@pytest.mark.parametrize("name", [n for n in words() if n.split(".")[0] in ("plan", "privacy")])
def test_examples_are_accepted_and_refused_values_are_refused(name):
    table, _, key = name.partition(".")
    entry = words()[name]
    base = ({"noise": 1.0} if table == "privacy" else {}) | entry.get("with", {})
    for other in entry.get("without", ()):
        base.pop(other, None)
    read = getattr(parse({table: {**base, key: entry["example"]}}), table)
    given, found = entry["example"], getattr(read, key)
    assert found == given or list(found) == given
    if "refused" in entry:
        with pytest.raises(BadInput, match=key):
            parse({table: {**base, key: entry["refused"]}})
