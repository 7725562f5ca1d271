"""What init takes for a gap, what it only points out, and that the draft trains."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typed import typed

from dpscaffold.config import parse
from dpscaffold.data import load_federation
from dpscaffold.data.drafts.draft import draft
from dpscaffold.data.drafts.guesses import markers_in, pointed_out
from dpscaffold.data.drafts.profile import look

NOTHING = ("?", "-", ".", "--", "k. A.", "n.a.", "Unknown", "unbekannt", "N/D", "not done")


@settings(max_examples=60)
@given(
    numbers=st.lists(st.floats(-500, 500).map(lambda x: f"{x:.2f}"), min_size=5, max_size=40),
    na_values=st.lists(st.sampled_from([*NOTHING, " ? "]), max_size=30),
    telling=st.sampled_from(["<5", "12 kg", "> 100", "1-2", "B12"]),
    data=st.data(),
)
def test_words_for_nothing_among_numbers_are_na_values(numbers, na_values, telling, data) -> None:
    """Whatever their number and order; one text that tells something, and none of them is."""
    cells = data.draw(st.permutations([*numbers, *na_values]))
    expected = {gap.strip(): 0 for gap in na_values} if len({*numbers}) > 1 else {}
    found = markers_in([*cells, None])
    assert found.keys() == expected.keys()
    assert sum(found.values()) == (len(na_values) if expected else 0)
    assert markers_in([*cells, telling, telling]) == {}


DAYS = [f"{i % 28 + 1:02d}.01.2023" for i in range(60)]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([*DAYS, "?", "?"], {"?": 2}),
        ([*map(str, range(60)), "nix", "nix"], {"nix": 2}),  # no known word, but repeated and rare
        ([*map(str, range(60)), "nix"], {}),  # once
        ([*map(str, range(60)), *["nix"] * 10], {}),  # often
        ([*map(str, range(60)), *["nix", "nax", "?"] * 2], {"nix": 2, "nax": 2, "?": 2}),
        ([*map(str, range(60)), *["nix", "nax", "nad"] * 2], {}),  # three unknown ones
        (["+", "-", "-", "+", "?"], {}),  # a category
        ([*map(str, range(60)), *["+"] * 10], {}),  # it says something
        (["1", "-", "1", "-"], {}),  # a single number tells nothing next to its absence
        (["9999", "1", "2", "9999", "9999"], {}),
        ([None, None], {}),
        ([], {}),
    ],
)
def test_what_is_taken_for_a_gap(cells, expected) -> None:
    assert markers_in(cells) == expected


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["70", "82.5", "64", *["9999"] * 3], {"9999": 3}),
        (["70", "82.5", "64", *["9999"] * 2], {}),  # may be chance
        (["70", "82.5", "6400", *["9999"] * 3], {}),  # not far
        (["70", "82.5", "64", *["-9.0"] * 4], {"-9": 4}),
        (["-3", "82.5", "64", *["-9"] * 4], {}),  # temperatures
        (["9999"] * 5, {}),  # nothing else
        (["yes", "no", "?", "?"], {"?": 2}),
        (["+", "-", "-"], {}),
        (["low", "high", None], {}),
    ],
)
def test_what_is_only_pointed_out(cells, expected) -> None:
    assert pointed_out(cells) == expected


def rows_of(site: int, mark: str) -> list[str]:
    """People of a site that writes its own marker; every column lacks some, -9 is a weight's."""
    draw = np.random.default_rng(site)
    lines = ["age,weight,seen,ward,ill"]
    for i in range(50):
        weight = "-9" if i % 11 == 5 else mark if i % 9 == 4 else f"{draw.normal(70, 9):.1f}"
        age = mark if i % 7 == 3 else str(draw.integers(20, 90))
        day = mark if i % 13 == 6 else f"2023-0{i % 9 + 1}-1{i % 10}"
        ward = mark if i % 10 == 9 else "abc"[i % 3]
        lines.append(f"{age},{weight},{day},{ward},{mark if i == 20 else draw.integers(2)}")
    return lines


def test_ten_hospitals_with_markers_of_their_own(tmp_path: Path, monkeypatch, capsys) -> None:
    """init, train, predict, with what is only pointed out taken over by hand."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    marks = ("?", "-", ".", "k. A.", "unknown", "n/a", "", "NA", "unbekannt", "?")
    for site, mark in enumerate(marks):
        Path(f"sites/s{site}.csv").write_text("\n".join(rows_of(site, mark)) + "\n")
    code, out, err = typed(monkeypatch, capsys, "init", "sites")
    assert code == 0 and "weight: number" in out and "'-9' mean missing?" in out, err
    found = {column.name: column for column in look(Path("sites")).columns}
    own = {"?", "-", ".", "k. A.", "unknown", "unbekannt"}
    for name in ("age", "weight", "seen", "ill"):
        assert {*found[name].na_values} == own, name
    assert not found["ward"].na_values and {*found["ward"].maybe} == own
    assert found["weight"].maybe == {"-9": 50} and found["weight"].missing
    drafted = Path("sites.toml").read_text()
    na_values = tomllib.loads(drafted)["data"]["na_values"]
    assert {*na_values} == {"age", "weight", "seen", "ill"}
    assert all({*listed} == own for listed in na_values.values())
    assert f"in {sum(found['age'].na_values.values())} of 500 rows" in drafted
    lines = drafted.splitlines()
    first = next(line for line in lines if line.startswith('na_values."weight"'))
    taken = [line.removeprefix("# ") if line.startswith("# na_values.") else line for line in lines]
    Path("sites.toml").write_text("\n".join(line for line in taken if line != first))
    short = ["--set", "plan.rounds=2", "--set", "plan.learning_rate=0.1", "--out", "r"]
    code, _, err = typed(monkeypatch, capsys, "train", "sites.toml", *short)
    assert code == 0 and "10 of 500 records lack a value" in " ".join(err.split()), err
    assert "which it never holds" not in err and "which no column holds" not in err
    code, out, err = typed(monkeypatch, capsys, "predict", "r", "sites/s3.csv")
    assert code == 0 and not [line for line in out.splitlines() if line.startswith(",")], err
    code, out, _ = typed(monkeypatch, capsys, "data", "describe", "sites.toml")
    assert "has 2 classes, numbered in this order: 0, 1" in out
    assert "column 'ward' is one-hot: a, b, c" in out


def test_a_draft_trains_on_numbers_that_parquet_holds_as_texts(tmp_path: Path) -> None:
    """With and without missing values among them; the files that spreadsheets make hold such
    columns."""
    ages = ["?" if i % 9 == 4 else str(i % 50) for i in range(80)]
    columns = {"age": ages, "stay": [f"{i % 7}.5" for i in range(80)]}
    columns["site"] = ["ns"[i % 2] for i in range(80)]
    columns["ill"] = ["yn"[i * 7 % 4 < 2] for i in range(80)]
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    found = look(tmp_path / "t.parquet")
    settings = parse(tomllib.loads(draft(found, 1.0)))
    federation = load_federation(settings.data)
    assert federation.dimension == 3  # age, whether it is there, stay
    assert len(federation.train) + len(federation.test) == 80
