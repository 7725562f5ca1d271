"""(features, classes) by the settings alone, next to the data and what their publishers say."""

from __future__ import annotations

import math
import re

import pytest

from dpscaffold.data import load_federation, parse_data
from dpscaffold.data.config import SOURCES
from dpscaffold.data.shapes import READ, shape_of
from dpscaffold.data.sources.catalogue import CATALOGUE


@pytest.mark.parametrize(
    "table",
    [
        {"users": 2, "records": 10, "dimension": 7, "classes": 3},
        {"source": "digits", "users": 4},
        {"source": "digits", "users": 4, "preprocess": ["centre", "pca:9", "unit-norm"]},
    ],
)
def test_the_data_have_the_shape_that_their_settings_tell(table):
    made = load_federation(table)
    assert shape_of(parse_data(table)) == (made.dimension, made.classes)


@pytest.mark.parametrize("source", sorted(set(CATALOGUE) & set(SOURCES)))
def test_images_have_the_shape_that_the_catalogue_states(source):
    sides, classes = re.search(
        r"(\d[\d ×]*), (?:up to )?(\d+) classes", CATALOGUE[source].about
    ).groups()
    split = {"split": "byclass"} if source == "emnist" else {}
    found = shape_of(parse_data({"source": source, **split}))
    assert found == (math.prod(map(int, sides.split("×"))), int(classes))


def test_tables_and_stored_data_do_not_tell():
    table = {"source": "csv", "path": "a.csv", "label": "y", "user": "u"}
    assert shape_of(parse_data(table)) is None
    assert shape_of(parse_data({**table, "preprocess": ["centre", "pca:2"]})) is None
    assert shape_of(parse_data({"source": "saved", "path": "folder"})) is None


def test_every_source_that_is_listed_exists():
    assert READ.keys() <= SOURCES.keys()
