"""What a draft chooses to train with: by the shape of the federation, and said with its reasons."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dpscaffold.cli import app
from dpscaffold.config import parse
from dpscaffold.data.drafts.draft import loud_site, random_sizes, row_norm, run_lines, standardised
from dpscaffold.planning.facts import Facts
from dpscaffold.privacy import Part, state

HOSPITALS = {"charite": 720, "oslo": 500, "lyon": 400, "lille": 10}


def tables(sizes=HOSPITALS, target="class", columns=20, labels=1, epsilon=2.0):
    norm = row_norm(columns)
    lines = [*standardised(norm), *run_lines(sizes, target, norm, labels, epsilon)]
    text = "\n".join(lines)
    return tomllib.loads(text), text


def test_the_plan_is_gradient_descent_on_all_records():
    found, _ = tables()
    plan = found["plan"]
    assert found["algorithm"] == {"name": "fedavg"}
    assert (plan["local_steps"], plan["data_ratio"], plan["user_ratio"]) == (1, 1.0, 1.0)
    assert plan["weighting"] == "records" and "learning_rate" not in plan
    assert found["privacy"]["sampling"] == "poisson" and found["privacy"]["secret"] is True


@pytest.mark.parametrize(("sites", "heard"), [(3, 3), (200, 200), (201, 200), (1000, 200)])
def test_all_sites_take_part_up_to_two_hundred(sites, heard):
    found, _ = tables({str(site): 40 for site in range(sites)})
    assert int(found["plan"]["user_ratio"] * sites + 1e-9) == pytest.approx(heard, abs=1)


@pytest.mark.parametrize(
    ("target", "columns", "labels", "norm", "clip"),
    [
        ("class", 1, 1, 1, 1.4),
        ("class", 30, 1, 3, 3.2),
        ("number", 4, 1, 2, 0.56),
        ("labels", 30, 8, 3, 6.3),
    ],
)
def test_rows_and_clip_suit_each_other(target, columns, labels, norm, clip):
    found, _ = tables(target=target, columns=columns, labels=labels)
    assert found["preprocess"] == ["standardise", f"clip-norm:{norm}"]
    assert found["privacy"]["clip"] == clip
    assert found["task"]["kind"] == ("linear" if target == "number" else "logistic")


def test_a_site_that_would_drown_the_others_is_named():
    _, text = tables()
    said = "lille has 10 records: counted like charite, its noise would be 72 times charite's"
    assert f'weighting = "records"  # {said}' in text and loud_site(HOSPITALS) == said
    assert loud_site({"a": 40, "b": 50, "c": 60}) is None
    assert loud_site({"a": 5, "b": 50, "c": 60}) is None  # left out anyway
    tables({"two\nlines": 10, "b": 500, "c": 600})  # a name cannot break the file


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_the_epsilon_of_replacing_is_that_of_the_statement(epsilon):
    """The comment next to the one that the run would state, for the same records."""
    sizes = {str(site): 100 for site in range(8)}
    found, text = tables(sizes, epsilon=epsilon)
    shown = float(re.search(r"content, and about ([0-9.]+) for replacing", text)[1])
    plan = {**found["plan"], "learning_rate": 0.1}
    settings = parse({"plan": plan, "algorithm": found["algorithm"], "privacy": found["privacy"]})
    roster = Facts.of(users=8, records=80, features=5, classes=2).roster
    run = settings.setting(roster).describe()
    said = state([Part(run, run.rounds)]).towards("server")
    assert said.epsilon == pytest.approx(epsilon, rel=1e-3)
    assert shown == pytest.approx(said.replace_one, rel=0.06)  # two digits


@pytest.mark.parametrize("epsilon", [1e-9, 1e6])
def test_extreme_budgets_are_drafted_without_a_number(epsilon):
    assert "more than twice as much for replacing" in tables(epsilon=epsilon)[1]


def test_records_of_no_site_are_partitioned_into_sites_that_are_large_enough():
    assert list(random_sizes(500).values()) == [50] * 10
    assert list(random_sizes(45).values()) == [11] * 4 and list(random_sizes(3).values()) == [3]


def test_init_names_the_site_and_what_the_draft_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site, count in (("big", 300), ("middle", 150), ("tiny", 12)):
        rows = [f"{v:.2f},{int(v > 0)}" for v in rng.normal(size=count)]
        (tmp_path / f"{site}.csv").write_text("x,ill\n" + "\n".join(rows) + "\n")
    done = CliRunner().invoke(app, ["init", str(tmp_path), "--out", str(tmp_path / "c.toml")])
    assert done.exit_code == 0, done.output
    assert "tiny has 12 records: counted like big, its noise would be 25 times big's" in done.output
    assert 'weighting = "records" keeps it quiet' in done.output
