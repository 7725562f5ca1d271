"""The page about the architecture says what is: its layers are tested, its paths are called."""

from __future__ import annotations

import html
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_layers import LAYERS

TREE = Path(__file__).parents[2]


def drawing() -> ModuleType:
    """docs/architecture.py, which reads the page."""
    spec = importlib.util.spec_from_file_location("architecture", TREE / "docs/architecture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> dict[str, list[list[str]]]:
    page = (TREE / "docs/architecture.md").read_text(encoding="utf-8")
    found: dict[str, list[list[str]]] = drawing().tables(page)
    assert list(found) == ["Layers", "From a CSV file to a prediction", "One round across sites"]
    return found


def test_the_layers_are_those_that_imports_keep_to(tables):
    shown = tuple(" ".join(drawing().names(row[1])) for row in tables["Layers"])
    assert shown == LAYERS


@pytest.fixture(scope="module")
def walks(tmp_path_factory) -> dict[str, list[str]]:
    """What the script prints for each walk: functions in order, and the counts."""
    words = [sys.executable, str(TREE / "benchmarks/walks.py"), "--functions"]
    place = tmp_path_factory.mktemp("walks")
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=place)
    train, first, *rest = done.stdout.strip().split("\n\n")
    counts, predict = first.split("\n", 4)[:4], first.split("\n", 4)[4]
    count, deployed = rest[0].split("\n", 1)
    return {
        "train": train.split("\n"),
        "predict": predict.split("\n"),
        "deployed": deployed.split("\n"),
        "counts": [*counts, count, rest[1]],
    }


def test_the_paths_are_those_that_real_runs_take(tables, walks):
    predict = walks["predict"]
    for heading, calls in (
        ("From a CSV file to a prediction", walks["train"] + predict[predict.index(LOADED) :]),
        ("One round across sites", walks["deployed"]),
    ):
        steps = [drawing().names(row[1])[0] for row in tables[heading]]
        places = [calls.index(step) for step in steps]
        assert places == sorted(places), heading


#: Changes of package on a walk, at most. With slack: a new call between packages is no mistake, a
#: few of them are worth a look.
MOST = {"train": 77, "predict": 40, "deployed": 92}


def test_call_paths_change_packages_a_limited_number_of_times(walks):
    """A setting is made once, and each of the two tables is validated once."""
    lines = [line.split() for line in walks["counts"]]
    changes = {words[-1]: int(words[0]) for words in lines if "package:" in words}
    assert changes.keys() == MOST.keys()
    assert all(10 < changes[name] <= most for name, most in MOST.items()), changes
    assert [int(words[0]) for words in lines if "×" in words] == [1, 2, 1], lines


#: Where the second half of the first path begins: a run reads models too, to report on them.
LOADED = "models/loading.py:load_model"


def test_the_picture_is_drawn_from_the_page(tables):
    picture = html.unescape((TREE / "docs/architecture.svg").read_text(encoding="utf-8"))
    for row in tables["Layers"]:
        assert all(f">{package}</text>" in picture for package in drawing().names(row[1]))
    for heading in list(tables)[1:]:
        for _, cell, says in tables[heading]:
            place, _, function = drawing().names(cell)[0].partition(":")
            assert f">{place}: {function}</text>" in picture and f">{says}</text>" in picture
